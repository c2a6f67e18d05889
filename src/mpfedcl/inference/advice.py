"""Advice to a client on joining a one-shot run: its local model compared with the federation's.

Both are computed in closed form and tested on the client's held-out samples. Nothing is sent or
written: the federation's statistics come to the client.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.rng import numpy_generator
from mpfedcl.core.tensors import Tensors
from mpfedcl.inference.new_client import NewClient
from mpfedcl.inference.one_shot import OneShotFederation, open_federation
from mpfedcl.inference.trained_run import load_trained_run
from mpfedcl.methods.local_gauss import LocalGauss
from mpfedcl.rounds.metrics import percent_correct

_NAME = "new client"
_ENOUGH_TESTED = 200
"""With fewer held-out samples, cross-validation tests each sample once."""
_FOLDS = 5
_SHARES = (0.25, 0.5, 1.0)
"""The points of the learning curve, as shares of the training samples."""
_LEAST_SLOPE = 0.05
_MOST_TIMES = 20
"""A curve through three points is not extrapolated beyond this multiple of the samples."""
_NORMAL = 1.959964
"""The 97.5 % quantile of the standard normal distribution."""
CLASSIFIERS = {
    "local": "only your own images, in closed form",
    "global": "the federation's with you in it, with your label shares",
    "personal": "the federation's with you in it, personalized",
}


@dataclass(frozen=True)
class PairedAnswers:
    """The difference of two accuracies on the same samples, in points, with a 95 % interval."""

    pairs: int
    only_first: int
    """Samples that only the first classifier predicts correctly."""
    only_second: int
    mean: float
    low: float
    high: float


def compare_answers(first: Tensor, second: Tensor) -> PairedAnswers:
    """Compare two classifiers by the samples that exactly one of them predicts correctly.

    As in McNemar's test the other samples do not matter. The interval of Bonett and Price (2012)
    adds one sample to either side, so it also holds for few samples.

    Example:
        >>> import torch
        >>> found = compare_answers(torch.arange(100) < 80, torch.arange(100) < 70)
        >>> found.mean, round(found.low, 1), round(found.high, 1)
        (10.0, 3.4, 16.2)
    """
    pairs = len(first)
    won, lost = int((first & ~second).sum()), int((second & ~first).sum())
    share_won, share_lost = (won + 1) / (pairs + 2), (lost + 1) / (pairs + 2)
    middle = share_won - share_lost
    deviation = math.sqrt((share_won + share_lost - middle**2) / (pairs + 2))
    low, high = middle - _NORMAL * deviation, middle + _NORMAL * deviation
    mean = 100 * (won - lost) / pairs
    return PairedAnswers(pairs, won, lost, mean, 100 * max(-1, low), 100 * min(1, high))


@dataclass(frozen=True)
class ClassAdvice:
    """One class: the numbers of training samples, tested samples and correct predictions."""

    name: str
    train: int
    tested: int
    local: int
    federation: int


@dataclass(frozen=True)
class Advice:
    """The comparison of a client's local model with the federation's."""

    noun: str
    train: int
    tested: int
    folds: int
    """1: some samples were held out; more: cross-validation."""
    accuracy: dict[str, float]
    """In %, by the keys of `CLASSIFIERS`; all with the client's label prior."""
    compared: str
    """The federation's classifier that the local one is compared with."""
    difference: PairedAnswers
    classes: list[ClassAdvice]
    curve: list[tuple[int, float]]
    """The learning curve: training samples, and the accuracy of the local model."""
    more_needed: int | None
    """About how many more samples the local model needs to do as well; None if not known."""

    @property
    def verdict(self) -> str:
        """The advice in one sentence."""
        found = self.difference
        reach = f"95 % interval {found.low:+.1f} to {found.high:+.1f}"
        on = f"your {self.tested:,} held-out {self.noun}s"
        if found.low > 0:
            return f"Join: the federation is {found.mean:.1f} points better on {on} ({reach})."
        if found.high < 0:
            return (
                f"Do not join for your own sake: the federation is {-found.mean:.1f} points worse "
                f"on {on} ({reach})."
            )
        return (
            f"It makes no clear difference to you: {found.mean:+.1f} points on {on} ({reach}, "
            "which contains 0)."
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**asdict(self), "verdict": self.verdict}


def advise(
    run: Path | str,
    data: Path | str,
    *,
    test_fraction: float | None = None,
    weights: Path | None = None,
) -> Advice:
    """Compare a client's local model with the classifiers that a one-shot run gives it.

    Args:
        run: The run directory.
        data: The client's samples, as for `mpfedcl.inference.membership.join`.
        test_fraction: The share of its samples to test on [default: the run's; if that holds out
            fewer than 200 samples, cross-validation].
        weights: The encoder's file, if it has moved since the run.
    """
    federation = open_federation(Path(run))
    trained = load_trained_run(run, weights=weights)
    client = NewClient(trained, Path(data), _NAME, test_fraction=test_fraction)
    inputs = torch.cat([client.client.inputs, client.data.test_inputs])
    labels = torch.cat([client.client.labels, client.data.test_labels])
    num_train, noun = len(client.client.labels), trained.input_format.noun
    if len(labels) < 2:
        raise InvalidInput(f"data has one {noun}; there must be one to train and one to test.")
    folds = [(torch.arange(num_train), torch.arange(num_train, len(labels)))]
    if test_fraction is None and len(folds[0][1]) < _ENOUGH_TESTED:
        folds = list(_draw_folds(labels, federation.experiment.seed))
    if not len(folds[0][1]):
        raise InvalidInput(
            f"test_fraction is {test_fraction}, which holds out no {noun}; it must be larger, or "
            "there must be more of a class."
        )
    return _compare(federation, inputs, labels, folds, noun)


