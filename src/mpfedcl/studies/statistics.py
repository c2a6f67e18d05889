"""Statistics over seeds: paired differences, their confidence intervals, and marks for tables.

Runs of two methods with the same seed share the data split, the initial weights and the batches, so
methods are compared seed by seed. A method is called better only if the interval excludes 0; with
few seeds intervals are wide.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any, Literal

LEVEL = 0.95
"""The confidence level: how often an interval contains the true difference."""

Values = Sequence[float | None]
"""A number per seed, in the same order for every method; None if there is none."""
Mark = Literal["best", "within"]
Verdict = Literal["better", "worse", "no clear difference", "one seed"]


@dataclass(frozen=True)
class PairedDifference:
    """The mean of a - b over seeds, and the confidence interval of the true mean (Student's t)."""

    pairs: int
    mean: float
    deviation: float | None
    """Standard deviation of the differences, with ddof = 1; None with fewer than two pairs."""
    low: float | None
    high: float | None
    """The interval's ends; None with fewer than two pairs."""

    @property
    def verdict(self) -> Verdict:
        """Whether a is better than b: only if the interval lies above 0."""
        if self.low is None or self.high is None:
            return "one seed"
        if self.low > 0:
            return "better"
        return "worse" if self.high < 0 else "no clear difference"

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**asdict(self), "verdict": self.verdict}


def paired_difference(a: Values, b: Values, level: float = LEVEL) -> PairedDifference | None:
    """Compare two methods over the seeds for which both have a number; None if there is none."""
    if len(a) != len(b):
        raise ValueError(f"a has {len(a)} values and b has {len(b)}; pairs need as many of both")
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; it must lie between 0 and 1")
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    if not pairs:
        return None
    differences = [x - y for x, y in pairs]
    mean, count = fmean(differences), len(differences)
    # Rounding must not separate equal differences, or equal numbers from 0.
    rounding = 1e-12 * max(abs(number) for pair in pairs for number in pair)
    if abs(mean) <= rounding:
        mean = 0.0
    if count < 2:
        return PairedDifference(count, mean, None, None, None)
    deviation = stdev(differences)
    if deviation <= rounding:
        deviation = 0.0
    reach = interval_half_width(count, level) * deviation
    return PairedDifference(count, mean, deviation, mean - reach, mean + reach)


def interval_half_width(count: int, level: float = LEVEL) -> float:
    """Return half the width of an interval over `count` seeds, in standard deviations."""
    # Imported here because most commands need no quantile; scipy.stats would take a second.
    from scipy.special import stdtrit

    return float(stdtrit(count - 1, (1 + level) / 2)) / math.sqrt(count)


def find_best(values: Mapping[str, Values]) -> str | None:
    """Return the first method with the largest mean; None if no method has all numbers."""
    means = {name: fmean(each) for name, each in _competitors(values).items()}
    return max(means, key=lambda name: means[name]) if means else None


def mark_best(values: Mapping[str, Values], level: float = LEVEL) -> dict[str, Mark | None]:
    """Mark the method with the largest mean "best", and those not clearly behind it "within".

    Not clearly behind: the interval of the paired difference to the best contains 0. A method that
    lacks a number has no mark. With one seed there are no intervals, and only ties with the best
    are marked, as best.
    """
    marks: dict[str, Mark | None] = dict.fromkeys(values)
    best = find_best(values)
    if best is None:
        return marks
    for name, numbers in _competitors(values).items():
        difference = paired_difference(values[best], numbers, level)
        assert difference is not None
        if name == best or (difference.pairs == 1 and difference.mean == 0):
            marks[name] = "best"
        elif difference.verdict == "no clear difference":
            marks[name] = "within"
    return marks


def _competitors(values: Mapping[str, Values]) -> dict[str, list[float]]:
    """Return the methods that have a number for every seed."""
    longest = max((len(numbers) for numbers in values.values()), default=0)
    known = {
        name: [number for number in numbers if number is not None]
        for name, numbers in values.items()
    }
    return {name: numbers for name, numbers in known.items() if len(numbers) == longest > 0}
