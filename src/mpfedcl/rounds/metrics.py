"""Metrics of predictions: accuracy, F1, AUROC, calibration and others; fairness over clients."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Annotated, Any, Self

import numpy
import torch
from pydantic import Field
from torch import Tensor

from mpfedcl.core.errors import InvalidInput, explain_user_code
from mpfedcl.core.json_files import FileContent
from mpfedcl.core.plugins import import_function
from mpfedcl.experiment.names import METRICS, is_in_percent

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
    return _count_bins(torch.softmax(scores.double(), dim=1), labels)


def _count_bins(probabilities: Tensor, labels: Tensor) -> BinSums:
    probability, predicted = probabilities.max(dim=1)
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


# All metrics of one predictor


MetricValues = dict[str, float | None]
"""Values of metrics by name, those of shares in percent; None if undefined."""
OwnMetric = Callable[..., Any]
"""A user's metric: a function of probabilities [n, C] and labels [n], numpy arrays."""
MOST_PROBABILITIES = 50_000_000
"""Samples times classes up to which metrics are computed; their arrays take 400 MB."""


class MetricTables(FileContent):
    """The metrics of the primary predictors in the last round."""

    local_test: MetricValues
    """Over the samples of all local test sets together."""
    global_test: MetricValues
    """If clients predict differently, the mean over clients."""
    per_client: dict[str, MetricValues]
    """Of each client on its local test set."""


@dataclass(frozen=True)
class PredictedSamples:
    """The predictions of one predictor for test samples."""

    classes: Tensor
    """[n]; -1: none."""
    labels: Tensor
    """[n]"""
    probabilities: Tensor | None
    """[n, C] in float64; None if the predictor has none."""

    def split(self, sizes: Sequence[int]) -> list[Self]:
        """Return parts of these sizes."""
        columns = [
            [None] * len(sizes) if each is None else torch.split(each, [*sizes])
            for each in (self.classes, self.labels, self.probabilities)
        ]
        return [type(self)(*part) for part in zip(*columns, strict=True)]

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self | None:
        """Return the samples of all parts; None if there are none."""
        if not parts:
            return None
        shares = [each.probabilities for each in parts if each.probabilities is not None]
        return cls(
            torch.cat([each.classes for each in parts]),
            torch.cat([each.labels for each in parts]),
            torch.cat(shares) if len(shares) == len(parts) else None,
        )


def find_own_metric(metric: str, num_classes: int) -> OwnMetric | None:
    """Return the user's function if a metric names one, after a trial call."""
    if metric in METRICS:
        return None
    own = import_function("metric", metric)
    even = torch.full((num_classes, num_classes), 1 / num_classes, dtype=torch.float64)
    _apply_own(own, metric, even, torch.arange(num_classes))
    return own


def measure(
    samples: PredictedSamples, num_classes: int, metric: str, own: OwnMetric | None = None
) -> MetricValues:
    """Return all metrics of a predictor, and the user's under the name `metric`.

    Classes without a test sample do not count, except as wrong predictions in macro F1.
    """
    names = [*METRICS, *([metric] if own else [])]
    if not len(samples.labels):
        return dict.fromkeys(names)
    labels, shares = samples.labels, samples.probabilities
    found = measure_confusion(count_confusions(samples.classes, labels, num_classes))
    if shares is not None and bool(shares.isfinite().all()):
        of_label = shares.gather(1, labels.unsqueeze(1)).squeeze(1)
        squares = (shares.square().sum(dim=1) - 2 * of_label + 1).clamp(min=0)
        calibration = expected_calibration_error(_count_bins(shares, labels))
        found |= {
            "auroc": _mean_auroc(shares, labels),
            # Clipped as in scikit-learn, because a class without a prototype has probability 0.
            "nll": float(-of_label.clamp(torch.finfo(shares.dtype).eps, 1).log().mean()),
            # With two classes half the sum, as in scikit-learn.
            "brier": float(squares.mean()) / (2 if num_classes == 2 else 1),
            "ece": None if calibration is None else calibration / 100,
        }
        if own is not None:
            found[metric] = _apply_own(own, metric, shares, labels)
    return _in_percent({name: found.get(name) for name in names})


