"""Run every slow suite, two at a time, and report which passed.

    python scripts/verify.py                       # all suites, about 45 minutes on two idle cores
    python scripts/verify.py --only attacks fuzz   # some suites
    python scripts/verify.py --jobs 1              # one suite after the other

Each suite is a target of the Makefile. A failed suite does not stop the others. The exit code is 1
if any suite failed; the output of each suite is in build/verify/.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALONE = ("test-browser",)
"""Suites that install packages into .venv, which must not change under another suite."""
SUITES = (
    *ALONE,
    # The longest first. Federations mostly wait, so they fit next to suites that compute.
    "test-all",
    "test-federation",
    "soak",
    "attacks",
    "coverage",
    "fuzz",
    "test-machines",
    "test-wheel",
    "golden",
)


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the requested suites and return the exit code."""
    parser = argparse.ArgumentParser(description="Run every slow suite.")
    parser.add_argument("--only", nargs="+", choices=SUITES, metavar="NAME", default=SUITES)
    parser.add_argument("--jobs", type=int, default=2, help="suites that run at the same time")
    options = parser.parse_args(argv)
    suites = [name for name in SUITES if name in options.only and _is_target(name, root)]
    if missing := [name for name in options.only if name not in suites]:
        print(f"not in the Makefile: {', '.join(missing)}", flush=True)
    began = time.monotonic()
    run = partial(_run, root=root)
    passed = {name: run(name) for name in suites if name in ALONE}
    others = [name for name in suites if name not in ALONE]
    with ThreadPoolExecutor(options.jobs) as pool:
        passed.update(zip(others, pool.map(run, others), strict=True))
    failed = [name for name, is_passed in passed.items() if not is_passed]
    outcome = f"{len(suites)} suites: {len(suites) - len(failed)} passed, "
    if failed:
        outcome += f"{len(failed)} failed ({', '.join(failed)}), "
    print(f"{outcome}{(time.monotonic() - began) / 60:.0f} min", flush=True)
    return 1 if failed or not suites else 0


def _run(name: str, root: Path) -> bool:
    """Run a suite, write its output to a log, print its line; return whether the suite passed."""
    log = root / "build" / "verify" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with log.open("wb") as file:
        code = subprocess.run(
            ["make", name], cwd=root, env=_environment(), stdout=file, stderr=file, check=False
        ).returncode
    seconds, outcome = time.monotonic() - began, "failed" if code else "passed"
    # One write, so that two lines do not mix.
    line = f"{name:<16} {seconds:>6.0f} s  {outcome}  {log.relative_to(root)}\n"
    sys.stdout.write(line)
    sys.stdout.flush()
    return code == 0


def _is_target(name: str, root: Path) -> bool:
    return not subprocess.run(
        ["make", "-n", name], cwd=root, env=_environment(), capture_output=True, check=False
    ).returncode


def _environment() -> dict[str, str]:
    """Return the environment without the variables that an outer make sets for its children."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}


if __name__ == "__main__":
    sys.exit(main())
