"""Run the peers and mpfedcl on the same work, one after the other, and print how long each takes.

    python benchmarks/peers/compare.py [--work few many] [--peers flower pfl] [--repeats 3]

Peers are looked for in benchmarks/.venvs (install.sh builds them); one that is missing or fails
gets a row that says so.
"""

import argparse
import ctypes
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy
from measure import TreeMemory, age, process_tree

import mpfedcl
from mpfedcl import Experiment
from mpfedcl.data.federated import load_federated

HERE = Path(__file__).resolve().parent
VENVS = HERE.parent / ".venvs"
DATA = HERE.parent / ".data"
RESULTS = HERE.parent / "results" / "peers.json"

METHODS = ("fedavg", "mp-fedcl")
IMAGES = 2000
"""Of the sample; they are dealt out evenly."""
MPFEDCL_FLAGS = ("--partition.kind", "iid", "--train.lr-decay", "1.0")
"""What makes a run of mpfedcl the same work as the peers'."""
MPFEDCL_SETTINGS: tuple[tuple[str, ...], ...] = (
    ("--engine", "loop"),
    ("--engine", "auto"),
    ("--engine", "auto", "--workers", "2"),
)
"""Ways to run mpfedcl, each with a row of its own; ratios are to the fastest."""

Report = dict[str, Any]


class NoNumbersError(Exception):
    """Why a peer has no numbers, in a few words."""


@dataclass(frozen=True)
class Work:
    """The 2,000 images of the sample, dealt out evenly to so many clients."""

    name: str
    clients: int
    rounds: int
    """That count, unless told otherwise; one more comes before them."""

    @property
    def data(self) -> Path:
        """Where all peers read the clients' images."""
        return DATA / f"mnist-sample-iid-{self.clients}.npz"

    def export(self) -> None:
        """Write the clients' images."""
        dealt = load_federated(Experiment(clients=self.clients, partition={"kind": "iid"}))
        self.data.parent.mkdir(parents=True, exist_ok=True)
        numpy.savez(
            self.data,
            x=numpy.stack([client.inputs.numpy() for client in dealt.clients]),
            y=numpy.stack([client.labels.numpy() for client in dealt.clients]),
            test_x=dealt.test_inputs.numpy(),
            test_y=dealt.test_labels.numpy(),
        )


WORKS = (Work("few", 5, 20), Work("many", 100, 12))


@dataclass(frozen=True)
class Peer:
    """A program of this folder; of its settings the fastest is shown, all are in the results."""

    name: str
    script: str
    methods: tuple[str, ...]
    settings: tuple[tuple[str, ...], ...]
    only_few: tuple[tuple[str, ...], ...] = ()
    """More settings, for where there are few clients to fill the cores with."""

    def command(self, work: Work, method: str, rounds: int, setting: Sequence[str]) -> list[str]:
        """Return the command line of one run."""
        python = VENVS / self.name / "bin" / "python"
        if not python.exists():
            raise NoNumbersError(f"not installed (install.sh {self.name})")
        chosen = ["--method", method] if len(self.methods) > 1 else []
        flags = ["--data", str(work.data), "--rounds", str(rounds)]
        return [str(python), str(HERE / self.script), *flags, *chosen, *setting]


PEERS = (
    Peer("handwritten", "handwritten.py", METHODS, (("--threads", "1"), ("--threads", "2"))),
    Peer(
        "flower",
        "flower_simulation.py",
        ("fedavg",),
        tuple(("--cpus", "1", "--pull-interval", seconds) for seconds in ("0.1", "0.01")),
        tuple(("--cpus", "2", "--pull-interval", seconds) for seconds in ("0.1", "0.01")),
    ),
    Peer(
        "pfl",
        "pfl_simulation.py",
        ("fedavg",),
        (("--threads", "1"), ("--threads", "2"), ("--processes", "2")),
    ),
)


