"""What all benchmarks share: fair repeats, the machine, result files and a progress line."""

import argparse
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from mpfedcl.rounds import record as round_record

PHASES = tuple(phase for phase in round_record.PHASES if phase not in ("evaluate", "checkpoint"))
"""The phases of a round that is neither evaluated nor saved."""
RESULTS = Path(__file__).parent / "results"
T = TypeVar("T")


@dataclass(frozen=True)
class Spread:
    """The median of several repeats, and how far they lie apart."""

    median: float
    lowest: float
    highest: float
    repeats: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Sum repeats up."""
        return cls(statistics.median(values), min(values), max(values), len(values))

    def milliseconds(self) -> str:
        """Return `median (lowest-highest)` in ms, of seconds."""
        return f"{ms(self.median)} ({ms(self.lowest)}-{ms(self.highest)})"


@dataclass(frozen=True)
class Table:
    """A table for people; the numbers behind it are in the result's data."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def markdown(self) -> str:
        """Return the table in Markdown: first column to the left, numbers to the right."""
        marks = ["---", *["---:"] * (len(self.headers) - 1)]
        lines = [f"| {' | '.join(cells)} |" for cells in (self.headers, marks, *self.rows)]
        notes = [self.note, ""] if self.note else []
        return "\n".join([f"### {self.title}", "", *lines, "", *notes])


@dataclass
class Result:
    """What one benchmark leaves behind."""

    name: str
    summary: str
    quick: bool
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def write(self, out: Path) -> None:
        """Write <name>.json and print the tables."""
        content = {**asdict(self), "machine": describe_machine()}
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        (out / f"{self.name}.json").write_text(text, encoding="utf-8")
        print(markdown(content), flush=True)


def markdown(content: Mapping[str, Any]) -> str:
    """Return a result, as it was written, in Markdown."""
    name = content["name"]
    machine = content["machine"]
    where = ", ".join(machine[key] for key in ("cpu", "instructions", "date"))
    said = f"`python benchmarks/{name}.py`, on {machine['cores']} cores of: {where}."
    parts = [f"## {name}", "", content["summary"], "", said, ""]
    parts += [
        Table(**table).markdown() if isinstance(table, dict) else table.markdown()
        for table in content["tables"]
    ]
    parts += [f"- {note}" for note in content["notes"]]
    return "\n".join(parts) + "\n"


class Progress:
    """One line on stderr that says what is being done; silent where nobody looks."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        """Replace the line."""
        if self._shown:
            spent = time.monotonic() - self._began
            print(f"\r\033[K{spent:6.0f} s  {text}"[:110], end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the line empty."""
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def interleave(
    contenders: Mapping[str, Callable[[], T]],
    repeats: int,
    *,
    progress: Progress,
    warm: int = 1,
    patience: float = float("inf"),
) -> dict[str, list[T]]:
    """Run contenders in turn, again and again, so that a slow spell of the machine hits them all.

    The first `warm` runs of each are not counted. One that has taken more than `patience` seconds
    in all is not repeated any more; it keeps at least one counted run.
    """
    found: dict[str, list[T]] = {name: [] for name in contenders}
    spent = dict.fromkeys(contenders, 0.0)
    for repeat in range(-warm, repeats):
        for name, run in contenders.items():
            if found[name] and spent[name] > patience:
                continue
            progress.say(f"{name}: repeat {repeat + 1} of {repeats}")
            began = time.perf_counter()
            value = run()
            spent[name] += time.perf_counter() - began
            if repeat >= 0:
                found[name].append(value)
    return found


def parse_arguments(description: str | None) -> argparse.Namespace:
    """Read --quick and --out; a smoke run does not overwrite measurements."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a smoke run with tiny sizes")
    parser.add_argument("--out", type=Path, help="folder of the results")
    arguments = parser.parse_args()
    arguments.out = arguments.out or (RESULTS / "quick" if arguments.quick else RESULTS)
    return arguments


def ms(seconds: float) -> str:
    """Return seconds as milliseconds with three digits that count."""
    value = 1000 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


# The machine


def describe_machine() -> dict[str, str]:
    """Return what the numbers depend on besides the code."""
    blas = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    return {
        "cpu": _read_field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": str(os.cpu_count()),
        "caches": ", ".join(_find_caches()) or "unknown",
        "memory": _read_field("/proc/meminfo", "MemTotal") or "unknown",
        "os": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "blas": blas[1] if blas else "unknown",
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _read_field(path: str, name: str) -> str | None:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in pairs if key.strip() == name), None)


def _find_caches() -> list[str]:
    """Return L2 and L3 as `L2 2048K for cores 0`."""
    found = []
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            level, size, cores = (
                (folder / name).read_text(encoding="utf-8").strip()
                for name in ("level", "size", "shared_cpu_list")
            )
        except OSError:
            continue
        if level in ("2", "3"):
            found.append(f"L{level} {size} for cores {cores}")
    return found
