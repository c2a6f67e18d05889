"""Run every slow suite, one after the other, and say which passed.

    python scripts/verify.py                       # all of them, about an hour
    python scripts/verify.py --only attacks fuzz   # some of them

Each suite is a target of the Makefile. A suite that fails does not stop the others. Exits with 1 if
any failed; the output of each is in build/verify/.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUITES = (
    "test-all",
    "test-wheel",
    "test-federation",
    "test-browser",
    "attacks",
    "fuzz",
    "soak",
    "test-machines",
    "coverage",
    "golden",
)


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the suites that are asked for, in this order; return the exit code."""
    parser = argparse.ArgumentParser(description="Run every slow suite.")
    parser.add_argument("--only", nargs="+", choices=SUITES, metavar="NAME", default=SUITES)
    asked = parser.parse_args(argv).only
    suites = [name for name in SUITES if name in asked and _is_target(name, root)]
    if missing := [name for name in asked if name not in suites]:
        print(f"not in the Makefile: {', '.join(missing)}", flush=True)
    began = time.monotonic()
    failed = [name for name in suites if not _run(name, root)]
    outcome = f"{len(suites)} suites: {len(suites) - len(failed)} passed, "
    if failed:
        outcome += f"{len(failed)} failed ({', '.join(failed)}), "
    print(f"{outcome}{(time.monotonic() - began) / 60:.0f} min", flush=True)
    return 1 if failed or not suites else 0


def _run(name: str, root: Path) -> bool:
    """Run a suite into its log, say how it ended, and return whether it passed."""
    log = root / "build" / "verify" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with log.open("wb") as file:
        code = subprocess.run(
            ["make", name], cwd=root, env=_environment(), stdout=file, stderr=file, check=False
        ).returncode
    seconds, outcome = time.monotonic() - began, "failed" if code else "passed"
    print(f"{name:<16} {seconds:>6.0f} s  {outcome}  {log.relative_to(root)}", flush=True)
    return code == 0


def _is_target(name: str, root: Path) -> bool:
    return not subprocess.run(
        ["make", "-n", name], cwd=root, env=_environment(), capture_output=True, check=False
    ).returncode


def _environment() -> dict[str, str]:
    """Return the environment without what an outer make leaves for its own children."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}


if __name__ == "__main__":
    sys.exit(main())
