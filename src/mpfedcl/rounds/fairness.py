"""Who is served worst: how a method's accuracy is spread over clients."""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev

from mpfedcl.core.json_files import FileContent


class Fairness(FileContent):
    """Accuracies of clients on their local test sets, in %, in a few numbers."""

    clients: int
    """How many were read."""
    mean: float
    std: float | None
    """Standard deviation over clients, with ddof = 1; None of one client."""
    worst: float
    worst_decile: float
    """Mean of the worst tenth of the clients, of one at least."""
    best_decile: float
    jain: float
    """Jain's index: 1 where all are served alike, 1/n where one client has everything."""


def measure_fairness(accuracies: Iterable[float | None]) -> Fairness | None:
    """Return how accuracies are spread over the clients that were read; None where none was.

    Example:
        >>> measure_fairness([80.0, 60.0, None]).worst_decile
        60.0
    """
    known = sorted(each for each in accuracies if each is not None and math.isfinite(each))
    if not known:
        return None
    tenth = -(-len(known) // 10)
    return Fairness(
        clients=len(known),
        mean=round(fmean(known), 4),
        std=round(stdev(known), 4) if len(known) > 1 else None,
        worst=round(known[0], 4),
        worst_decile=round(fmean(known[:tenth]), 4),
        best_decile=round(fmean(known[-tenth:]), 4),
        jain=round(jain_index(known), 4),
    )


def jain_index(values: Sequence[float]) -> float:
    """Return (Σx)² / (n Σx²); 1 where all are 0, and so alike.

    Example:
        >>> jain_index([1.0, 1.0]), jain_index([1.0, 0.0, 0.0, 0.0])
        (1.0, 0.25)
    """
    squares = math.fsum(value * value for value in values)
    return math.fsum(values) ** 2 / (len(values) * squares) if squares else 1.0