def _draw_folds(labels: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Deal the samples of each class to folds in turn; yield rows to train on and rows to test."""
    generator = numpy_generator(seed, "advise", "folds")
    count = min(_FOLDS, len(labels))
    order = torch.from_numpy(generator.permutation(len(labels)))
    by_class = order[labels[order].argsort(stable=True)]
    fold = torch.empty_like(labels)
    fold[by_class] = torch.arange(len(labels)) % count
    for number in range(count):
        yield (fold != number).nonzero().squeeze(1), (fold == number).nonzero().squeeze(1)


def _compare(
    federation: OneShotFederation,
    inputs: Tensor,
    labels: Tensor,
    folds: list[tuple[Tensor, Tensor]],
    noun: str,
) -> Advice:
    """Fit classifiers on some samples of a client, and test them on others."""
    names, method = federation.class_names, federation.method
    alone = LocalGauss(federation.experiment, len(names))
    correct: dict[str | float, Tensor] = {}
    """By classifier; a number is the local one of a share of the samples."""
    sizes = dict.fromkeys(_SHARES, 0)
    for train, rows in folds:
        own = inputs[train], labels[train]
        # With the client in it: only then does the federation know how clients differ.
        after = federation.with_client(_NAME, method.own_statistics(method.collect(*own)))
        fitted: dict[str | float, tuple[Tensors | None, Tensor]] = {
            "global": (after.server.params, train),
            "personal": (method.personalize(after.received, *own), train),
        }
        for share in _SHARES:
            some = train if share == 1 else _draw_share(labels, train, share)
            fitted[share] = (alone.personalize(None, inputs[some], labels[some]), some)
            sizes[share] += len(some)
        for name, (params, used) in fitted.items():
            if params is not None:
                counts = torch.bincount(labels[used], minlength=len(names))
                found = federation.predicts(params, inputs[rows], labels[rows], counts)
                correct.setdefault(name, torch.zeros(len(labels), dtype=torch.bool))[rows] = found
    tested = torch.zeros(len(labels), dtype=torch.bool)
    tested[torch.cat([rows for _, rows in folds])] = True
    compared = "personal" if "personal" in correct else "global"
    local, best = correct[_SHARES[-1]], correct[compared]
    accuracy = {name: percent_correct(each[tested]) or 0.0 for name, each in correct.items()}
    curve = [(round(sizes[share] / len(folds)), accuracy[share]) for share in _SHARES]
    trained = torch.bincount(labels[folds[0][0]], minlength=len(names))
    classes = []
    for label, name in enumerate(names):
        rows = tested & (labels == label)
        if bool(rows.any()):
            right = (int(each[rows].sum()) for each in (local, best))
            classes.append(ClassAdvice(name, int(trained[label]), int(rows.sum()), *right))
    by_classifier = {"local": curve[-1][1]}
    by_classifier |= {n: accuracy[n] for n in ("global", "personal") if n in accuracy}
    return Advice(
        noun=noun,
        train=curve[-1][0],
        tested=int(tested.sum()),
        folds=len(folds),
        accuracy=by_classifier,
        compared=compared,
        difference=compare_answers(best[tested], local[tested]),
        classes=classes,
        curve=curve,
        more_needed=samples_needed(curve, accuracy[compared]),
    )


def _draw_share(labels: Tensor, rows: Tensor, share: float) -> Tensor:
    """Return a share of the samples of each class, at least one, evenly spaced."""
    kept = []
    for label in sorted(set(labels[rows].tolist())):
        own = rows[labels[rows] == label]
        size = max(1, round(share * len(own)))
        kept.append(own[torch.arange(size) * len(own) // size])
    return torch.cat(kept)


def samples_needed(curve: list[tuple[int, float]], wanted: float) -> int | None:
    """Return how many more samples a wanted accuracy needs; None if the curve gives no estimate.

    A power law, fitted to the errors at a quarter, half and all samples, is extrapolated.
    """
    sizes, errors = [n for n, _ in curve], [100 - accuracy for _, accuracy in curve]
    if errors[-1] <= 100 - wanted:
        return 0
    if wanted >= 100 or min(errors) <= 0 or len(set(sizes)) < len(sizes):
        return None
    slope, offset = numpy.polyfit(numpy.log(sizes), numpy.log(errors), 1)
    if -slope < _LEAST_SLOPE:
        return None
    size = math.exp((math.log(100 - wanted) - offset) / slope)
    if not size <= _MOST_TIMES * sizes[-1]:
        return None
    return max(1, round(size - sizes[-1]))
