"""Run the attacks and print expected and observed outcomes.

    python attacks/run_attacks.py                      # the quick ones, at most five minutes
    python attacks/run_attacks.py --full               # the numbers of docs/leaks.md
    python attacks/run_attacks.py --only membership    # one of them, or several

Exits with 1 if an outcome differs from the documentation.
"""

import argparse
import importlib
import sys
import time
from pathlib import Path

import torch
from rich.console import Console

from mpfedcl.report.tables import TextTable
from outcome import Outcome

ROOT = Path(__file__).parents[1]
# Federations within one process, and of processes, are made as the tests make them.
sys.path += [str(ROOT / "tests" / "helpers"), str(ROOT / "tests" / "network")]
ATTACKS = (
    "local_user",
    "one_message",
    "given_files",
    "forged_counts",
    "asking_server",
    "lying_server",
    "gradient_inversion",
    "inversion",
    "membership",
)


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description="Try to break mpfedcl.")
    parser.add_argument("--full", action="store_true", help="at length, on MNIST where it is")
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=ATTACKS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    outcomes: list[Outcome] = []
    for name in asked.only:
        began = time.monotonic()
        found = importlib.import_module(name).attack(full=asked.full)
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
        outcomes += found
    rows = [
        [each.attack, each.expected, each.seen, "ok" if each.ok else "NOT"] for each in outcomes
    ]
    table = TextTable("Attacks", ["attack", "expected", "seen", ""], rows)
    table.show(Console(width=100))
    folder = Path("build")
    folder.mkdir(exist_ok=True)
    (folder / "attacks.md").write_text(table.markdown(), encoding="utf-8")
    sys.exit(0 if all(each.ok for each in outcomes) else 1)


if __name__ == "__main__":
    main()
