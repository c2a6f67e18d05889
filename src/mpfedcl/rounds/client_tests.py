"""Readings of many clients at once: their local test sets are one array, and counts are segment sums."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from mpfedcl.methods import PredictorName, Test
from mpfedcl.rounds.calibration_error import BinSums, add_bins, count_bins
from mpfedcl.rounds.evaluation import Column, Predictions, percent_correct
from mpfedcl.rounds.label_prior import estimate_prior, estimate_priors, log_prior

_SCORES_AT_ONCE = 2**22
"""Clients times images times classes that are held together."""
_MOST_PRIOR_SCORES = 2**29
"""The same of all clients, up to which everybody's prior is read on images that all have: beyond it
only those are whose personal models are read. The global model says the same to everybody, but a
prior makes it say something else to each."""
_MOST_BINNED_SCORES = 2**28
"""The same for probabilities that differ from client to client: measuring them stays cheap."""


@dataclass(frozen=True)
class ClientTests:
    """What clients are tested on, as arrays: made once, used in every round."""

    labels: Tensor
    """[n] of the union of all tests."""
    label_counts: Tensor
    """[N, C] training images of each client."""
    sizes: Tensor
    """[N] images of each client's local test set."""
    rows: Tensor
    """Which images these are, client after client; empty where everybody has all."""

    @classmethod
    def of(cls, labels: Tensor, label_counts: Tensor, own: Sequence[Tensor]) -> Self:
        """Put clients' local test sets, images of the union, one after the other."""
        sizes = torch.tensor([len(each) for each in own], dtype=torch.int64)
        is_shared = bool((sizes == len(labels)).all())
        rows = labels.new_zeros(0) if is_shared or not own else torch.cat(list(own))
        return cls(labels, label_counts, sizes.to(labels.device), rows)

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def is_shared(self) -> bool:
        """Whether everybody is tested on all images."""
        return bool((self.sizes == len(self.labels)).all())

    @cached_property
    def priors(self) -> Tensor:
        """[N, C] logs of the clients' shares of labels."""
        return log_prior(self.label_counts)

    @cached_property
    def owners(self) -> Tensor:
        """Whose each of the rows is."""
        clients = torch.arange(len(self), device=self.rows.device)
        return clients[:0] if self.is_shared else clients.repeat_interleave(self.sizes)

    @cached_property
    def _ends(self) -> list[int]:
        return [0, *self.sizes.cumsum(0).tolist()]

    def own(self, client: int) -> Tensor:
        """Return one client's images of the union."""
        if self.is_shared:
            return torch.arange(len(self.labels), device=self.labels.device)
        return self.rows[self._ends[client] : self._ends[client + 1]]

    def count_own(self, correct: Tensor) -> Tensor:
        """Count [N] the images of each client's local test set for which `correct` [n] is true."""
        if self.is_shared:
            return correct.sum().expand(len(self))
        return torch.zeros_like(self.sizes).index_add_(0, self.owners, correct[self.rows].long())

    def add_priors(
        self, scores: Tensor, priors: Tensor, clients: Tensor, test: Test
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield scores with clients' priors added, [B, C], whose they are [B], and labels [B]."""
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
class GlobalReader:
    """What the global model says to each client, alone and with the client's label prior."""

    tests: ClientTests
    said: Predictions
    """Of the union of all tests."""
    read: Tensor
    """The clients whose personal models are read, by number."""

    def column(self, test: Test, predictor: PredictorName) -> Column:
        """Return one predictor of all clients."""
        num_clients, labels = len(self.tests), self.tests.labels
        is_estimate = predictor.endswith("_estimated")
        if predictor.endswith("_prior") or is_estimate:
            # What is found of a client's own images says nothing of everybody's.
            scores = None if is_estimate and test == "global_test" else self._scores(predictor)
            return [None] * num_clients if scores is None else self._with_priors(test, predictor)
        answer = self.said.prototype if "prototype" in predictor else self.said.classifier
        if answer is None:
            return [None] * num_clients
        if test == "global_test":
            return [percent_correct(answer == labels)] * num_clients
        return as_percents(self.tests.count_own(answer == labels), self.tests.sizes)

    def say(self, predictor: PredictorName, client: int) -> Tensor | None:
        """Return the classes said of one client's local test set; None where there is no such thing."""
        own = self.tests.own(client)
        if predictor.endswith(("_prior", "_estimated")):
            scores = self._scores(predictor)
            if scores is None:
                return None
            return (scores[own] + self._priors(predictor)[client].to(scores)).argmax(dim=1)
        answer = self.said.prototype if "prototype" in predictor else self.said.classifier
        return None if answer is None else answer[own]

    def bins(self, test: Test, predictor: PredictorName) -> BinSums:
        """Return the probabilities of all clients together, by the predictor of a test."""
        tests, scores = self.tests, self.said.scores
        if "prototype" in predictor or (test == "global_test" and predictor.endswith("_estimated")):
            return add_bins([])
        if predictor.endswith(("_prior", "_estimated")):
            clients = self._whose_priors(test, _MOST_BINNED_SCORES)
            added = tests.add_priors(scores.double(), self._priors(predictor), clients, test)
            return add_bins(count_bins(some, labels) for some, _, labels in added)
        if test == "global_test" or tests.is_shared:
            # The same for all clients; that it is added up for each leaves the error as it is.
            once = count_bins(scores, tests.labels)
            return [[len(tests) * each for each in row] for row in once]
        return count_bins(scores[tests.rows], tests.labels[tests.rows])

    def _scores(self, predictor: PredictorName) -> Tensor | None:
        return self.said.similarities if "prototype" in predictor else self.said.scores

    def _priors(self, predictor: PredictorName) -> Tensor:
        return self._estimated if predictor.endswith("_estimated") else self.tests.priors

    @cached_property
    def _estimated(self) -> Tensor:
        """Each client's log prior [N, C] as its local test set images say it without their labels."""
        tests, scores = self.tests, self.said.scores
        if tests.is_shared:
            return estimate_prior(scores).expand(len(tests), -1)
        return estimate_priors(scores[tests.rows], tests.owners, len(tests))

    def _with_priors(self, test: Test, predictor: PredictorName) -> Column:
        scores = self._scores(predictor)
        assert scores is not None
        tests, is_same = self.tests, predictor.endswith("_estimated") and self.tests.is_shared
        clients = self._whose_priors(test, _MOST_PRIOR_SCORES)
        if is_same:
            clients = torch.arange(min(1, len(tests)), device=tests.labels.device)
        right = torch.zeros_like(tests.sizes)
        for added, owners, labels in tests.add_priors(
            scores, self._priors(predictor), clients, test
        ):
            right.index_add_(0, owners, (added.argmax(dim=1) == labels).long())
        if is_same:
            return as_percents(right[:1].expand(len(tests)), tests.sizes)
        whole = torch.full_like(tests.sizes, len(tests.labels))
        column = as_percents(right, whole if test == "global_test" else tests.sizes)
        if len(clients) == len(tests):
            return column
        known = set(clients.tolist())
        return [each if number in known else None for number, each in enumerate(column)]

    def _whose_priors(self, test: Test, most: int) -> Tensor:
        """Return the clients whose priors are read: all, or where these are too many some."""
        size = len(self.tests.labels) * self.said.scores.shape[1]
        everybody = torch.arange(len(self.tests), device=self.tests.labels.device)
        if (test == "local_test" and not self.tests.is_shared) or len(self.tests) * size <= most:
            return everybody
        return self.read[: most // max(1, size)]


@dataclass(frozen=True)
class PersonalReader:
    """What one client's own model says: of its local test set, and of everybody's where it was asked."""

    tests: ClientTests
    client: int
    said: Predictions
    is_whole: bool
    """Whether it was asked about all images, or about the client's own alone."""

    def percent(self, test: Test, predictor: PredictorName) -> float | None:
        """Return one predictor."""
        said = self.say(test, predictor)
        return None if said is None else percent_correct(said == self._labels(test))

    def say(self, test: Test, predictor: PredictorName) -> Tensor | None:
        """Return the classes that are said; None where there is no such thing."""
        found = self._on(test)
        if predictor.endswith("_prior"):
            prior = self.tests.priors[self.client]
            return (found.scores + prior.to(found.scores)).argmax(dim=1)
        return found.prototype if "prototype" in predictor else found.classifier

    def bins(self, test: Test, predictor: PredictorName, num_clients: int) -> BinSums:
        """Return the probabilities by the predictor of a test; nothing where it is no classifier."""
        scores, size = self._on(test).scores, len(self.tests.labels)
        is_much = (
            test == "global_test" and num_clients * size * scores.shape[1] > _MOST_BINNED_SCORES
        )
        if "prototype" in predictor or is_much or not len(scores):
            return add_bins([])
        if predictor.endswith("_prior"):
            scores = scores.double() + self.tests.priors[self.client]
        return count_bins(scores, self._labels(test))

    def _on(self, test: Test) -> Predictions:
        assert self.is_whole or test == "local_test", "only its own images were read"
        is_all = not self.is_whole or test == "global_test" or self.tests.is_shared
        return self.said if is_all else self.said.select(self.tests.own(self.client))

    def _labels(self, test: Test) -> Tensor:
        labels = self.tests.labels
        return labels if test == "global_test" else labels[self.tests.own(self.client)]


def as_percents(right: Tensor, sizes: Tensor) -> Column:
    """Return shares of right answers in percent; None where there is no image."""
    shares = (100 * right.double() / sizes.double()).tolist()
    return [share if size else None for share, size in zip(shares, sizes.tolist(), strict=True)]
