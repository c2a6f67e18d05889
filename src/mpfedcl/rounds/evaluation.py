"""RoundReadings: which model predicts, by which rule, on whose test images."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from mpfedcl.methods import READINGS, Reading
from mpfedcl.prototypes import PrototypePool

Test = Literal["own", "union"]
TESTS: tuple[Test, ...] = ("own", "union")
"""own: each client on its own test images; union: on all clients' test images together."""
AccuracyTable = dict[str, dict[str, float | None]]
"""Percent correct by test and reading; None where a method has no such thing."""
ConfusionCounts = list[list[int]]
"""Test images by true class (rows) and by the class said (columns); the last column: no answer."""

_CHUNK = 4096
"""Images that pass through a model together."""
_READ_AT_ONCE = 16384
"""Images times models that are read together."""


@dataclass(frozen=True)
class RoundReadings:
    """What every client measured in a round."""

    clients: dict[str, AccuracyTable]
    trained: Sequence[str]
    """The clients whose personal models count: those that trained in this round."""
    confusion: dict[str, ConfusionCounts] = field(default_factory=dict)
    """Counted only where asked for: the method's own reading on each client's own test."""

    def table(self) -> AccuracyTable:
        """Average over clients: averaged models over all, personal models over the trained."""
        return {test: {r: self._mean(test, r) for r in READINGS} for test in TESTS}

    def per_client(self, reading: Reading) -> dict[str, float | None]:
        """Return one reading on each client's own test."""
        return {name: table["own"][reading] for name, table in self.clients.items()}

    def _mean(self, test: str, reading: str) -> float | None:
        names = self.trained if reading.startswith("personal") else list(self.clients)
        values = [self.clients[name][test][reading] for name in names]
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None


@dataclass(frozen=True)
class Predictions:
    """The class that one model says of each test image, by each rule; -1 for none."""

    classifier: Tensor
    prototype: Tensor | None


@dataclass(frozen=True)
class Evaluator:
    """Asks models about the union of all clients' test images."""

    inputs: Tensor
    labels: Tensor
    project: Callable[[Tensor], Tensor]
    reference: PrototypePool | None

    @property
    def models_at_once(self) -> int:
        """How many models may read together; the memory stays flat."""
        return max(1, _READ_AT_ONCE // max(1, min(len(self.labels), _CHUNK)))

    @torch.no_grad()
    def predict(self, apply: Callable[[Tensor], tuple[Tensor, Tensor]]) -> list[Predictions]:
        """Return what each of several models answers.

        `apply` returns embeddings and logits [models, B, ...] for inputs [B, ...].
        """
        classifier, prototype = [], []
        for inputs in torch.split(self.inputs, _CHUNK):
            embeddings, logits = apply(inputs)
            classifier.append(logits.argmax(dim=2))
            if self.reference is not None:
                nearest, _ = self.reference.nearest(self.project(embeddings).flatten(0, 1))
                prototype.append(nearest.view(embeddings.shape[:2]))
        by_classifier = torch.cat(classifier, dim=1)
        if self.reference is None:
            return [Predictions(said, None) for said in by_classifier]
        pairs = zip(by_classifier, torch.cat(prototype, dim=1), strict=True)
        return [Predictions(said, also) for said, also in pairs]


def as_stack(outputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return what one model gives in the form of several: [1, B, ...]."""
    return outputs[0].unsqueeze(0), outputs[1].unsqueeze(0)


def predictions_by_reading(
    personal: Predictions | None, averaged: Predictions | None
) -> dict[Reading, Tensor | None]:
    """Return what a client's own model and the averaged one answer, by reading."""
    return {
        "personal_classifier": personal.classifier if personal else None,
        "personal_prototype": personal.prototype if personal else None,
        "averaged_classifier": averaged.classifier if averaged else None,
        "averaged_prototype": averaged.prototype if averaged else None,
    }


def accuracy_table(
    answers: Mapping[Reading, Tensor | None], labels: Tensor, own: Tensor
) -> AccuracyTable:
    """Return one client's four readings on both tests; `own` are its images in the union."""
    right = {r: None if said is None else said == labels for r, said in answers.items()}
    return {
        "own": {
            r: percent_correct(None if each is None else each[own]) for r, each in right.items()
        },
        "union": {r: percent_correct(each) for r, each in right.items()},
    }


def count_confusions(said: Tensor, labels: Tensor, num_classes: int) -> ConfusionCounts:
    """Count [C][C + 1] answers by true class and class said; the last column holds the -1."""
    columns = num_classes + 1
    places = labels * columns + said.where(said >= 0, num_classes)
    return torch.bincount(places, minlength=num_classes * columns).view(-1, columns).tolist()


def percent_correct(correct: Tensor | None) -> float | None:
    """Return the share of right answers; None without any."""
    if correct is None or correct.numel() == 0:
        return None
    return 100 * int(correct.sum()) / correct.numel()
