"""One run of a peer or of mpfedcl as a program of its own, and what it reports."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from contestants import NoNumbersError, Work
from measure import TreeMemory, age, process_tree

import mpfedcl

MPFEDCL_FLAGS = ("--partition.kind", "iid", "--train.lr-decay", "1.0")
"""What makes a run of mpfedcl the same work as the peers'."""

Report = dict[str, Any]


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
        "accuracy": summary["predictors"]["local_test"]["global_classifier"],
    }


def _age_after_round(process: subprocess.Popen[bytes], records: Path, until: float) -> float:
    """Return the age of mpfedcl's process when its first round is on record."""
    while process.poll() is None and time.monotonic() < until:
        if records.exists() and records.stat().st_size:
            return age(process.pid)
        time.sleep(0.01)
    return 0.0


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
