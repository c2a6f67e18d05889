"""Advice to a client on joining a one-shot run: its local model compared with the federation's.

Both are computed in closed form and tested on the client's samples by cross-validation. Nothing is
sent or written: the federation's statistics come to the client.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.rng import numpy_generator
from mpfedcl.inference.new_client import NewClient
from mpfedcl.inference.one_shot import OneShotFederation, open_federation
from mpfedcl.inference.trained_run import load_trained_run
from mpfedcl.methods.local_gauss import LocalGauss
from mpfedcl.rounds.metrics import percent_correct

_NAME = "new client"
_FOLDS = 5
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
    """One class: the numbers of samples and of correct predictions."""

    name: str
    samples: int
    local: int
    federation: int


@dataclass(frozen=True)
class Advice:
    """The comparison of a client's local model with the federation's."""

    noun: str
    samples: int
    folds: int
    accuracy: dict[str, float]
    """In %, by the keys of `CLASSIFIERS`; all with the client's label prior."""
    compared: str
    """The federation's classifier that the local one is compared with."""
    difference: PairedAnswers
    classes: list[ClassAdvice]

    @property
    def verdict(self) -> str:
        """The advice in one sentence."""
        found = self.difference
        reach = f"95 % interval {found.low:+.1f} to {found.high:+.1f}"
        on = f"your {self.samples:,} {self.noun}s"
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


def advise(run: Path | str, data: Path | str, *, weights: Path | None = None) -> Advice:
    """Compare a client's local model with the classifiers that a one-shot run gives it.

    Args:
        run: The run directory.
        data: The client's samples, as for `mpfedcl.inference.membership.join`.
        weights: The encoder's file, if it has moved since the run.
    """
    federation = open_federation(Path(run))
    trained = load_trained_run(run, weights=weights)
    client = NewClient(trained, Path(data), _NAME)
    inputs = torch.cat([client.client.inputs, client.data.test_inputs])
    labels = torch.cat([client.client.labels, client.data.test_labels])
    noun = trained.input_format.noun
    if len(labels) < 2:
        raise InvalidInput(f"data has one {noun}; there must be one to train and one to test.")
    return _compare(federation, inputs, labels, noun)


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


def _compare(federation: OneShotFederation, inputs: Tensor, labels: Tensor, noun: str) -> Advice:
    """Fit classifiers on four fifths of a client's samples and test them on the last, in turn."""
    names, method = federation.class_names, federation.method
    alone = LocalGauss(federation.experiment, len(names))
    correct: dict[str, Tensor] = {}
    folds = list(_draw_folds(labels, federation.experiment.seed))
    for train, rows in folds:
        own = inputs[train], labels[train]
        counts = torch.bincount(labels[train], minlength=len(names))
        # With the client in it: only then does the federation know how clients differ.
        after = federation.with_client(_NAME, method.own_statistics(method.collect(*own)))
        fitted = {
            "local": alone.personalize(None, *own),
            "global": after.server.params,
            "personal": method.personalize(after.received, *own),
        }
        for name, params in fitted.items():
            if params is not None:
                found = federation.predicts(params, inputs[rows], labels[rows], counts)
                correct.setdefault(name, torch.zeros(len(labels), dtype=torch.bool))[rows] = found
    compared = "personal" if "personal" in correct else "global"
    local, best = correct["local"], correct[compared]
    classes = []
    for label, name in enumerate(names):
        rows = labels == label
        if bool(rows.any()):
            right = (int(each[rows].sum()) for each in (local, best))
            classes.append(ClassAdvice(name, int(rows.sum()), *right))
    return Advice(
        noun=noun,
        samples=len(labels),
        folds=len(folds),
        accuracy={name: percent_correct(each) or 0.0 for name, each in correct.items()},
        compared=compared,
        difference=compare_answers(best, local),
        classes=classes,
    )
