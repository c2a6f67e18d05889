"""Run all benchmarks, each in a process of its own, and gather their tables in one page."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from measuring import markdown, parse_arguments

LONGEST = {
    "limit": 900,
    "each_method": 1500,
    "growth": 900,
    "memory": 900,
    "startup": 600,
    "choice": 900,
    "population": 1200,
    "campaign": 1500,
    "time_to_accuracy": 6000,
}
"""Programs in their order, and the seconds after which each is given up."""


def run_program(name: str, words: list[str]) -> str | None:
    """Run one program; return what went wrong, if anything did."""
    command = [sys.executable, str(Path(__file__).with_name(f"{name}.py")), *words]
    # A session of its own, so that the processes that it started end with it.
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(LONGEST[name])
    except subprocess.TimeoutExpired:
        return f"{name} was not done within {LONGEST[name]} s."
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return f"{name} ended with code {code}." if code else None


def gather(out: Path, problems: list[str]) -> str:
    """Return one page with the machine and all tables that there are."""
    contents: list[dict[str, Any]] = []
    for path in sorted(out.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and {"name", "summary", "tables", "notes"} <= content.keys():
            contents.append(content)
    order = {name: number for number, name in enumerate(LONGEST)}
    contents.sort(key=lambda content: order.get(content["name"], len(order)))
    parts = [
        "# Measurements",
        "",
        "Written by `python benchmarks/run.py`; do not edit. Each part says on which machine; the "
        "JSON files beside this page have every single time.",
        "",
        *(f"**{problem}**\n" for problem in problems),
        *(markdown(content) for content in contents),
    ]
    return "\n".join(parts)


def main() -> int:
    """Run everything; a program that fails does not stop the others."""
    arguments = parse_arguments(__doc__)
    words = ["--out", str(arguments.out), *(["--quick"] if arguments.quick else [])]
    arguments.out.mkdir(parents=True, exist_ok=True)
    problems = []
    for name in LONGEST:
        began = time.monotonic()
        problem = run_program(name, words)
        problems += [problem] if problem else []
        print(f"{name}: {problem or 'done'} ({time.monotonic() - began:.0f} s)", file=sys.stderr)
    page = gather(arguments.out, problems)
    (arguments.out / "README.md").write_text(page, encoding="utf-8")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
