"""Run the peers and mpfedcl on the same work, one after the other, and print how long each takes.

    python benchmarks/peers/compare.py [--peers flower pfl] [--rounds 20] [--repeats 1]

Peers are looked for in benchmarks/.venvs (install.sh builds them); one that is missing or fails
gets a row that says so.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy
from measure import TreeMemory, age, process_tree

from mpfedcl import Experiment
from mpfedcl.data.federated import load_federated

HERE = Path(__file__).resolve().parent
VENVS = HERE.parent / ".venvs"
DATA = HERE.parent / ".data" / "mnist-sample-iid.npz"
RESULTS = HERE.parent / "results" / "peers.json"

METHODS = ("fedavg", "mp-fedcl")
MPFEDCL_FLAGS = ("--partition.kind", "iid", "--train.lr-decay", "1.0")
"""What makes a run of mpfedcl the same work as the peers'."""
MPFEDCL_SETTINGS: tuple[tuple[str, ...], ...] = (("--engine", "loop"),)
"""Ways to run mpfedcl, each with a row of its own; ratios are to the fastest."""

Report = dict[str, Any]


class NoNumbersError(Exception):
    """Why a peer has no numbers, in a few words."""


@dataclass(frozen=True)
class Peer:
    """A program of this folder; of its settings the fastest is shown, all are in the results."""

    name: str
    script: str
    methods: tuple[str, ...]
    settings: tuple[tuple[str, ...], ...]

    def command(self, method: str, rounds: int, setting: Sequence[str]) -> list[str]:
        """Return the command line of one run."""
        python = VENVS / self.name / "bin" / "python"
        if not python.exists():
            raise NoNumbersError(f"not installed (install.sh {self.name})")
        chosen = ["--method", method] if len(self.methods) > 1 else []
        work = ["--data", str(DATA), "--rounds", str(rounds)]
        return [str(python), str(HERE / self.script), *work, *chosen, *setting]


PEERS = (
    Peer("handwritten", "handwritten.py", METHODS, (("--threads", "1"), ("--threads", "2"))),
    Peer(
        "flower",
        "flower_simulation.py",
        ("fedavg",),
        tuple(
            ("--cpus", cpus, "--pull-interval", seconds)
            for cpus in ("1", "2")
            for seconds in ("0.1", "0.01")
        ),
    ),
    Peer(
        "pfl",
        "pfl_simulation.py",
        ("fedavg",),
        (("--threads", "1"), ("--threads", "2"), ("--processes", "2")),
    ),
)


def export_data() -> None:
    """Write the clients' images where all peers read them."""
    dealt = load_federated(Experiment(partition={"kind": "iid"}))
    DATA.parent.mkdir(parents=True, exist_ok=True)
    numpy.savez(
        DATA,
        x=numpy.stack([client.inputs.numpy() for client in dealt.clients]),
        y=numpy.stack([client.labels.numpy() for client in dealt.clients]),
        test_x=dealt.test_inputs.numpy(),
        test_y=dealt.test_labels.numpy(),
    )


def run_peer(peer: Peer, method: str, rounds: int, setting: Sequence[str], limit: float) -> Report:
    """Run one peer to its end and return what it reports."""
    with running(peer.command(method, rounds, setting)) as (process, folder):
        wait(process, folder, limit)
        printed = (folder / "stdout").read_text().splitlines()
    lines = [line for line in printed if line.startswith('{"peer"')]
    if len(lines) != 1:
        raise NoNumbersError(f"printed {len(lines)} reports")
    report: Report = json.loads(lines[0])
    return report


def run_mpfedcl(method: str, rounds: int, setting: Sequence[str], limit: float) -> Report:
    """Run mpfedcl and read its records: all phases of a round count, but for evaluation."""
    # The last round is evaluated and writes the models, so there is one more, which is left out.
    total = 1 + rounds + 1
    flags = ["--method", method, "--rounds", str(total), "--evaluate-every", str(total)]
    command = [sys.executable, "-m", "mpfedcl", "run", *flags, *MPFEDCL_FLAGS, *setting]
    with running([*command, "--json", "--out", "run"]) as (process, folder):
        out = folder / "run"
        memory = TreeMemory(process.pid)
        startup = _age_after_round(process, out / "rounds.jsonl", limit)
        first_seen = time.time()
        wait(process, folder, limit)
        peak = memory.stop()
        records = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
        summary = json.loads((out / "summary.json").read_text())
        wall = (out / "rounds.jsonl").stat().st_mtime - first_seen
    seconds = [record["seconds"] for record in records]
    first, *others = [sum(each.values()) - each["evaluate"] for each in seconds[:-1]]
    outside = wall - sum(sum(each.values()) for each in seconds[1:])
    return {
        "peer": "mpfedcl",
        "version": version("mpfedcl"),
        "method": method,
        "threads": summary["threads"],
        "startup_seconds": round(startup, 3),
        "startup_means": "start of the process to the end of the first round",
        "first_round_seconds": round(first, 6),
        "round_seconds": [round(each, 6) for each in others],
        # Time between rounds that no phase accounts for; about 0 unless the records leave some out.
        "outside_phases_seconds": round(outside / (total - 1), 6),
        "peak_memory_mb": peak,
        "accuracy": summary["readings"]["own"]["averaged_classifier"],
    }


