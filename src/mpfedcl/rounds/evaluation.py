"""RoundReadings: which model predicts, by which rule, on whose test images."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from mpfedcl.methods import READINGS, TESTS, Reading, Test
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.calibration_error import (
    BinSums,
    add_bins,
    count_bins,
    describe_bins,
    expected_calibration_error,
)
from mpfedcl.rounds.label_prior import estimate_prior, estimate_priors, log_prior
from mpfedcl.rounds.listed_clients import ListedAccuracies, list_accuracies

AccuracyTable = dict[str, dict[str, float | None]]
"""Percent correct by test and reading; None where a method has no such thing."""
ConfusionCounts = list[list[int]]
"""Test images by true class (rows) and by the class said (columns); the last column: no answer."""

_CHUNK = 4096
"""Images that pass through a model together."""
_READ_AT_ONCE = 16384
"""Images times models that are read together."""
_MOST_PRIOR_SCORES = 2**31
"""Clients times union images times classes up to which priors are read on the union test: the
averaged model says the same to everybody, but a prior makes it say something else to each."""
_MOST_BINNED_SCORES = 2**28
"""The same for probabilities that differ from client to client: measuring them stays cheap."""


@dataclass(frozen=True)
class RoundReadings:
    """What every client measured in a round."""

    clients: dict[str, AccuracyTable]
    trained: Sequence[str]
    """The clients whose personal models count: those that trained in this round."""
    confusion: dict[str, ConfusionCounts] = field(default_factory=dict)
    """Counted only where asked for: the method's own reading on each client's own test."""
    bins: dict[Test, BinSums] = field(default_factory=dict)
    """Counted with it: probabilities of the reading that each test is judged by, of all clients."""

    def table(self) -> AccuracyTable:
        """Average over clients: averaged models over all, personal models over the trained."""
        return {test: {r: self._mean(test, r) for r in READINGS} for test in TESTS}

    def per_client(self, reading: Reading) -> dict[str, float | None]:
        """Return one reading on each client's own test."""
        return {name: table["own"][reading] for name, table in self.clients.items()}

    def listed(self, reading: Reading, took_part: Collection[str]) -> ListedAccuracies:
        """Return what a record says of that reading."""
        return list_accuracies(self.per_client(reading), took_part)

    def only(self, told: Collection[Reading]) -> "RoundReadings":
        """Return the readings that may be told; the others are as if nobody had read them."""
        clients = {
            name: {
                test: {r: value if r in told else None for r, value in row.items()}
                for test, row in table.items()
            }
            for name, table in self.clients.items()
        }
        return replace(self, clients=clients)

    def calibration_error(self) -> dict[Test, float | None]:
        """Return the expected calibration error in %; None where no classifier is judged."""
        return {test: expected_calibration_error(self.bins.get(test, [])) for test in TESTS}

    def calibration_bins(self) -> dict[Test, list[list[float]]] | None:
        """Return the bins of that error which hold images; None where no classifier is judged."""
        found = {test: describe_bins(bins) for test, bins in self.bins.items()}
        return {test: bins for test, bins in found.items() if bins} or None

    def _mean(self, test: str, reading: str) -> float | None:
        names = self.trained if reading.startswith("personal") else list(self.clients)
        values = [self.clients[name][test][reading] for name in names]
        known = [value for value in values if value is not None]
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


@dataclass(frozen=True)
class Evaluator:
    """Asks models about the union of all clients' test images."""

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