@dataclass
class Entry:
    """One way to do one work, and what its runs have reported."""

    work: Work
    peer: Peer | None
    """None is mpfedcl."""
    method: str
    setting: tuple[str, ...]
    reports: list[Report] = field(default_factory=list)
    failure: str = ""
    """Of the first run that failed; there are none after it."""

    @property
    def name(self) -> str:
        """Whose program it is."""
        return self.peer.name if self.peer else "mpfedcl"

    @property
    def laps(self) -> list[float]:
        """The rounds of all runs, in ms."""
        return [1000 * lap for report in self.reports for lap in report["round_seconds"]]

    @property
    def median_ms(self) -> float:
        """The median of all rounds in ms; infinite without any."""
        return median(self.laps) if self.reports else float("inf")

    def run(self, rounds: int, limit: float) -> None:
        """Run once more, unless it has failed: what hangs once is not waited for again."""
        if self.failure:
            return
        load = round(os.getloadavg()[0], 2)
        try:
            report = (
                run_peer(self.peer.command(self.work, self.method, rounds, self.setting), limit)
                if self.peer
                else run_mpfedcl(self.work, self.method, rounds, self.setting, limit)
            )
        except (NoNumbersError, OSError, ValueError, KeyError) as error:
            self.failure = str(error) or type(error).__name__
        else:
            self.reports.append({"load_before": load, **report})

    def as_json(self) -> dict[str, Any]:
        """Return all that is known, for the results."""
        known: dict[str, Any] = {
            "work": self.work.name,
            "clients": self.work.clients,
            "peer": self.name,
            "method": self.method,
            "setting": " ".join(self.setting),
        }
        if self.failure:
            known["failure"] = self.failure
        if self.reports:
            known |= {
                "median_ms": round(self.median_ms, 2),
                "min_ms": round(min(self.laps), 2),
                "max_ms": round(max(self.laps), 2),
                "startup_seconds": median(each["startup_seconds"] for each in self.reports),
                "peak_memory_mb": max(each["peak_memory_mb"] for each in self.reports),
                "reports": self.reports,
            }
        return known


def run_peer(command: Sequence[str], limit: float) -> Report:
    """Run one peer to its end and return what it reports."""
    with running(command, limit) as (process, folder, until):
        wait(process, folder, until)
        printed = (folder / "stdout").read_text().splitlines()
    lines = [line for line in printed if line.startswith('{"peer"')]
    if len(lines) != 1:
        raise NoNumbersError(f"printed {len(lines)} reports")
    report: Report = json.loads(lines[0])
    return report


def run_mpfedcl(
    work: Work, method: str, rounds: int, setting: Sequence[str], limit: float
) -> Report:
    """Run mpfedcl and read its records: all phases of a round count, but for evaluation."""
    # The last round is evaluated and writes the models, so there is one more, which is left out.
    total = 1 + rounds + 1
    flags = ["--method", method, "--rounds", str(total), "--evaluate-every", str(total)]
    flags += ["--clients", str(work.clients), *MPFEDCL_FLAGS, *setting, "--json", "--out", "run"]
    # The very package that was imported here, wherever that was from.
    source = {"PYTHONPATH": str(Path(mpfedcl.__file__).parents[1])}
    command = [sys.executable, "-m", "mpfedcl", "run", *flags]
    with running(command, limit, source) as (process, folder, until):
        out = folder / "run"
        memory = TreeMemory(process.pid)
        startup = _age_after_round(process, out / "rounds.jsonl", until)
        first_seen = time.time()
        try:
            wait(process, folder, until)
        finally:
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
def running(
    command: Sequence[str], limit: float, more: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], Path, float]]:
    """Start a program in a folder of its own, with a time to be done by; leave nothing of it."""
    ours = ("PYTHONPATH", "OMP_NUM_THREADS")
    environment = {key: value for key, value in os.environ.items() if key not in ours}
    with tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        # Files, not pipes: they never fill, and a child that lingers holds nobody up.
        with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as errors:
            process = subprocess.Popen(
                command, cwd=folder, stdout=out, stderr=errors, env=environment | dict(more or {})
            )
        try:
            yield process, folder, time.monotonic() + limit
        finally:
            end_children(process)


def adopt_orphans() -> None:
    """Become the parent of what peers leave behind (Ray's servers, say), to be able to end it."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def end_children(process: subprocess.Popen[bytes]) -> None:
    """End a program and all that it has started; this process has no other children."""
    while left := process_tree(os.getpid())[1:]:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def wait(process: subprocess.Popen[bytes], folder: Path, until: float) -> None:
    """Wait for the end of a program, which must be a good one."""
    try:
        code = process.wait(max(0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise NoNumbersError("not done in time") from None
    if code:
        said = (folder / "stderr").read_text(errors="replace").strip().splitlines()
        raise NoNumbersError(f"failed: {said[-1][:120] if said else f'exit code {code}'}")


def _age_after_round(process: subprocess.Popen[bytes], records: Path, until: float) -> float:
    """Return the age of mpfedcl's process when its first round is on record."""
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