@contextmanager
def running(command: Sequence[str]) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Start a program in a folder of its own; whatever is left of its tree is ended at the end."""
    with tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        # Files, not pipes: they never fill, and a child that lingers holds nobody up.
        with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as errors:
            process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=errors)
        try:
            yield process, folder
        finally:
            if process.poll() is None:
                for pid in reversed(process_tree(process.pid)):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                process.wait()


def wait(process: subprocess.Popen[bytes], folder: Path, limit: float) -> None:
    """Wait for the end of a program, which must be a good one."""
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        raise NoNumbersError(f"not done after {limit:.0f} s") from None
    if code:
        said = (folder / "stderr").read_text(errors="replace").strip().splitlines()
        raise NoNumbersError(f"failed: {said[-1][:120] if said else f'exit code {code}'}")


def _age_after_round(process: subprocess.Popen[bytes], records: Path, limit: float) -> float:
    """Return the age of mpfedcl's process when its first round is on record."""
    until = time.monotonic() + limit
    while process.poll() is None and time.monotonic() < until:
        if records.exists() and records.stat().st_size:
            return age(process.pid)
        time.sleep(0.01)
    return 0.0


def describe_machine() -> dict[str, Any]:
    """Tell what the numbers were measured on."""
    cpu = Path("/proc/cpuinfo").read_text()
    names = [line.partition(":")[2].strip() for line in cpu.splitlines() if "model name" in line]
    memory = Path("/proc/meminfo").read_text().split()
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "caches": dict(_caches()),
        "memory_gb": round(int(memory[memory.index("MemTotal:") + 1]) * 1024 / 1e9, 1),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
    }


def _caches() -> Iterator[tuple[str, str]]:
    for cache in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (
            (cache / name).read_text().strip() for name in ("level", "type", "size")
        )
        yield f"L{level} {kind.lower()}", size


def measure(
    peers: Sequence[Peer], rounds: int, repeats: int, limit: float
) -> Iterator[dict[str, Any]]:
    """Yield one entry for each peer, method and setting, its repeats together."""
    plan: list[tuple[Peer | None, str, tuple[str, ...]]] = [
        (None, method, setting) for method in METHODS for setting in MPFEDCL_SETTINGS
    ]
    plan += [(p, method, setting) for p in peers for method in p.methods for setting in p.settings]
    for peer, method, setting in plan:
        name = peer.name if peer else "mpfedcl"
        entry: dict[str, Any] = {"peer": name, "method": method, "setting": " ".join(setting)}
        load = round(os.getloadavg()[0], 2)
        try:
            reports = [
                run_peer(peer, method, rounds, setting, limit)
                if peer
                else run_mpfedcl(method, rounds, setting, limit)
                for _ in range(repeats)
            ]
        except (NoNumbersError, OSError, ValueError, KeyError) as error:
            entry["failure"] = str(error) or type(error).__name__
        else:
            laps = [lap for report in reports for lap in report["round_seconds"]]
            entry |= {
                "median_ms": round(1000 * median(laps), 1),
                "min_ms": round(1000 * min(laps), 1),
                "max_ms": round(1000 * max(laps), 1),
                "startup_seconds": median(report["startup_seconds"] for report in reports),
                "peak_memory_mb": max(report["peak_memory_mb"] for report in reports),
                "load_before": load,
                "reports": reports,
            }
        said = entry.get("failure") or f"{entry['median_ms']} ms a round"
        print(f"{name} {method} {entry['setting']}: {said}", file=sys.stderr)
        yield entry


def table(entries: Sequence[dict[str, Any]]) -> str:
    """Return the markdown table: every setting of mpfedcl, of each peer the fastest."""
    lines = [
        "| peer | version | method | setting | ms per round, median [min..max] "
        "| ratio to mpfedcl | start-up s | peak MB | accuracy % |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for method in METHODS:
        of_method = [entry for entry in entries if entry["method"] == method]
        ours = [entry for entry in of_method if entry["peer"] == "mpfedcl"]
        best = min((entry["median_ms"] for entry in ours if "median_ms" in entry), default=None)
        others = dict.fromkeys(entry["peer"] for entry in of_method if entry["peer"] != "mpfedcl")
        rows = ours + [
            min(
                (entry for entry in of_method if entry["peer"] == name),
                key=lambda entry: entry.get("median_ms", float("inf")),
            )
            for name in others
        ]
        lines += [_row(entry, best) for entry in rows]
    return "\n".join(lines)


def _row(entry: dict[str, Any], best: float | None) -> str:
    start = f"| {entry['peer']} | "
    if "failure" in entry:
        return f"{start}- | {entry['method']} | - | {entry['failure']} | - | - | - | - |"
    ratio = f"{entry['median_ms'] / best:.2f}" if best else "-"
    last = entry["reports"][-1]
    return (
        f"{start}{last['version']} | {entry['method']} | `{entry['setting']}` "
        f"| {entry['median_ms']:.0f} [{entry['min_ms']:.0f}..{entry['max_ms']:.0f}] | {ratio} "
        f"| {entry['startup_seconds']:.1f} | {entry['peak_memory_mb']:.0f} "
        f"| {last['accuracy']:.1f} |"
    )


def main() -> None:
    """Measure, write the results, print the table."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [peer.name for peer in PEERS]
    flags.add_argument("--peers", nargs="*", choices=names, default=names)
    flags.add_argument("--rounds", type=int, default=20, help="counted, after one warm-up")
    flags.add_argument("--repeats", type=int, default=1, help="runs of each, rounds put together")
    flags.add_argument("--timeout", type=float, default=300, help="seconds that a run may take")
    flags.add_argument("--out", type=Path, default=RESULTS)
    options = flags.parse_args()
    export_data()
    chosen = [peer for peer in PEERS if peer.name in options.peers]
    machine = describe_machine()
    entries = list(measure(chosen, options.rounds, options.repeats, options.timeout))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"machine": machine, "entries": entries}, indent=1) + "\n")
    print(table(entries))


if __name__ == "__main__":
    main()
