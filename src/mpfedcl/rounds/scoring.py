"""Predictions of many clients at once: local test sets are one array, counts are segment sums."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Self

import torch
from torch import Tensor

from mpfedcl.gaussian import SMOOTHING
from mpfedcl.methods import PredictorKind, PredictorName, Test
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.metrics import (
    MOST_PROBABILITIES,
    BinSums,
    PredictedSamples,
    add_bins,
    as_percents,
    count_bins,
    percent_correct,
)

Column = list[float | None]
"""One predictor of several clients, in their order."""

_MOST_EM_STEPS, _EM_TOLERANCE = 200, 1e-4
_CHUNK = 4096
"""Images that pass through a model together."""
_READ_AT_ONCE = 16384
"""Images times models that are evaluated together."""
_SCORES_AT_ONCE = 2**22
"""Clients times images times classes that are held together."""
_MOST_PRIOR_SCORES = 2**29
"""Clients times images times classes up to which the label priors of all clients are evaluated on
the global test set. Beyond it, only those of clients whose personal models are evaluated: without a
prior the global model predicts the same for all clients, with one it does not."""


def log_prior(counts: Tensor) -> Tensor:
    """Return log((n_c + 0.1) / (n + 0.1 C)) for counts [..., C].

    Example:
        >>> import torch
        >>> log_prior(torch.tensor([9, 0])).exp()
        tensor([0.9891, 0.0109], dtype=torch.float64)
    """
    smooth = counts.double() + SMOOTHING
    return (smooth / smooth.sum(dim=-1, keepdim=True)).log()


def estimate_prior(scores: Tensor) -> Tensor:
    """Estimate a label prior from unlabeled samples by EM (Saerens et al., 2002); its log [C].

    Args:
        scores: [B, C] log-likelihoods of each class, up to a constant per sample.

    Example:
        >>> import torch
        >>> likely = torch.tensor([[0.0, -9.0], [0.0, -9.0], [0.0, -9.0], [-9.0, 0.0]])
        >>> [round(share, 2) for share in estimate_prior(likely).exp().tolist()]
        [0.74, 0.26]
    """
    return estimate_priors(scores, torch.zeros(len(scores), dtype=torch.int64), 1)[0]


@torch.no_grad()
def estimate_priors(scores: Tensor, owners: Tensor, num_clients: int) -> Tensor:
    """Estimate the log priors [N, C] of several clients; `owners` [B]: the client of a sample."""
    scores, owners = scores.double(), owners.to(scores.device)
    prior = scores.new_full((num_clients, scores.shape[-1]), 1 / scores.shape[-1])
    for _ in range(_MOST_EM_STEPS):
        expected = torch.softmax(scores + prior.log()[owners], dim=-1)
        tallied = torch.full_like(prior, SMOOTHING).index_add_(0, owners, expected)
        after = tallied / tallied.sum(dim=1, keepdim=True)
        moved = float((after - prior).abs().max())
        prior = after
        if moved < _EM_TOLERANCE:
            break
    return prior.log()


@dataclass(frozen=True)
class Predictions:
    """The output of one model for each test image: classes by each rule (-1: none), and scores."""

    classifier: Tensor
    """[n] classes."""
    prototype: Tensor | None
    """[n] classes; None without prototypes."""
    scores: Tensor
    """[n, C] of the classifier."""
    similarities: Tensor | None = None
    """[n, C] max z.p / temperature over a class's prototypes; -inf for a class without any."""
    projected: Tensor | None = None
    """[n, d] the embeddings z; only if probabilities by prototypes are wanted."""
    reference: PrototypePool | None = None
    """The prototypes p that `projected` is compared with."""
    temperature: float = 1.0

    def classes_by(self, rule: Literal["classifier", "prototype"]) -> Tensor | None:
        """Return the classes that a rule predicts."""
        return self.prototype if rule == "prototype" else self.classifier

    def scores_by(self, rule: Literal["classifier", "prototype"]) -> Tensor | None:
        """Return the scores that a label prior is added to."""
        return self.similarities if rule == "prototype" else self.scores

    def probabilities(self, kind: PredictorKind, prior: Tensor | None) -> Tensor | None:
        """Return the probabilities [n, C] of a predictor; `prior` [C] or [n, C] is a log prior."""
        scores = self.scores_by(kind.rule)
        if kind.rule == "prototype" and prior is None:
            scores = self._closeness()
        if scores is None:
            return None
        scores = scores if prior is None else scores + prior.to(scores)
        return torch.softmax(scores.double(), dim=-1)

    def _closeness(self) -> Tensor | None:
        """Return [n, C] max -|z - p|² / (2 temperature), up to a constant of each sample.

        -inf for a class without any p. The nearest prototype is of the class with the largest.
        """
        if self.projected is None or self.reference is None:
            return None
        return self.reference.closeness_by_class(self.projected) / self.temperature

    def tensors(self) -> dict[str, Any]:
        """Return the columns, whose rows are the images."""
        return {name: part for name, part in vars(self).items() if isinstance(part, Tensor)}

    def select(self, rows: Tensor) -> Self:
        """Return the predictions for some images."""
        return replace(self, **{name: part[rows] for name, part in self.tensors().items()})


