"""Two ways asked about the same samples: how far apart they are, and how surely."""

import math
from dataclasses import dataclass

from torch import Tensor

_NORMAL = 1.959964
"""Standard deviations that leave 95 % of a normal distribution between them and their negative."""


@dataclass(frozen=True)
class PairedAnswers:
    """The difference of two accuracies on the same samples, in points, with its 95 % interval."""

    pairs: int
    only_first: int
    """Samples about which only the first way is right."""
    only_second: int
    mean: float
    low: float
    high: float


def compare_answers(first: Tensor, second: Tensor) -> PairedAnswers:
    """Compare two ways by the samples about which exactly one of them is right.

    As in McNemar's test the others say nothing of the difference. The interval is that of Bonett
    and Price (2012), which with one sample more on either side holds for few samples too.

    Example:
        >>> import torch
        >>> found = compare_answers(torch.arange(100) < 80, torch.arange(100) < 70)
        >>> found.mean, round(found.low, 1), round(found.high, 1)
        (10.0, 3.2, 16.4)
    """
    pairs = len(first)
    won, lost = int((first & ~second).sum()), int((second & ~first).sum())
    share_won, share_lost = (won + 1) / (pairs + 2), (lost + 1) / (pairs + 2)
    middle = share_won - share_lost
    deviation = math.sqrt((share_won + share_lost - middle**2) / (pairs + 2))
    low, high = middle - _NORMAL * deviation, middle + _NORMAL * deviation
    mean = 100 * (won - lost) / pairs
    return PairedAnswers(pairs, won, lost, mean, 100 * max(-1, low), 100 * min(1, high))
