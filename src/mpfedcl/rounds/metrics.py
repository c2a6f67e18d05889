"""Metrics of predictions: accuracy, confusion, calibration error, and fairness over clients."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Annotated, Any

import numpy
import torch
from pydantic import Field
from torch import Tensor

from mpfedcl.core.json_files import FileContent

ConfusionCounts = list[list[int]]
"""Test images by true (rows) and predicted class (columns); the last column: no prediction."""
NUM_BINS = 15
BinSums = list[list[int]]
"""[15] bins of equal width by the probability of the predicted class: images, correct predictions,
and the sum of the probabilities in units of 2^-40. Integers add up to the same in any order."""
_UNIT = 2**40
MOST_LISTED = 1000
"""Clients up to which a record has a row for each, whether or not it took part."""


def percent_correct(correct: Tensor | None) -> float | None:
    """Return the share of correct predictions in percent; None without any."""
    if correct is None or correct.numel() == 0:
        return None
    return 100 * int(correct.sum()) / correct.numel()


def as_percents(correct: Tensor, sizes: Tensor) -> list[float | None]:
    """Return counts of correct predictions in percent of `sizes`; None for an empty test set."""
    shares = (100 * correct.double() / sizes.double()).tolist()
    return [share if size else None for share, size in zip(shares, sizes.tolist(), strict=True)]


def count_confusions(predicted: Tensor, labels: Tensor, num_classes: int) -> ConfusionCounts:
    """Count [C][C + 1] images by true and predicted class; -1 (no prediction) comes last."""
    columns = num_classes + 1
    places = labels * columns + predicted.where(predicted >= 0, num_classes)
    return torch.bincount(places, minlength=num_classes * columns).view(-1, columns).tolist()


# Calibration


def count_bins(scores: Tensor, labels: Tensor) -> BinSums:
    """Sort predictions into bins, given scores [n, C] whose softmax is the probabilities."""
    probability, predicted = torch.softmax(scores.double(), dim=1).max(dim=1)
    place = (probability * NUM_BINS).ceil().long().clamp(1, NUM_BINS) - 1
    units = (probability * _UNIT).round().long()
    rows = torch.stack([torch.ones_like(units), (predicted == labels).long(), units], dim=1)
    return units.new_zeros(NUM_BINS, 3).index_add_(0, place, rows).tolist()


def add_bins(parts: Iterable[BinSums]) -> BinSums:
    """Add the bins of several clients or processes."""
    none = [[0, 0, 0] for _ in range(NUM_BINS)]
    return [
        [sum(column) for column in zip(*rows, strict=True)]
        for rows in zip(none, *parts, strict=True)
    ]


def expected_calibration_error(bins: BinSums) -> float | None:
    """Return Σ_b n_b/n |share correct - mean probability| in percent; None without an image.

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
    # Rounded to the precision of a probability in float32.
    return round(100 * gaps / (images * _UNIT), 6)


# Fairness


class Fairness(FileContent):
    """The spread of the clients' accuracies on their local test sets, in percent."""

    clients: int
    """Clients that were evaluated."""
    mean: float
    std: float | None
    """Standard deviation over clients, with ddof = 1; None for one client."""
    worst: float
    worst_decile: float
    """Mean of the worst tenth of the clients, at least one."""
    best_decile: float
    jain: float
    """Jain's index: 1 if all accuracies are equal, 1/n if one client has everything."""


class AccuracySpread(Fairness):
    """The spread of the accuracies of many clients, not all of which are listed."""

    quartiles: Annotated[list[float], Field(min_length=3, max_length=3)]


def measure_fairness(accuracies: Iterable[float | None]) -> Fairness | None:
    """Return the spread over the clients that were evaluated; None if there is none.

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
    """Return (Σx)² / (n Σx²); 1 if all values are 0.

    Example:
        >>> jain_index([1.0, 1.0]), jain_index([1.0, 0.0, 0.0, 0.0])
        (1.0, 0.25)
    """
    squares = math.fsum(value * value for value in values)
    return math.fsum(values) ** 2 / (len(values) * squares) if squares else 1.0


def list_accuracies(
    accuracies: Mapping[str, float | None], took_part: Collection[str]
) -> tuple[dict[str, float | None], AccuracySpread | None]:
    """Return the accuracies by client that a record lists, and the spread over all if some miss.

    All clients are listed or, of more than 1,000, the evaluated participants.

    Example:
        >>> many = {f"client-{number}": number / 20 for number in range(2000)}
        >>> rows, spread = list_accuracies(many, ["client-7", "client-9"])
        >>> rows, spread.quartiles, spread.clients
        ({'client-7': 0.35, 'client-9': 0.45}, [24.9875, 49.975, 74.9625], 2000)
    """
    if len(accuracies) <= MOST_LISTED:
        return dict(accuracies), None
    present = set(took_part)
    known = {name: each for name, each in accuracies.items() if each is not None}
    rows: dict[str, float | None] = {n: each for n, each in known.items() if n in present}
    fairness = measure_fairness(known.values())
    if fairness is None:
        return rows, None
    quartiles = numpy.quantile([*known.values()], [0.25, 0.5, 0.75]).round(4).tolist()
    return rows, AccuracySpread(**dict(fairness), quartiles=quartiles)


def mean_accuracy(record: Mapping[str, Any]) -> float | None:
    """Return the mean over the clients of a record; None if none was evaluated."""
    if (spread := record.get("accuracy_spread")) is not None:
        return float(spread["mean"])
    known = [each for each in (record["accuracy_per_client"] or {}).values() if each is not None]
    return sum(known) / len(known) if known else None