def measure_confusion(counts: ConfusionCounts) -> MetricValues:
    """Return the metrics that depend on the confusions [C][C + 1] only, as shares."""
    table = numpy.array(counts, dtype=numpy.float64)
    right, tested = table[:, :-1].diagonal(), table.sum(axis=1)
    predicted = table[:, :-1].sum(axis=0)
    present, used = tested > 0, tested + predicted > 0
    if not present.any():
        return {}
    return {
        "accuracy": float(right.sum() / tested.sum()),
        "balanced_accuracy": float((right[present] / tested[present]).mean()),
        "macro_f1": float((2 * right[used] / (tested + predicted)[used]).mean()),
    }


def mean_values(several: Sequence[MetricValues]) -> MetricValues:
    """Return the mean of each metric over those that have it."""
    known = {
        name: [value for each in several if (value := each[name]) is not None]
        for name in (several[0] if several else METRICS)
    }
    return {name: fmean(values) if values else None for name, values in known.items()}


def join_metrics(
    confusions: Mapping[str, ConfusionCounts], values: Mapping[str, MetricValues]
) -> MetricValues:
    """Return the metrics over the samples of several clients that sent only counts and values.

    Calibration error and AUROC do not follow from them.
    """
    known = [name for name in values if name in confusions]
    if not known:
        return dict.fromkeys(METRICS)
    tables = numpy.array([confusions[name] for name in known])
    found = _in_percent(measure_confusion(tables.sum(axis=0).tolist()))
    sizes = tables.sum(axis=(1, 2))
    for metric in ("nll", "brier"):
        numbers = [values[name].get(metric) for name in known]
        is_whole = bool(sizes.sum()) and None not in numbers
        found[metric] = float(numpy.average(numbers, weights=sizes)) if is_whole else None  # type: ignore[arg-type]
    return {name: found.get(name) for name in METRICS}


def _in_percent(shares: MetricValues) -> MetricValues:
    return {
        name: 100 * value if value is not None and is_in_percent(name) else value
        for name, value in shares.items()
    }


def _mean_auroc(shares: Tensor, labels: Tensor) -> float | None:
    """Return the mean over classes of P(score of a sample in the class > score of another).

    Ties count half; None if there are samples of one class only.
    """
    areas = []
    for number in torch.unique(labels).tolist():
        of_class = shares[labels == number, number]
        others = shares[labels != number, number].sort().values
        if len(others):
            # The number of others that lie below each sample, and at or below it.
            below = torch.searchsorted(others, of_class)
            up_to = torch.searchsorted(others, of_class, right=True)
            areas.append(float((below + up_to).double().mean()) / (2 * len(others)))
    return fmean(areas) if areas else None


def _apply_own(own: OwnMetric, metric: str, shares: Tensor, labels: Tensor) -> float | None:
    """Return what the user's function returns; None for NaN."""
    arrays = [each.cpu().numpy() for each in (shares, labels)]
    for array in arrays:
        # Other metrics read the same memory.
        array.setflags(write=False)
    try:
        returned = own(*arrays)
    # A user's function may fail in any way.
    except Exception as error:
        raise InvalidInput(
            f"metric is {metric!r}, which failed ({explain_user_code(error)}); it "
            "must return a number for probabilities [n, C] and labels [n]."
        ) from None
    try:
        value = None if isinstance(returned, str) else float(returned)
    except (TypeError, ValueError, RuntimeError):
        value = None
    if value is None or math.isinf(value):
        raise InvalidInput(
            f"metric is {metric!r}, which returned {str(returned)[:40]!r}; it must return a number."
        )
    return None if math.isnan(value) else value


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