@dataclass(frozen=True)
class Evaluator:
    """Applies models to test images, mostly to the global test set."""

    inputs: Tensor
    labels: Tensor
    project: Callable[[Tensor], Tensor]
    reference: PrototypePool | None
    temperature: float = 0.07
    """Divides similarities to prototypes."""
    read_at_once: int = _READ_AT_ONCE
    keeps_projected: bool = False
    """Whether predictions have what probabilities by prototypes are computed from."""
    keeps_similarities: bool = False
    """Whether predictions have what a label prior is added to, by prototypes."""

    @property
    def models_at_once(self) -> int:
        """The number of models that are applied together, so that memory stays flat."""
        return max(1, self.read_at_once // max(1, min(len(self.labels), _CHUNK)))

    @torch.no_grad()
    def predict(self, apply: Callable[[Tensor], tuple[Tensor, Tensor]]) -> list[Predictions]:
        """Return the predictions of each of several models.

        `apply` returns embeddings and logits [models, B, ...] for inputs [B, ...].
        """
        scores, prototype, similarities, kept = [], [], [], []
        for inputs in torch.split(self.inputs, _CHUNK):
            embeddings, logits = apply(inputs)
            scores.append(logits)
            if self.reference is not None:
                projected = self.project(embeddings).flatten(0, 1)
                nearest, _ = self.reference.nearest(projected)
                prototype.append(nearest.view(embeddings.shape[:2]))
                if self.keeps_similarities:
                    found = self.reference.similarities_by_class(projected) / self.temperature
                    similarities.append(found.view(*embeddings.shape[:2], -1))
                if self.keeps_projected:
                    kept.append(projected.view(*embeddings.shape[:2], -1))
        all_scores = torch.cat(scores, dim=1)
        count = len(all_scores)
        nearby = torch.cat(prototype, dim=1) if prototype else [None] * count
        similar = torch.cat(similarities, dim=1) if similarities else [None] * count
        images = torch.cat(kept, dim=1) if kept else [None] * count
        answers = zip(all_scores.argmax(dim=2), nearby, all_scores, similar, images, strict=True)
        return [Predictions(*each, self.reference, self.temperature) for each in answers]


def as_stack(outputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the outputs of one model in the form of several: [1, B, ...]."""
    return outputs[0].unsqueeze(0), outputs[1].unsqueeze(0)


@dataclass(frozen=True)
class ClientTests:
    """The clients' test sets as arrays, made once and used in every round."""

    labels: Tensor
    """[n] of the global test set."""
    label_counts: Tensor
    """[N, C] training images of each client."""
    sizes: Tensor
    """[N] images of each client's local test set."""
    rows: Tensor
    """Their places in the global test set, client by client; empty if every client has all."""

    @classmethod
    def of(cls, labels: Tensor, label_counts: Tensor, own: Sequence[Tensor]) -> Self:
        """Concatenate the clients' local test sets, given as places in the global test set."""
        sizes = torch.tensor([len(each) for each in own], dtype=torch.int64)
        is_shared = bool((sizes == len(labels)).all())
        rows = labels.new_zeros(0) if is_shared or not own else torch.cat(list(own))
        return cls(labels, label_counts, sizes.to(labels.device), rows)

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def is_shared(self) -> bool:
        """Whether every local test set is the global one."""
        return bool((self.sizes == len(self.labels)).all())

    @cached_property
    def priors(self) -> Tensor:
        """[N, C] log label priors of the clients."""
        return log_prior(self.label_counts)

    @cached_property
    def owners(self) -> Tensor:
        """The client of each of the rows."""
        clients = torch.arange(len(self), device=self.rows.device)
        return clients[:0] if self.is_shared else clients.repeat_interleave(self.sizes)

    @cached_property
    def _ends(self) -> list[int]:
        return [0, *self.sizes.cumsum(0).tolist()]

    def own(self, client: int) -> Tensor:
        """Return the places of one client's images in the global test set."""
        if self.is_shared:
            return torch.arange(len(self.labels), device=self.labels.device)
        return self.rows[self._ends[client] : self._ends[client + 1]]

    def count_own(self, correct: Tensor) -> Tensor:
        """Count [N] the images of each local test set for which `correct` [n] is true."""
        if self.is_shared:
            return correct.sum().expand(len(self))
        return torch.zeros_like(self.sizes).index_add_(0, self.owners, correct[self.rows].long())

    def add_priors(
        self, scores: Tensor, priors: Tensor, clients: Tensor, test: Test
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield scores plus clients' priors [B, C], the client of each [B], and labels [B]."""
        num_classes = scores.shape[1]
        if test == "global_test" or self.is_shared:
            size = len(self.labels)
            for some in torch.split(clients, max(1, _SCORES_AT_ONCE // (size * num_classes or 1))):
                added = scores + priors[some].to(scores).unsqueeze(1)
                yield (
                    added.flatten(0, 1),
                    some.repeat_interleave(size),
                    self.labels.repeat(len(some)),
                )
            return
        wanted = torch.zeros_like(self.sizes, dtype=torch.bool)
        wanted[clients] = True
        places = wanted[self.owners].nonzero().squeeze(1)
        for some in torch.split(places, max(1, _SCORES_AT_ONCE // num_classes)):
            rows, owners = self.rows[some], self.owners[some]
            yield scores[rows] + priors[owners].to(scores), owners, self.labels[rows]


@dataclass(frozen=True)
class GlobalScorer:
    """Scores the global model for each client, without and with the client's label prior."""

    tests: ClientTests
    predictions: Predictions
    """On the global test set."""
    evaluated: Tensor
    """The clients whose personal models are evaluated, by number."""

    def column(self, test: Test, predictor: PredictorName) -> Column:
        """Return the accuracy of one predictor for all clients."""
        kind, tests = PredictorKind.of(predictor), self.tests
        scores, classes = self._scores(test, kind), self.predictions.classes_by(kind.rule)
        if scores is not None and len(tests):
            return self._with_priors(test, kind, scores)
        if kind.prior != "none" or classes is None:
            return [None] * len(tests)
        if test == "global_test":
            return [percent_correct(classes == tests.labels)] * len(tests)
        return as_percents(tests.count_own(classes == tests.labels), tests.sizes)

    def samples(
        self, test: Test, predictor: PredictorName
    ) -> Iterator[tuple[int, PredictedSamples]]:
        """Yield clients and their predictions; none if they are undefined, or too many."""
        kind, tests, found = PredictorKind.of(predictor), self.tests, self.predictions
        clients: Sequence[int] = range(len(tests))
        if test == "local_test" and not tests.is_shared:
            if len(tests.rows) * found.scores.shape[1] <= MOST_PROBABILITIES:
                prior = None if kind.prior == "none" else self._priors(kind)[tests.owners]
                whole = _as_samples(found.select(tests.rows), tests.labels[tests.rows], kind, prior)
                if whole is not None:
                    yield from zip(clients, whole.split(tests.sizes.tolist()), strict=True)
        elif kind.prior == "none":
            if (same := _as_samples(found, tests.labels, kind, None)) is not None:
                yield from ((client, same) for client in clients)
        elif kind.prior == "labels" or test == "local_test":
            for client in self._affordable(test).tolist():
                prior = self._priors(kind)[client]
                if (own := _as_samples(found, tests.labels, kind, prior)) is not None:
                    yield client, own

    def predict(self, predictor: PredictorName, client: int) -> Tensor | None:
        """Return the classes predicted on one client's local test set; None if undefined."""
        kind, own = PredictorKind.of(predictor), self.tests.own(client)
        scores = self._scores("local_test", kind)
        if scores is not None:
            return (scores[own] + self._priors(kind)[client].to(scores)).argmax(dim=1)
        classes = self.predictions.classes_by(kind.rule)
        return None if kind.prior != "none" or classes is None else classes[own]

    def bins(self, test: Test, predictor: PredictorName) -> BinSums:
        """Return the calibration bins of all clients together."""
        kind, tests, scores = PredictorKind.of(predictor), self.tests, self.predictions.scores
        if kind.rule == "prototype" or (test == "global_test" and kind.prior == "estimated"):
            return add_bins([])
        if kind.prior != "none":
            clients = self._affordable(test)
            added = tests.add_priors(scores.double(), self._priors(kind), clients, test)
            return add_bins(count_bins(some, labels) for some, _, labels in added)
        if test == "global_test" or tests.is_shared:
            # The same for all clients, counted once per client.
            once = count_bins(scores, tests.labels)
            return [[len(tests) * each for each in row] for row in once]
        return count_bins(scores[tests.rows], tests.labels[tests.rows])

    def _scores(self, test: Test, kind: PredictorKind) -> Tensor | None:
        """Return the scores that a prior is added to; None without a prior, or if undefined."""
        # A prior estimated from a client's own images does not describe the global test set.
        if kind.prior == "none" or (kind.prior == "estimated" and test == "global_test"):
            return None
        return self.predictions.scores_by(kind.rule)

    def _priors(self, kind: PredictorKind) -> Tensor:
        return self._estimated if kind.prior == "estimated" else self.tests.priors

    @cached_property
    def _estimated(self) -> Tensor:
        """Each client's log prior [N, C], estimated from its local test set without the labels."""
        tests, scores = self.tests, self.predictions.scores
        if tests.is_shared:
            return estimate_prior(scores).expand(len(tests), -1)
        return estimate_priors(scores[tests.rows], tests.owners, len(tests))

    def _with_priors(self, test: Test, kind: PredictorKind, scores: Tensor) -> Column:
        tests, priors = self.tests, self._priors(kind)
        if kind.prior == "estimated" and tests.is_shared:
            # All clients have the same images, and so the same estimate.
            classes = (scores + priors[0].to(scores)).argmax(dim=1)
            return [percent_correct(classes == tests.labels)] * len(tests)
        clients = self._affordable(test)
        correct = torch.zeros_like(tests.sizes)
        for added, owners, labels in tests.add_priors(scores, priors, clients, test):
            correct.index_add_(0, owners, (added.argmax(dim=1) == labels).long())
        whole = torch.full_like(tests.sizes, len(tests.labels))
        column = as_percents(correct, whole if test == "global_test" else tests.sizes)
        if len(clients) == len(tests):
            return column
        known = set(clients.tolist())
        return [each if number in known else None for number, each in enumerate(column)]

    def _affordable(self, test: Test) -> Tensor:
        """Return the clients whose priors are evaluated: all, or some if these are too many."""
        size = len(self.tests.labels) * self.predictions.scores.shape[1]
        is_little = len(self.tests) * size <= _MOST_PRIOR_SCORES
        if is_little or (test == "local_test" and not self.tests.is_shared):
            return torch.arange(len(self.tests), device=self.tests.labels.device)
        return self.evaluated[: _MOST_PRIOR_SCORES // max(1, size)]


@dataclass(frozen=True)
class PersonalScorer:
    """Scores one client's personal model."""

    tests: ClientTests
    client: int
    predictions: Predictions
    is_whole: bool
    """Whether the predictions are for the global test set, or for the local one only."""
    _made: dict[tuple[Test, PredictorName], PredictedSamples | None] = field(default_factory=dict)

    def percent(self, test: Test, predictor: PredictorName) -> float | None:
        """Return the accuracy of one predictor."""
        classes = self.predict(test, predictor)
        return None if classes is None else percent_correct(classes == self._labels(test))

    def predict(self, test: Test, predictor: PredictorName) -> Tensor | None:
        """Return the predicted classes; None if undefined."""
        kind, found = PredictorKind.of(predictor), self._on(test)
        if kind.prior == "none":
            return found.classes_by(kind.rule)
        if (scores := found.scores_by(kind.rule)) is None:
            return None
        return (scores + self.tests.priors[self.client].to(scores)).argmax(dim=1)

    def samples(self, test: Test, predictor: PredictorName) -> PredictedSamples | None:
        """Return the predictions; None if undefined, or if there are too many of all clients."""
        if self._is_much(test):
            return None
        # One object for two equal test sets, so that it is measured once.
        test = "local_test" if self.tests.is_shared else test
        if (test, predictor) not in self._made:
            kind = PredictorKind.of(predictor)
            prior = self.tests.priors[self.client] if kind.prior != "none" else None
            found = _as_samples(self._on(test), self._labels(test), kind, prior)
            self._made[test, predictor] = found
        return self._made[test, predictor]

    def bins(self, test: Test, predictor: PredictorName) -> BinSums:
        """Return the calibration bins; empty ones for a prototype rule."""
        kind, scores = PredictorKind.of(predictor), self._on(test).scores
        if kind.rule == "prototype" or self._is_much(test) or not len(scores):
            return add_bins([])
        if kind.prior != "none":
            scores = scores.double() + self.tests.priors[self.client]
        return count_bins(scores, self._labels(test))

    def _is_much(self, test: Test) -> bool:
        """Return whether the global test set is too large for the models of all clients."""
        size = len(self.tests) * len(self.tests.labels) * self.predictions.scores.shape[1]
        return test == "global_test" and size > _MOST_PRIOR_SCORES

    def _on(self, test: Test) -> Predictions:
        assert self.is_whole or test == "local_test", "only the local test set was evaluated"
        is_all = not self.is_whole or test == "global_test" or self.tests.is_shared
        return self.predictions if is_all else self.predictions.select(self.tests.own(self.client))

    def _labels(self, test: Test) -> Tensor:
        labels = self.tests.labels
        return labels if test == "global_test" else labels[self.tests.own(self.client)]


def _as_samples(
    found: Predictions, labels: Tensor, kind: PredictorKind, prior: Tensor | None
) -> PredictedSamples | None:
    """Return predicted classes and probabilities; None if the predictor is undefined."""
    if labels.numel() * found.scores.shape[1] > MOST_PROBABILITIES:
        return None
    probabilities = found.probabilities(kind, prior)
    if prior is None:
        classes = found.classes_by(kind.rule)
    else:
        classes = None if probabilities is None else probabilities.argmax(dim=1)
    return None if classes is None else PredictedSamples(classes, labels, probabilities)
