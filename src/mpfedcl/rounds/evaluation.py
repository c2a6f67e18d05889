"""RoundEvaluation: which model predicts, by which rule, on whose test images."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from mpfedcl.methods import PREDICTORS, TESTS, Method, PredictorName, Test
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.calibration_error import (
    BinSums,
    describe_bins,
    expected_calibration_error,
)
from mpfedcl.rounds.listed_clients import ListedAccuracies, list_accuracies

AccuracyTable = dict[str, dict[str, float | None]]
"""Percent correct by test and reading; None where a method has no such thing, and no entry at all
where nobody has read it."""
Column = list[float | None]
"""One reading of several clients, in their order."""
PredictorColumns = dict[Test, dict[PredictorName, Column]]
WantedPredictors = Mapping[Test, Collection[PredictorName]]
"""What is to be read on which test."""
ConfusionCounts = list[list[int]]
"""Test images by true class (rows) and by the class said (columns); the last column: no answer."""

_CHUNK = 4096
"""Images that pass through a model together."""
_READ_AT_ONCE = 16384
"""Images times models that are read together."""


def wanted_predictors(method: Method, *, is_complete: bool) -> WantedPredictors:
    """Return what a round reads: everything, or only what the method is judged by on each test.

    Everything in a round that is read completely, as the last one is, or where settings ask for it.
    """
    if is_complete or method.experiment.evaluate_predictors == "all":
        return dict.fromkeys(TESTS, PREDICTORS)
    return {test: (method.predictor_on(test),) for test in TESTS}


@dataclass(frozen=True)
class RoundEvaluation:
    """What every client measured in a round."""

    names: Sequence[str]
    columns: PredictorColumns
    """What was read, of each client in the order of names."""
    trained: Collection[str]
    """The clients whose personal models count: those that trained in this round."""
    confusion: dict[str, ConfusionCounts] = field(default_factory=dict)
    """Counted only where asked for: the method's own predictor on each client's local test set."""
    bins: dict[Test, BinSums] = field(default_factory=dict)
    """Counted with it: probabilities of the predictor that each test is judged by, of all clients."""

    @classmethod
    def of_tables(
        cls,
        tables: Mapping[str, AccuracyTable],
        trained: Collection[str],
        confusion: dict[str, ConfusionCounts] | None = None,
    ) -> Self:
        """Join what clients have read one by one."""
        columns: PredictorColumns = {
            test: {r: [table[test].get(r) for table in tables.values()] for r in PREDICTORS}
            for test in TESTS
        }
        return cls(list(tables), columns, trained, confusion or {})

    def table(self) -> AccuracyTable:
        """Average over clients: global models over all, personal models over the trained."""
        return {test: {r: self._mean(test, r) for r in self.columns[test]} for test in TESTS}

    def per_client(self, predictor: PredictorName) -> dict[str, float | None]:
        """Return one predictor on each client's local test set."""
        return dict(zip(self.names, self.columns["local_test"][predictor], strict=True))

    def listed(self, predictor: PredictorName, took_part: Collection[str]) -> ListedAccuracies:
        """Return what a record says of that predictor."""
        return list_accuracies(self.per_client(predictor), took_part)

    def only(self, told: Collection[PredictorName]) -> Self:
        """Return the predictors that may be told; the others are as if there were no such thing."""
        hidden: Column = [None] * len(self.names)
        columns: PredictorColumns = {
            test: {r: column if r in told else hidden for r, column in row.items()}
            for test, row in self.columns.items()
        }
        return replace(self, columns=columns)

    def limited_to(self, wanted: WantedPredictors) -> Self:
        """Return the wanted predictors; the others are as if nobody had read them."""
        columns: PredictorColumns = {
            test: {r: column for r, column in row.items() if r in wanted[test]}
            for test, row in self.columns.items()
        }
        return replace(self, columns=columns)

    def calibration_error(self) -> dict[Test, float | None]:
        """Return the expected calibration error in %; None where no classifier is judged."""
        return {test: expected_calibration_error(self.bins.get(test, [])) for test in TESTS}

    def calibration_bins(self) -> dict[Test, list[list[float]]] | None:
        """Return the bins of that error which hold images; None where no classifier is judged."""
        found = {test: describe_bins(bins) for test, bins in self.bins.items()}
        return {test: bins for test, bins in found.items() if bins} or None

    def _mean(self, test: Test, predictor: PredictorName) -> float | None:
        column = self.columns[test][predictor]
        if predictor.startswith("personal"):
            trained = set(self.trained)
            column = [c for n, c in zip(self.names, column, strict=True) if n in trained]
        known = [value for value in column if value is not None]
        return sum(known) / len(known) if known else None


@dataclass(frozen=True)
class Predictions:
    """What one model says of each test image: the class by each rule, -1 for none, and scores."""

    classifier: Tensor
    """[n] classes."""
    prototype: Tensor | None
    """[n] classes; None without prototypes."""
    scores: Tensor
    """[n, C] of the classifier."""
    similarities: Tensor | None = None
    """[n, C] max z.p / temperature over a class's prototypes; -inf where it has none."""

    def select(self, rows: Tensor) -> "Predictions":
        """Return what it says of some images."""
        return self.map(lambda part: part[rows])

    def map(self, change: Callable[[Tensor], Tensor]) -> "Predictions":
        """Return the same with all of its tensors changed."""
        prototype, similarities = self.prototype, self.similarities
        return Predictions(
            change(self.classifier),
            None if prototype is None else change(prototype),
            change(self.scores),
            None if similarities is None else change(similarities),
        )


@dataclass(frozen=True)
class Evaluator:
    """Asks models about test images, mostly the union of all clients'."""

    inputs: Tensor
    labels: Tensor
    project: Callable[[Tensor], Tensor]
    reference: PrototypePool | None
    temperature: float = 0.07
    """By which similarities to prototypes are divided."""
    read_at_once: int = _READ_AT_ONCE

    @property
    def models_at_once(self) -> int:
        """How many models may read together; the memory stays flat."""
        return max(1, self.read_at_once // max(1, min(len(self.labels), _CHUNK)))

    @torch.no_grad()
    def predict(
        self,
        apply: Callable[[Tensor], tuple[Tensor, Tensor]],
        *,
        with_similarities: bool = False,
    ) -> list[Predictions]:
        """Return what each of several models answers.

        `apply` returns embeddings and logits [models, B, ...] for inputs [B, ...].
        """
        scores, prototype, similarities = [], [], []
        for inputs in torch.split(self.inputs, _CHUNK):
            embeddings, logits = apply(inputs)
            scores.append(logits)
            if self.reference is not None:
                projected = self.project(embeddings).flatten(0, 1)
                nearest, _ = self.reference.nearest(projected)
                prototype.append(nearest.view(embeddings.shape[:2]))
                if with_similarities:
                    found = self.reference.similarities_by_class(projected) / self.temperature
                    similarities.append(found.view(*embeddings.shape[:2], -1))
        all_scores = torch.cat(scores, dim=1)
        count = len(all_scores)
        nearby = torch.cat(prototype, dim=1) if prototype else [None] * count
        similar = torch.cat(similarities, dim=1) if similarities else [None] * count
        answers = zip(all_scores.argmax(dim=2), nearby, all_scores, similar, strict=True)
        return [Predictions(*each) for each in answers]


def as_stack(outputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return what one model gives in the form of several: [1, B, ...]."""
    return outputs[0].unsqueeze(0), outputs[1].unsqueeze(0)


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
