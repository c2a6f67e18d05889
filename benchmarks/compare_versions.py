"""Compare round time, start-up and memory of two checkouts.

    python benchmarks/compare_versions.py --before ../old/.venv/bin/python

Each checkout is given by the interpreter of its environment; the second one is this interpreter.
Runs of the two alternate, so that a slow spell of the machine affects both.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from measuring import RESULTS, Progress, Result, Spread, Table, interleave
from population import make_vectors, tree_bytes

DIGITS = ("--partition.kind", "iid", "--train.lr-decay", "1.0")
VECTORS = (
    *("--dataset.name", "folder", "--partition.kind", "classes", "--partition.test", "shared"),
    *("--prototypes.per-class", "2", "--prototypes.pool-size", "20", "--model.hidden", "64"),
    *("--train.lr", "0.05", "--no-personal-models"),
)
"""20 vectors per client, as in population.py."""


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    rounds: int
    flags: tuple[str, ...]
    clients_of_vectors: int = 0


def _cases(quick: bool) -> list[Case]:
    rounds = 3 if quick else 14
    cases = [
        Case(
            f"{method}, {clients} x {2000 // clients}, {_workers(workers)}",
            rounds,
            ("--method", method, "--clients", str(clients), "--workers", str(workers), *DIGITS),
        )
        for method in ("fedavg", "mp-fedcl", "moon")
        for clients in (5, 20, 100)
        for workers in (1, 2)
    ]
    populations = ((100, 1.0),) if quick else ((1_000, 1.0), (10_000, 0.01), (100_000, 0.01))
    cases += [
        Case(
            f"mp-fedcl, {round(clients * fraction):,} of {clients:,} clients",
            rounds,
            ("--clients", str(clients), "--fraction", str(fraction), *VECTORS),
            clients,
        )
        for clients, fraction in populations
    ]
    return cases


def _workers(number: int) -> str:
    return f"{number} worker{'s' if number > 1 else ''}"


@dataclass(frozen=True)
class Measured:
    """What one run took: seconds and bytes."""

    round: float
    """The median of the rounds after the first, without evaluation and the last round."""
    startup: float
    """From the start of the process to the record of round 1."""
    peak: int


def measure(python: str, case: Case, data: Path) -> Measured:
    """Run one case with one checkout."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        flags = [*case.flags, "--rounds", str(case.rounds), "--evaluate-every", str(case.rounds)]
        if case.clients_of_vectors:
            flags += ["--dataset.root", str(data)]
        command = [python, "-m", "mpfedcl", "run", *flags, "--out", str(out)]
        records, peak, startup = out / "rounds.jsonl", 0, 0.0
        began = time.monotonic()
        with subprocess.Popen(
            command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as process:
            while process.poll() is None:
                if not startup and records.exists() and records.stat().st_size:
                    startup = time.monotonic() - began
                peak = max(peak, tree_bytes(process.pid))
                # The first round is awaited closely; later a look costs more than it shows.
                time.sleep(0.2 if startup else 0.02)
            if process.returncode:
                assert process.stderr is not None
                raise RuntimeError(f"{' '.join(command)}: {process.stderr.read().decode()[-2000:]}")
        seconds = [json.loads(line)["seconds"] for line in records.read_text().splitlines()]
    times = [sum(t for phase, t in each.items() if phase != "evaluate") for each in seconds]
    return Measured(median(times[1:-1] or times), startup, peak)


def _row(name: str, before: list[Measured], after: list[Measured]) -> list[str]:
    rounds = [Spread.of([run.round for run in runs]) for runs in (before, after)]
    startup = [median(run.startup for run in runs) for runs in (before, after)]
    peak = [median(run.peak for run in runs) for runs in (before, after)]
    return [
        name,
        rounds[0].milliseconds(),
        rounds[1].milliseconds(),
        f"{rounds[1].median / rounds[0].median:.2f}",
        f"{startup[0]:.1f} -> {startup[1]:.1f}",
        f"{peak[0] / 2**20:,.0f} -> {peak[1] / 2**20:,.0f}",
        f"{peak[1] / peak[0]:.2f}",
    ]


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description="Compare two checkouts.")
    parser.add_argument("--before", required=True, help="interpreter of the older checkout")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="cases with this text in their name")
    parser.add_argument("--quick", action="store_true", help="a smoke run with tiny sizes")
    parser.add_argument("--out", type=Path, help="folder of the results")
    arguments = parser.parse_args()
    os.environ.pop("OMP_NUM_THREADS", None)
    before = str(Path(arguments.before).absolute())  # resolve() would leave the environment
    progress, rows = Progress(), []
    result = Result("compare_versions", "Two versions on the same work.", arguments.quick)
    for case in _cases(arguments.quick):
        if arguments.only not in case.name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder) / "data"
            if case.clients_of_vectors:
                make_vectors(case.clients_of_vectors, data)
            contenders = {
                f"{case.name} {version}": lambda python=python, case=case, data=data: measure(
                    python, case, data
                )
                for version, python in (("before", before), ("after", sys.executable))
            }
            found = list(
                interleave(contenders, arguments.repeats, progress=progress, warm=0).values()
            )
        rows.append(_row(case.name, *found))
        result.data[case.name] = [[vars(run) for run in runs] for runs in found]
        print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    headers = ["", "ms before", "ms after", "ratio", "round 1 done, s", "peak MiB", "ratio"]
    result.tables.append(Table("Round time, start-up, memory", headers, rows))
    result.notes.append("Medians; the lowest and the highest repeat in parentheses.")
    progress.close()
    default = RESULTS / "quick" if arguments.quick else RESULTS
    result.write(arguments.out or default)


if __name__ == "__main__":
    main()
