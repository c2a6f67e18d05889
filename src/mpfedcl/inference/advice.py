"""Should I join? A client's own closed form beside the federation's, on its held-out samples.

Nothing is sent and nothing is written: the sums of the federation come to the client.
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
from mpfedcl.inference.exchange import Exchange, open_exchange
from mpfedcl.inference.new_client import NewClient
from mpfedcl.inference.paired_answers import PairedAnswers, compare_answers
from mpfedcl.inference.trained_run import load_trained_run
from mpfedcl.methods.local_gauss import LocalGauss
from mpfedcl.rounds.label_prior import log_prior

_NAME = "new client"
_ENOUGH_TESTED = 200
"""With fewer held-out samples every one is tested once, in turn."""
_FOLDS = 5
_SHARES = (0.25, 0.5, 1.0)
"""Of the training samples: the points of the learning curve."""
_LEAST_SLOPE = 0.05
_MOST_TIMES = 20
"""Beyond so many times what there is, nobody should believe a curve through three points."""
WAYS = {
    "own": "your own images alone, in closed form",
    "pooled": "the federation's with you in it, with your label shares",
    "personal": "the federation's with you in it, made your own",
}


@dataclass(frozen=True)
class ClassAdvice:
    """One class: samples to learn from, samples tested, and how many of these are right."""

    name: str
    train: int
    tested: int
    own: int
    federation: int


@dataclass(frozen=True)
class Advice:
    """What a client would gain by joining."""

    noun: str
    train: int
    tested: int
    folds: int
    """1: some samples were held out; more: each was held out once."""
    accuracy: dict[str, float]
    """In %, by the ways of `WAYS`; all with the client's label shares."""
    compared: str
    """The way that the own closed form is compared with."""
    difference: PairedAnswers
    classes: list[ClassAdvice]
    curve: list[tuple[int, float]]
    """Training samples, and the accuracy of the own closed form with them."""
    more_needed: int | None
    """Own samples, about so many more, with which it would do as well; None: it cannot be told."""

    @property
    def verdict(self) -> str:
        """Say in one sentence whether to join."""
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
        """Return the advice as plain values."""
        return {**asdict(self), "verdict": self.verdict}


def advise(
    run: Path | str,
    data: Path | str,
    *,
    test_fraction: float | None = None,
    weights: Path | None = None,
) -> Advice:
    """Compare what a client can do alone with what a federation of one exchange gives it.

    Args:
        run: The run directory.
        data: The client's samples, as for `mpfedcl.inference.join.join`.
        test_fraction: The share of its samples to test on; by default the run's, and where that
            holds out few, each sample once.
        weights: The encoder's file, where it is not found as it was for the run.
    """
    if test_fraction is not None and not 0 < test_fraction < 1:
        raise InvalidInput(
            f"test_fraction is {test_fraction:g}; it must be greater than 0 and less than 1."
        )
    exchange = open_exchange(Path(run))
    trained = load_trained_run(run, weights=weights)
    client = NewClient(trained, Path(data), _NAME, test_fraction=test_fraction)
    samples = _Samples(
        torch.cat([client.client.inputs, client.data.test_inputs]),
        torch.cat([client.client.labels, client.data.test_labels]),
    )
    num_train, noun = len(client.client.labels), trained.input_format.noun
    if len(samples.labels) < 2:
        raise InvalidInput(f"data has one {noun}; there must be one to learn and one to test.")
    folds = [(torch.arange(num_train), torch.arange(num_train, len(samples.labels)))]
    if test_fraction is None and len(folds[0][1]) < _ENOUGH_TESTED:
        folds = list(_draw_folds(samples.labels, exchange.experiment.seed))
    if not len(folds[0][1]):
        raise InvalidInput(
            f"test_fraction is {test_fraction}, which holds out no {noun}; it must be larger, or "
            "there must be more of a class."
        )
    return _compare(exchange, samples, folds, noun)


@dataclass(frozen=True)
class _Samples:
    inputs: Tensor
    labels: Tensor


Fold = tuple[Tensor, Tensor]
"""Rows to learn from, and rows to test."""


