"""Run every slow suite, two at a time, and report which passed.

    python scripts/verify.py                       # all suites, about an hour on two idle cores
    python scripts/verify.py --only attacks fuzz   # some suites
    python scripts/verify.py --jobs 1              # one suite after the other

Each suite is a target of the Makefile. A failed suite does not stop the others. The exit code is 1
if any suite failed; the output of each suite is in build/verify/. Ctrl-C or SIGTERM ends everything
that the suites have started; processes that a suite leaves behind are ended, and counted in its
line.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType

import psutil

ROOT = Path(__file__).parents[1]
ALONE = ("test-browser",)
"""Suites that install packages into .venv, which must not change under another suite."""
SUITES = (
    *ALONE,
    # The longest first. Federations mostly wait, so they fit next to suites that compute.
    "test-all",
    "test-federation",
    "test-federation-scale",
    "test-flower",
    "soak",
    "attacks",
    "coverage",
    "fuzz",
    "lint",
    "test-machines",
    "test-wheel",
    "golden",
)


SHORT = {"MPFEDCL_NODES": "12", "MPFEDCL_RUNS": "2"}
"""Of test-federation-scale, which takes an hour with fifty clients; the environment may differ."""
MARK = "VERIFY_SUITE"
"""The variable by which the processes of a suite are known, whoever started them."""
STAGES = ((signal.SIGINT, 20.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0))
"""Signals for what is left, and the seconds after which the next one is sent."""
GRACE_SECONDS = 5.0
"""In which the processes of a suite that has ended may end."""
_LOOK_SECONDS = 0.2


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the requested suites and return the exit code."""
    parser = argparse.ArgumentParser(description="Run every slow suite.")
    parser.add_argument("--only", nargs="+", choices=SUITES, metavar="NAME", default=SUITES)
    parser.add_argument("--jobs", type=int, default=2, help="suites that run at the same time")
    parser.add_argument("--minutes", type=float, default=180, help="most that a suite may take")
    options = parser.parse_args(argv)
    suites = [name for name in SUITES if name in options.only and _is_target(name, root)]
    if missing := [name for name in options.only if name not in suites]:
        print(f"not in the Makefile: {', '.join(missing)}", flush=True)
    began = time.monotonic()
    run = partial(_run, root=root, seconds=60 * options.minutes)
    # Explicitly, because a background job of a shell ignores SIGINT.
    before = {each: signal.signal(each, _interrupt) for each in (signal.SIGINT, signal.SIGTERM)}
    pool = ThreadPoolExecutor(options.jobs)
    try:
        # In threads, also those that run alone: the main thread is free for signals.
        alone = [name for name in suites if name in ALONE]
        passed = {name: pool.submit(run, name).result() for name in alone}
        others = [name for name in suites if name not in ALONE]
        passed.update(zip(others, pool.map(run, others), strict=True))
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        print("interrupted; ending the suites", flush=True)
        _end(suites)
        return 130
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        pool.shutdown()
    failed = [name for name, is_passed in passed.items() if not is_passed]
    outcome = f"{len(suites)} suites: {len(suites) - len(failed)} passed, "
    if failed:
        outcome += f"{len(failed)} failed ({', '.join(failed)}), "
    print(f"{outcome}{(time.monotonic() - began) / 60:.0f} min", flush=True)
    return 1 if failed or not suites else 0


def _run(name: str, root: Path, seconds: float) -> bool:
    """Run a suite, write its output to a log, print its line; return whether the suite passed."""
    log = root / "build" / "verify" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    mark = {MARK: f"{os.getpid()} {name}"}
    with log.open("wb") as file:
        # A session of its own: a Ctrl-C of the terminal is for this process, which ends the suites.
        process = subprocess.Popen(
            ["make", name],
            cwd=root,
            env=SHORT | _environment() | mark,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        try:
            outcome = "failed" if process.wait(seconds) else "passed"
        except subprocess.TimeoutExpired:
            outcome = f"failed after {seconds / 60:g} min"
    passed, took = outcome == "passed", time.monotonic() - began
    if left := _end([name], GRACE_SECONDS):
        outcome += f", {left} left running and ended"
    process.wait()
    # One write, so that two lines do not mix.
    line = f"{name:<22} {took:>6.0f} s  {outcome}  {log.relative_to(root)}\n"
    sys.stdout.write(line)
    sys.stdout.flush()
    return passed


def _end(names: Sequence[str], grace: float = 0.0) -> int:
    """End the processes of suites; return how many did not end by themselves within seconds."""
    marks = [f"{os.getpid()} {name}" for name in names]
    left = _wait(marks, grace)
    found = len(left)
    for number, seconds in STAGES:
        for each in left:
            with contextlib.suppress(psutil.Error):
                each.send_signal(number)
        left = _wait(marks, seconds) if left else []
    return found


def _wait(marks: Sequence[str], seconds: float) -> list[psutil.Process]:
    """Wait until no process is left; return those that are."""
    end = time.monotonic() + seconds
    while True:
        left = _find(marks)
        # Twice, because a process that has just been started may not show its environment yet.
        if not left and not (left := _look_again(marks)):
            return []
        if time.monotonic() >= end:
            return left
        time.sleep(_LOOK_SECONDS)


def _look_again(marks: Sequence[str]) -> list[psutil.Process]:
    time.sleep(_LOOK_SECONDS)
    return _find(marks)


def _find(marks: Sequence[str]) -> list[psutil.Process]:
    """Return the processes that inherited one of these marks."""
    found = []
    for each in psutil.process_iter():
        # Of other users the environment is not known.
        with contextlib.suppress(psutil.Error, OSError):
            if each.status() != psutil.STATUS_ZOMBIE and each.environ().get(MARK) in marks:
                found.append(each)
    return found


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _is_target(name: str, root: Path) -> bool:
    return not subprocess.run(
        ["make", "-n", name], cwd=root, env=_environment(), capture_output=True, check=False
    ).returncode


def _environment() -> dict[str, str]:
    """Return the environment without the variables that an outer make sets for its children."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}


if __name__ == "__main__":
    sys.exit(main())
