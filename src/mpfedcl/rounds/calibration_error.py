"""How far probabilities can be believed: the expected calibration error, from sums that add up."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

NUM_BINS = 15
BinSums = list[list[int]]
"""[15] bins of equal width by the probability of the class said: images, right answers, and the
probabilities' sum in units of 2^-40. Whole numbers: they add up to the same in any order."""
_UNIT = 2**40


def count_bins(scores: Tensor, labels: Tensor) -> BinSums:
    """Sort answers into bins, given scores [n, C] whose softmax is the probabilities."""
    probability, said = torch.softmax(scores.double(), dim=1).max(dim=1)
    place = (probability * NUM_BINS).ceil().long().clamp(1, NUM_BINS) - 1
    columns = (
        torch.ones_like(said),
        (said == labels).long(),
        (probability * _UNIT).round().long(),
    )
    sums = [place.new_zeros(NUM_BINS).index_add_(0, place, each) for each in columns]
    return torch.stack(sums, dim=1).tolist()


def add_bins(parts: Iterable[BinSums]) -> BinSums:
    """Add the sums of several clients, or of several processes."""
    total = [[0, 0, 0] for _ in range(NUM_BINS)]
    for part in parts:
        total = [
            [ours + theirs for ours, theirs in zip(*rows, strict=True)]
            for rows in zip(total, part, strict=True)
        ]
    return total


def describe_bins(bins: BinSums) -> list[list[float]]:
    """Return [images, right answers, mean probability] of each bin that holds an image."""
    return [
        [count, right, round(probability / (count * _UNIT), 6)]
        for count, right, probability in bins
        if count
    ]


def pool_bins(several: Iterable[Iterable[Sequence[float]]]) -> list[list[float]]:
    """Add described bins of several runs; a bin's mean probability tells which it is."""
    sums: dict[int, list[float]] = {}
    for count, right, probability in (each for bins in several for each in bins):
        total = sums.setdefault(math.ceil(probability * NUM_BINS), [0.0, 0.0, 0.0])
        total[0] += count
        total[1] += right
        total[2] += count * probability
    return [
        [count, right, round(weight / count, 6)]
        for _, (count, right, weight) in sorted(sums.items())
    ]


def expected_calibration_error(bins: BinSums) -> float | None:
    """Return Σ_b n_b/n |share right - mean probability| in percent; None without an image.

    Example:
        >>> import torch
        >>> scores = torch.tensor([[0.8, 0.2]] * 5).log()
        >>> expected_calibration_error(count_bins(scores, torch.tensor([0, 0, 0, 0, 1])))
        0.0
        >>> expected_calibration_error(count_bins(scores, torch.zeros(5, dtype=torch.int64)))
        20.0
    """
    images = sum(count for count, _, _ in bins)
    if not images:
        return None
    gaps = sum(abs(right * _UNIT - probability) for _, right, probability in bins)
    # To the precision that a probability in single precision has.
    return round(100 * gaps / (images * _UNIT), 6)