def _draw_folds(labels: Tensor, seed: int) -> Iterator[Fold]:
    """Deal the samples of each class to folds in turn, so that each is tested once."""
    generator = numpy_generator(seed, "advise", "folds")
    count = min(_FOLDS, len(labels))
    order = torch.from_numpy(generator.permutation(len(labels)))
    by_class = order[labels[order].argsort(stable=True)]
    fold = torch.empty_like(labels)
    fold[by_class] = torch.arange(len(labels)) % count
    for number in range(count):
        yield (fold != number).nonzero().squeeze(1), (fold == number).nonzero().squeeze(1)


def _compare(exchange: Exchange, samples: _Samples, folds: list[Fold], noun: str) -> Advice:
    right: dict[str, list[Tensor]] = {}
    parts: dict[float, list[Tensor]] = {share: [] for share in _SHARES}
    sizes = dict.fromkeys(_SHARES, 0)
    for train, test in folds:
        client = _Client(exchange, samples, test)
        for way, said in client.answer(train).items():
            right.setdefault(way, []).append(said)
        for share in _SHARES:
            part = _draw_share(samples.labels, train, share)
            parts[share].append(client.answer_alone(part))
            sizes[share] += len(part)
    answers = {way: torch.cat(each) for way, each in right.items()}
    truth = samples.labels[torch.cat([test for _, test in folds])]
    compared = "personal" if "personal" in answers else "pooled"
    points = [
        (round(sizes[share] / len(folds)), _percent(torch.cat(parts[share]))) for share in _SHARES
    ]
    everything = torch.bincount(samples.labels[folds[0][0]], minlength=len(exchange.class_names))
    classes = [
        ClassAdvice(
            name,
            int(everything[label]),
            int((truth == label).sum()),
            int(answers["own"][truth == label].sum()),
            int(answers[compared][truth == label].sum()),
        )
        for label, name in enumerate(exchange.class_names)
        if bool((truth == label).any())
    ]
    return Advice(
        noun=noun,
        train=points[-1][0],
        tested=len(truth),
        folds=len(folds),
        accuracy={way: _percent(each) for way, each in answers.items()},
        compared=compared,
        difference=compare_answers(answers[compared], answers["own"]),
        classes=classes,
        curve=points,
        more_needed=samples_needed(points, _percent(answers[compared])),
    )


@dataclass(frozen=True)
class _Client:
    """Learns from some samples, and answers for others."""

    exchange: Exchange
    samples: _Samples
    test: Tensor

    def answer(self, train: Tensor) -> dict[str, Tensor]:
        """Return which test samples each way is right about."""
        inputs, labels = self.samples.inputs[train], self.samples.labels[train]
        method = self.exchange.method
        # As it would be with this client: how clients differ is known only with it.
        own = method.own_statistics(method.collect(inputs, labels))
        fitted = self.exchange.with_client(_NAME, own).fit()
        found = {"own": self.answer_alone(train)}
        found["pooled"] = self._read(fitted.params, labels)
        personal = method.personalize(fitted.received, inputs, labels)
        if personal is not None:
            found["personal"] = self._read(personal, labels)
        return found

    def answer_alone(self, train: Tensor) -> Tensor:
        """Return the same of the closed form of these samples alone."""
        method = LocalGauss(self.exchange.experiment, self.exchange.pool.num_classes)
        inputs, labels = self.samples.inputs[train], self.samples.labels[train]
        return self._read(method.personalize(None, inputs, labels), labels)

    def _read(self, params: Tensors, labels: Tensor) -> Tensor:
        scores = self.exchange.scores(params, self.samples.inputs[self.test])
        counts = torch.bincount(labels, minlength=self.exchange.pool.num_classes)
        said = (scores + log_prior(counts).to(scores)).argmax(1)
        return said == self.samples.labels[self.test]


def _draw_share(labels: Tensor, rows: Tensor, share: float) -> Tensor:
    """Return a share of some samples of each class, at least one, evenly from all of them."""
    kept = []
    for label in sorted(set(labels[rows].tolist())):
        own = rows[labels[rows] == label]
        size = max(1, round(share * len(own)))
        kept.append(own[torch.arange(size) * len(own) // size])
    return torch.cat(kept)


def samples_needed(curve: list[tuple[int, float]], wanted: float) -> int | None:
    """Return how many more samples a power law of the error asks for; None where it tells nothing.

    The errors at a quarter, half and all samples are put on a line by their logarithms.
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


def _percent(right: Tensor) -> float:
    return 100 * int(right.sum()) / len(right)
