"""Tables in Markdown, paired differences over seeds, pages with marks, figures."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev, stdev
from typing import Any

import matplotlib
from matplotlib import pyplot
from scipy.special import stdtrit

matplotlib.use("Agg")

DOCS = Path(__file__).resolve().parents[1] / "docs"
BEST, WITHIN = "▲", "≈"
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#555555")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "savefig.dpi": 150,
    "figure.constrained_layout.use": True,
}
Values = Sequence[float | None]
"""A value per seed; None where there is none."""
_NUMBER = re.compile(r"[▲≈]?(-|[+-]?[\d,]+(\.\d+)?(\([\d.]+\))?( %)?)")


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, columns of numbers to the right."""
    cells = list(zip(*rows, strict=True)) or [()] * len(columns)
    rule = ["---:" if all(map(_NUMBER.fullmatch, each)) else "---" for each in cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in [columns, rule, *rows])


def mean_std(values: Values, *, ddof: int = 1) -> str:
    """Return mean(std) over seeds; a dash where a seed has no value."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return "-"
    if len(known) == 1:
        return f"{known[0]:.1f}"
    return f"{fmean(known):.1f}({(stdev if ddof else pstdev)(known):.1f})"


@dataclass(frozen=True)
class Difference:
    """The mean of a - b over seeds, with the 95 % interval of Student's t."""

    mean: float
    low: float = -math.inf
    high: float = math.inf
    """With one seed the interval has no end."""

    @property
    def verdict(self) -> str:
        """Say whether a is better than b: only if the interval lies above 0."""
        if self.low > 0:
            return "better"
        return "worse" if self.high < 0 else "no clear difference"

    def __str__(self) -> str:
        interval = f" [{self.low:+.1f}, {self.high:+.1f}]" if math.isfinite(self.low) else ""
        return f"{self.mean:+.1f}{interval}"


def paired_difference(a: Values, b: Values) -> Difference | None:
    """Compare two methods over the seeds for which both have a value; None without any."""
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    if not pairs:
        return None
    differences = [x - y for x, y in pairs]
    mean, count = fmean(differences), len(differences)
    # Equal values may come out a rounding apart.
    rounding = 1e-12 * max(abs(value) for pair in pairs for value in pair)
    mean = 0.0 if abs(mean) <= rounding else mean
    if count < 2:
        return Difference(mean)
    deviation = stdev(differences)
    half = interval_half_width(count) * (0.0 if deviation <= rounding else deviation)
    return Difference(mean, mean - half, mean + half)


def interval_half_width(count: int) -> float:
    """Return half the width of a 95 % interval over a number of seeds, in standard deviations."""
    return float(stdtrit(count - 1, 0.975)) / math.sqrt(count)


def mark_best(values: Mapping[str, Values]) -> dict[str, str | None]:
    """Mark the row with the largest mean "best", and those not clearly behind it "within"."""
    whole = {
        name: [value for value in each if value is not None]
        for name, each in values.items()
        if each and None not in each
    }
    marks: dict[str, str | None] = dict.fromkeys(values)
    if not whole:
        return marks
    best = max(whole, key=lambda name: fmean(whole[name]))
    for name, each in whole.items():
        difference = paired_difference(whole[best], each)
        assert difference is not None
        if name == best or (len(each) == 1 and difference.mean == 0):
            marks[name] = "best"
        elif len(each) > 1 and difference.verdict == "no clear difference":
            marks[name] = "within"
    return marks


def explain_marks(num_seeds: int) -> str:
    """Return the legend of the marks."""
    if num_seeds < 2:
        return f"{BEST} best of one seed; one seed cannot show what is noise."
    return (
        f"{BEST} best mean; {WITHIN} not clearly behind: 0 is in the 95 % interval of the "
        f"difference, paired by seed.\nWith {num_seeds} seeds the interval reaches "
        f"{interval_half_width(num_seeds):.1f} deviations of the difference each way."
    )


def fill_page(page: Path, parts: Mapping[str, str]) -> None:
    """Write each part between `<!-- NAME -->` and `<!-- end -->`; other text is kept."""
    text = page.read_text(encoding="utf-8")
    for name, part in parts.items():
        begin, end = f"<!-- {name} -->\n", "<!-- end -->"
        before, mark, rest = text.partition(begin)
        if mark:
            text = f"{before}{mark}\n{part}\n{end}{rest.partition(end)[2]}"
    page.write_text(text, encoding="utf-8")


@contextmanager
def figure_file(path: Path, *shape: int, grid: bool = True, **layout: Any) -> Iterator[Any]:
    """Give a figure and its axes to draw into, then write it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with pyplot.rc_context({**STYLE, "axes.grid": grid}):
        figure, axes = pyplot.subplots(*shape, **layout)
        yield figure, axes
        figure.savefig(path)
        pyplot.close(figure)
