"""What a round costs as the population grows and the number of clients that take part does not."""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy

from measuring import Progress, Result, Table, parse_arguments

VECTORS, NUMBERS, CLASSES, TESTED = 20, 64, 10, 2000
"""Of each client, in each vector, in all, and how many vectors are held out."""


@dataclass(frozen=True)
class Case:
    """A population, and how much of it takes part in a round."""

    clients: int
    fraction: float
    rounds: int
    settled: int
    """The round after which memory should not grow any more."""

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.clients:,} clients, {round(self.clients * self.fraction):,} per round"


CASES = (
    Case(1_000, 1.0, 50, 10),
    Case(10_000, 0.1, 50, 10),
    Case(100_000, 0.01, 50, 10),
    Case(10_000, 0.01, 500, 50),
)
QUICK = (Case(100, 1.0, 4, 2), Case(400, 0.25, 4, 2))


def make_vectors(clients: int, folder: Path) -> None:
    """Write a cluster per class, overlapping enough that the answer is not given away."""
    draw = numpy.random.default_rng(0)
    count = clients * VECTORS
    centres = draw.normal(size=(CLASSES, NUMBERS)).astype(numpy.float32)
    labels = draw.integers(0, CLASSES, count + TESTED)
    vectors = centres[labels] + 2 * draw.standard_normal(
        (count + TESTED, NUMBERS), dtype=numpy.float32
    )
    folder.mkdir(parents=True)
    numpy.savez(
        folder / "vectors.npz",
        x_train=vectors[:count],
        y_train=labels[:count],
        x_test=vectors[count:],
        y_test=labels[count:],
    )


def run_case(case: Case, folder: Path, out: Path) -> dict[str, Any]:
    """Run one case by the command and watch its memory from outside, round by round."""
    words = {
        "--dataset.name": "folder",
        "--dataset.root": str(folder),
        "--clients": str(case.clients),
        "--fraction": str(case.fraction),
        "--rounds": str(case.rounds),
        "--partition.kind": "classes",
        "--partition.test": "shared",
        "--prototypes.per-class": "2",
        "--prototypes.pool-size": "20",
        "--model.hidden": "64",
        "--train.lr": "0.05",
        "--evaluate-every": str(case.rounds),
        "--out": str(out),
    }
    flat = [word for pair in words.items() for word in pair]
    command = [sys.executable, "-m", "mpfedcl", "run", "--no-personal-models", *flat]
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    resident: dict[int, int] = {}
    first = None
    while process.poll() is None:
        done = _count_rounds(out)
        first = first or (time.monotonic() - began if done else None)
        resident[done] = max(resident.get(done, 0), tree_bytes(process.pid))
        time.sleep(0.05 if not done else 0.2)
    if process.returncode:
        assert process.stderr is not None
        raise RuntimeError(process.stderr.read().decode()[-2000:])
    records = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    return {
        "case": case.name,
        "rounds": case.rounds,
        "first_round_seconds": first,
        "round_seconds": [_seconds(record) for record in records],
        "phases": {
            phase: median(r["seconds"].get(phase, 0.0) for r in records[1:-1])
            for phase in records[1]["seconds"]
        },
        "evaluate_seconds": records[-1]["seconds"].get("evaluate", 0.0),
        "all_seconds": time.monotonic() - began,
        "resident": resident,
        "accuracy": records[-1]["accuracy"]["global_test"],
        "files_bytes": sum(f.stat().st_size for f in out.rglob("*") if f.is_file()),
    }


def _seconds(record: dict[str, Any]) -> float:
    return float(sum(t for phase, t in record["seconds"].items() if phase != "evaluate"))


def _count_rounds(out: Path) -> int:
    try:
        with (out / "rounds.jsonl").open("rb") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


def tree_bytes(root: int) -> int:
    """Return the memory of a process and its descendants; pages that they share count once."""
    found, total = [root], 0
    for pid in found:
        try:
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                found += map(int, children.read_text().split())
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().split()
            total += 1024 * int(rollup[rollup.index("Pss:") + 1])
        except (OSError, ValueError):
            continue
    return total


def _row(case: Case, found: dict[str, Any], reference: float) -> list[str]:
    usual = median(found["round_seconds"][1:])
    resident = {int(number): size for number, size in found["resident"].items()}
    # Loading takes memory that rounds do not.
    before = max((size for n, size in resident.items() if 0 < n <= case.settled), default=0)
    # The last round is evaluated, which takes memory of its own.
    after = max((s for n, s in resident.items() if case.settled < n < case.rounds - 1), default=0)
    return [
        case.name,
        str(case.rounds),
        f"{found['first_round_seconds']:.1f}",
        f"{1000 * usual:,.0f}",
        f"{usual / reference:.2f}",
        f"{found['evaluate_seconds']:.1f}",
        f"{max(resident.values()) / 2**20:,.0f}",
        f"{100 * (after / before - 1):+.1f} % after round {case.settled}" if before else "-",
        f"{found['files_bytes'] / 1e6:,.1f}",
    ]


def main() -> None:
    """Measure and write."""
    arguments = parse_arguments(__doc__)
    os.environ.pop("OMP_NUM_THREADS", None)
    progress, rows = Progress(), []
    result = Result("population", (__doc__ or "").strip(), arguments.quick)
    reference = None
    for case in QUICK if arguments.quick else CASES:
        progress.say(case.name)
        with tempfile.TemporaryDirectory() as name:
            make_vectors(case.clients, Path(name) / "data")
            found = run_case(case, Path(name) / "data", Path(name) / "run")
        reference = reference or median(found["round_seconds"][1:])
        rows.append(_row(case, found, reference))
        result.data[f"{case.name}, {case.rounds} rounds"] = found
    headers = [
        "population",
        "rounds",
        "round 1 done after s",
        "ms per round",
        "times the first row",
        "evaluation s",
        "peak MiB",
        "growth",
        "files MB",
    ]
    result.tables.append(Table("MP-FedCL, head model, pool-size 20", headers, rows))
    result.notes += [
        f"`mpfedcl run` with its default workers; {VECTORS} vectors of {NUMBERS} numbers per "
        "client, two classes each. A round counts everything but evaluation, checkpoints included; "
        "evaluation reads the last round: the global model for all clients, and 10 to 100 "
        "personal models.",
        "Memory is of all processes of the run, pages that they share counted once; its growth "
        "compares the highest after that round with the highest up to it.",
    ]
    progress.close()
    result.write(arguments.out)


if __name__ == "__main__":
    main()