@dataclass(frozen=True)
class ClientReader:
    """Turns what models say of the union test into every client's readings."""

    labels: Tensor
    """[n]: the truth."""
    averaged: Predictions | None
    num_clients: int

    def tables(
        self,
        personal: Predictions | None,
        own: Tensor,
        label_counts: Tensor,
        estimated: Tensor | None = None,
    ) -> tuple[AccuracyTable, dict[Reading, Tensor]]:
        """Return one client's readings on both tests, and what it says on its own.

        `own` are its images in the union, `label_counts` [C] those that it was trained on,
        `estimated` its log prior as found without labels.
        """
        prior = log_prior(label_counts)
        on_own = self._say(personal, prior, own, estimated)
        size = self.num_clients * len(self.labels) * len(label_counts)
        on_union: Mapping[Reading, Tensor] = {}
        if len(own) == len(self.labels):
            # All images are its own, and read already.
            on_union = {r: said for r, said in on_own.items() if r.endswith("prior")}
        elif size <= _MOST_PRIOR_SCORES:
            on_union = _add_priors(personal, self.averaged, prior)
        truth = self.labels[own]
        union: dict[str, float | None] = dict.fromkeys(READINGS)
        union |= self._averaged_on_union
        union |= {r: percent_correct(said == self.labels) for r, said in on_union.items()}
        if personal is not None:
            union["personal_classifier"] = percent_correct(personal.classifier == self.labels)
            if personal.prototype is not None:
                union["personal_prototype"] = percent_correct(personal.prototype == self.labels)
        right: dict[str, float | None] = dict.fromkeys(READINGS)
        right |= {r: percent_correct(said == truth) for r, said in on_own.items()}
        return {"own": right, "union": union}, on_own

    def bins(
        self,
        readings: Mapping[Test, Reading],
        personal: Predictions | None,
        own: Tensor,
        label_counts: Tensor,
    ) -> dict[Test, BinSums]:
        """Return one client's probabilities by the reading of each test, as far as it has them."""
        prior, found = log_prior(label_counts), dict[Test, BinSums]()
        on_own = _select(personal, own), _select(self.averaged, own)
        if len(own) and (scores := _read_scores(readings["own"], *on_own, prior)) is not None:
            found["own"] = count_bins(scores, self.labels[own])
        if readings["union"] == "averaged_classifier":
            # The same for all clients; that it is added up for each leaves the error as it is.
            found["union"] = self._averaged_bins
        elif self.num_clients * len(self.labels) * len(label_counts) <= _MOST_BINNED_SCORES:
            scores = _read_scores(readings["union"], personal, self.averaged, prior)
            found["union"] = add_bins([]) if scores is None else count_bins(scores, self.labels)
        return found

    @cached_property
    def _averaged_bins(self) -> BinSums:
        return (
            add_bins([]) if self.averaged is None else count_bins(self.averaged.scores, self.labels)
        )

    @cached_property
    def _averaged_on_union(self) -> dict[str, float | None]:
        """The same for all clients: read once."""
        if self.averaged is None:
            return {}
        said = {
            "averaged_classifier": self.averaged.classifier,
            "averaged_prototype": self.averaged.prototype,
        }
        return {r: percent_correct(e == self.labels) for r, e in said.items() if e is not None}

    def _say(
        self,
        personal: Predictions | None,
        prior: Tensor,
        own: Tensor,
        estimated: Tensor | None,
    ) -> dict[Reading, Tensor]:
        personal, averaged = _select(personal, own), _select(self.averaged, own)
        said = _add_priors(personal, averaged, prior)
        if personal is not None:
            said["personal_classifier"] = personal.classifier
            if personal.prototype is not None:
                said["personal_prototype"] = personal.prototype
        if averaged is not None:
            said["averaged_classifier"] = averaged.classifier
            if averaged.prototype is not None:
                said["averaged_prototype"] = averaged.prototype
            if estimated is not None:
                scores = averaged.scores + estimated.to(averaged.scores)
                said["averaged_classifier_estimated"] = scores.argmax(dim=1)
        return said


def estimate_own_priors(
    averaged: Predictions | None, tests: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return each client's log prior as its own test images say it without their labels."""
    named = {name: own for name, own in tests.items() if len(own)}
    if averaged is None or not named:
        return {}
    if all(len(own) == len(averaged.scores) for own in named.values()):
        # All are tested on all images.
        return dict.fromkeys(named, estimate_prior(averaged.scores))
    sizes = torch.tensor([len(own) for own in named.values()])
    owners = torch.arange(len(named)).repeat_interleave(sizes)
    scores = averaged.scores[torch.cat(list(named.values()))]
    return dict(zip(named, estimate_priors(scores, owners, len(named)), strict=True))


def _select(predictions: Predictions | None, rows: Tensor) -> Predictions | None:
    if predictions is None or len(rows) == len(predictions.classifier):
        return predictions
    parts = (predictions.classifier, predictions.prototype, predictions.scores)
    chosen = [None if part is None else part[rows] for part in (*parts, predictions.similarities)]
    return Predictions(*chosen)  # type: ignore[arg-type]


def _read_scores(
    reading: Reading, personal: Predictions | None, averaged: Predictions | None, prior: Tensor
) -> Tensor | None:
    """Return the scores whose softmax is a reading's probabilities; None: it is no classifier."""
    model = personal if reading.startswith("personal") else averaged
    if model is None or "prototype" in reading:
        return None
    if reading.endswith("_prior"):
        return model.scores.double() + prior
    return model.scores + estimate_prior(model.scores) if "estimated" in reading else model.scores


def _add_priors(
    personal: Predictions | None, averaged: Predictions | None, prior: Tensor
) -> dict[Reading, Tensor]:
    """Return what models answer with a client's label prior added to their scores."""
    scores: dict[Reading, Tensor | None] = {
        "personal_classifier_prior": None if personal is None else personal.scores,
        "averaged_classifier_prior": None if averaged is None else averaged.scores,
        "averaged_prototype_prior": None if averaged is None else averaged.similarities,
    }
    return {r: (s + prior.to(s)).argmax(dim=1) for r, s in scores.items() if s is not None}


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
