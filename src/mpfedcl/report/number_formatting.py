"""Numbers as a page needs them: short, finite, and not too many."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

Numbers = Sequence[float | None]


def rounded(value: float | None, digits: int = 2) -> float | None:
    """Return a number with so many decimals; None for what is not a finite number."""
    if value is None or not math.isfinite(value):
        return None
    return round(value, digits)


def round_significant(value: float | None, digits: int = 4) -> float | None:
    """Return a number with so many significant digits; None for what is not a finite number."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


def choose_evenly(count: int, most: int) -> list[int]:
    """Return at most `most` places of `count`, evenly spread, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [round(place * (count - 1) / (most - 1)) for place in range(most)]


def finite_values(values: Numbers) -> list[float]:
    """Return the numbers among the values."""
    return [value for value in values if value is not None and math.isfinite(value)]


def mean(values: Sequence[float]) -> float | None:
    """Return the mean, None of nothing."""
    return sum(values) / len(values) if values else None


def deviation(values: Sequence[float], ddof: int = 1) -> float | None:
    """Return the standard deviation; None of too few. The paper's own tables have ddof 0."""
    middle = mean(values)
    if middle is None or len(values) <= ddof:
        return None
    return math.sqrt(sum((value - middle) ** 2 for value in values) / (len(values) - ddof))


def describe_fairness(summary: Mapping[str, Any]) -> str:
    """Say how accuracy is spread over clients; nothing of one client, nor where it is not known."""
    found = summary.get("fairness")
    if not found or found["clients"] < 2:
        return ""
    return (
        f"spread over clients: std {found['std']:.1f} (ddof 1), "
        f"worst client {found['worst']:.1f} %, worst tenth {found['worst_decile']:.1f} %, "
        f"Jain's index {found['jain']:.3f}"
    )


def describe_calibration(summary: Mapping[str, Any]) -> str:
    """Say how far a run's probabilities are off; nothing where it gives none."""
    found = summary.get("calibration_error") or {}
    told = [
        f"{value:.1f} % on the {test.replace('_', ' ')} set"
        for test, value in found.items()
        if value is not None
    ]
    return f"calibration error of its probabilities: {', '.join(told)}" if told else ""
