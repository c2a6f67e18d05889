"""Readings: which model predicts, by which rule, on whose test images."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mpfedcl.methods import READINGS, Reading
from mpfedcl.prototypes import PrototypePool

TESTS = ("own", "union")
"""own: each client on its own test images; union: on all clients' test images together."""

Table = dict[str, dict[str, float | None]]
"""Percent correct by test and reading; None where a method has no such thing."""

_CHUNK = 4096
"""Images that pass through a model together."""
_READ_AT_ONCE = 16384
"""Images times models that are read together."""


@dataclass(frozen=True)
class Readings:
    """What every client measured in a round."""

    clients: dict[str, Table]
    trained: Sequence[str]
    """The clients whose personal models count: those that trained in this round."""

    def table(self) -> Table:
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


@dataclass
class Marks:
    """Which test images one model got right, by each rule."""

    classifier: Tensor
    prototype: Tensor | None


@dataclass(frozen=True)
class Examiner:
    """Marks models on the union of all clients' test images."""

    inputs: Tensor
    labels: Tensor
    project: Callable[[Tensor], Tensor]
    reference: PrototypePool | None

    @property
    def models_at_once(self) -> int:
        """How many models may read together; the memory stays flat."""
        return max(1, _READ_AT_ONCE // max(1, min(len(self.labels), _CHUNK)))

    @torch.no_grad()
    def mark(self, apply: Callable[[Tensor], tuple[Tensor, Tensor]]) -> list[Marks]:
        """Return what each of several models gets right.

        `apply` returns embeddings and logits [models, B, ...] for inputs [B, ...].
        """
        classifier, prototype = [], []
        for inputs, labels in zip(
            torch.split(self.inputs, _CHUNK), torch.split(self.labels, _CHUNK), strict=True
        ):
            embeddings, logits = apply(inputs)
            classifier.append(logits.argmax(dim=2) == labels)
            if self.reference is not None:
                nearest, _ = self.reference.nearest(self.project(embeddings).flatten(0, 1))
                prototype.append(nearest.view(embeddings.shape[:2]) == labels)
        by_classifier = torch.cat(classifier, dim=1)
        if self.reference is None:
            return [Marks(right, None) for right in by_classifier]
        pairs = zip(by_classifier, torch.cat(prototype, dim=1), strict=True)
        return [Marks(right, also) for right, also in pairs]


def tabulate(personal: Marks | None, averaged: Marks | None, own: Tensor) -> Table:
    """Return one client's four readings on both tests; `own` are its images in the union."""
    marks: dict[Reading, Tensor | None] = {
        "personal_classifier": personal.classifier if personal else None,
        "personal_prototype": personal.prototype if personal else None,
        "averaged_classifier": averaged.classifier if averaged else None,
        "averaged_prototype": averaged.prototype if averaged else None,
    }
    return {
        "own": {r: _percent(None if m is None else m[own]) for r, m in marks.items()},
        "union": {r: _percent(m) for r, m in marks.items()},
    }


def _percent(correct: Tensor | None) -> float | None:
    if correct is None or correct.numel() == 0:
        return None
    return 100 * int(correct.sum()) / correct.numel()