def plan(works: Sequence[Work], peers: Sequence[Peer]) -> list[Entry]:
    """Return all that is to be run, in order."""
    entries = []
    for work in works:
        for method in METHODS:
            entries += [Entry(work, None, method, setting) for setting in MPFEDCL_SETTINGS]
        for peer in peers:
            settings = peer.settings + (peer.only_few if work.name == "few" else ())
            entries += [
                Entry(work, peer, method, setting)
                for method in peer.methods
                for setting in settings
            ]
    return entries


def table(entries: Sequence[Entry]) -> str:
    """Return the markdown, a section for each work: all settings of mpfedcl, the best of a peer."""
    lines = []
    for work in dict.fromkeys(entry.work for entry in entries):
        lines += [
            f"### {work.name}: {work.clients} clients with {IMAGES // work.clients} images each\n",
            "| peer | version | method | setting | ms per round, median [min..max] "
            "| times mpfedcl's best | start-up s | peak MB | accuracy % |",
            "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
        ]
        verdicts = []
        for method in METHODS:
            rivals = [entry for entry in entries if (entry.work, entry.method) == (work, method)]
            ours = [entry for entry in rivals if entry.peer is None]
            best = min(ours, key=lambda entry: entry.median_ms)
            peers = dict.fromkeys(entry.name for entry in rivals if entry.peer)
            fastest = [
                min((each for each in rivals if each.name == name), key=lambda each: each.median_ms)
                for name in peers
            ]
            lines += [_row(entry, best.median_ms) for entry in ours + fastest]
            verdicts += _verdict(best, [entry for entry in fastest if entry.reports])
        lines += ["", *verdicts, ""]
    return "\n".join(lines)


def _row(entry: Entry, best: float) -> str:
    start = f"| {entry.name} | "
    setting = f"`{' '.join(entry.setting)}`"
    if not entry.reports:
        return f"{start}- | {entry.method} | {setting} | {entry.failure} | - | - | - | - |"
    known = entry.as_json()
    last = entry.reports[-1]
    failed = f"; then {entry.failure}" if entry.failure else ""
    ratio = "-" if best == float("inf") else f"{entry.median_ms / best:.2f}"
    return (
        f"{start}{last['version']} | {entry.method} | {setting}{failed} "
        f"| {entry.median_ms:.0f} [{known['min_ms']:.0f}..{known['max_ms']:.0f}] | {ratio} "
        f"| {known['startup_seconds']:.1f} | {known['peak_memory_mb']:.0f} "
        f"| {last['accuracy']:.1f} |"
    )


def _verdict(best: Entry, peers: Sequence[Entry]) -> list[str]:
    """Return the ratios in words."""
    if not best.reports or not peers:
        return []
    said = []
    for peer in peers:
        ratio = peer.median_ms / best.median_ms
        words = f"{ratio:.1f} times faster" if ratio >= 1 else f"{1 / ratio:.1f} times slower"
        said.append(f"{words} than {peer.name}")
    return [f"- {best.method}: mpfedcl (`{' '.join(best.setting)}`) is {', '.join(said)}."]


def main() -> None:
    """Measure, write the results, print the table."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [peer.name for peer in PEERS]
    works = [work.name for work in WORKS]
    flags.add_argument("--work", nargs="+", choices=works, default=works)
    flags.add_argument("--peers", nargs="*", choices=names, default=names)
    flags.add_argument("--rounds", type=int, help="counted, after one warm-up [few 20, many 12]")
    flags.add_argument("--repeats", type=int, default=1, help="times the whole list is run")
    flags.add_argument("--timeout", type=float, default=300, help="seconds that a run may take")
    flags.add_argument("--out", type=Path, default=RESULTS, help="and the table beside it, as .md")
    options = flags.parse_args()
    chosen = [work for work in WORKS if work.name in options.work]
    for work in chosen:
        work.export()
    adopt_orphans()
    # Ended from outside, it still ends what it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    machine = describe_machine()
    entries = plan(chosen, [peer for peer in PEERS if peer.name in options.peers])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for number in range(options.repeats):
        # The whole list again and again, so that a machine that slows down does so for all.
        for entry in entries:
            entry.run(options.rounds or entry.work.rounds, options.timeout)
            said = entry.failure or f"{entry.median_ms:.1f} ms a round"
            label = f"{entry.work.name} {entry.name} {entry.method} {' '.join(entry.setting)}"
            print(f"{number + 1}/{options.repeats} {label}: {said}", file=sys.stderr, flush=True)
        known = [entry.as_json() for entry in entries]
        asked = {"repeats": number + 1, "timeout_seconds": options.timeout}
        results = {"machine": machine, **asked, "entries": known}
        options.out.write_text(json.dumps(results, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(table(entries))
    print(table(entries))


if __name__ == "__main__":
    main()
