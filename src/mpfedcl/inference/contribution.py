"""Client contributions: leave-one-out accuracies of the others, exact and without training."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import FORMAT
from mpfedcl.core.tensors import Tensors
from mpfedcl.data.client_data import FederatedData
from mpfedcl.data.loading import load_data_and_model
from mpfedcl.gaussian import scatter_rows
from mpfedcl.inference.one_shot import OneShotFederation, open_federation
from mpfedcl.methods import PredictorKind, PredictorName
from mpfedcl.rounds.metrics import percent_correct
from mpfedcl.rounds.scoring import log_prior

_MOST_PERSONAL_CLASSIFIERS = 2500
"""The most personal classifiers to compute: leaving out a client changes those of all others."""
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class OthersAccuracy:
    """The accuracy of the other clients in %, with and without one client in the federation."""

    whole: float
    without: float

    @property
    def difference(self) -> float:
        """The points that the others gain from the client."""
        return self.whole - self.without

    def to_json(self) -> dict[str, float]:
        """Return plain values."""
        return {"with": self.whole, "without": self.without, "difference": self.difference}


@dataclass(frozen=True)
class ClientContribution:
    """The contribution of one client to the others."""

    client: str
    images: int
    global_test: OthersAccuracy
    """On all test samples of the others together."""
    local_test: OthersAccuracy
    """On the local test set of each other client, averaged over clients."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "client": self.client,
            "train": self.images,
            "global_test": self.global_test.to_json(),
            "local_test": self.local_test.to_json(),
        }


@dataclass(frozen=True)
class Contributions:
    """The contributions of all clients, the largest first."""

    clients: list[ClientContribution]
    untested: list[str]
    """Clients without test samples here, because they joined after the run."""
    predictor_global: PredictorName
    predictor_local: PredictorName

    def to_json(self) -> dict[str, Any]:
        """Return the content of contribution.json, in %."""
        return {
            "format": FORMAT,
            "predictor": {"global_test": self.predictor_global, "local_test": self.predictor_local},
            "untested": self.untested,
            "clients": [each.to_json() for each in self.clients],
        }


def find_contributions(
    run: Path | str, *, on_progress: Callable[[int, int], None] = lambda *_: None
) -> Contributions:
    """Find the contribution of each client of a one-shot run.

    The run's data must still be available. `on_progress` is called with the number of clients done
    and the number of all clients.
    """
    federation = open_federation(Path(run))
    names = federation.pool.names
    if len(names) < 3:
        raise InvalidInput(
            f"RUN is {str(run)!r}, a federation of {len(names)} clients; there must be at least 3, "
            "so that others are left to compare."
        )
    evaluator = _Evaluator(federation, _load_data(federation))
    whole = evaluator.evaluate(federation)
    found = []
    for number, name in enumerate(names, start=1):
        own = federation.statistics_of(name)
        without = evaluator.evaluate(federation.without(name, own))
        pairs = zip(*(evaluator.accuracies(each, name) for each in (whole, without)), strict=True)
        on_global, on_local = (OthersAccuracy(*pair) for pair in pairs)
        images = int(own["counts"].sum())
        found.append(ClientContribution(name, images, on_global, on_local))
        on_progress(number, len(names))
    found.sort(key=lambda e: (-e.global_test.difference, -e.local_test.difference, e.client))
    untested = [name for name in names if name not in evaluator.tests]
    predictor = federation.method.predictor_on("global_test")
    return Contributions(found, untested, predictor, evaluator.local_predictor)


_Correct = tuple[Tensor, dict[str, Tensor]]
"""Which test samples are predicted correctly: of all clients, and of each local test set."""


class _Evaluator:
    """Evaluates federations on the test sets of the run's clients."""

    def __init__(self, federation: OneShotFederation, data: FederatedData) -> None:
        self._inputs, self._labels = data.test_inputs, data.test_labels
        self._is_shared = federation.experiment.partition.test == "shared"
        names = federation.pool.names
        self.tests = {e.name: e.test for e in data.clients if e.name in names and len(e.test)}
        if len(self.tests) < 2:
            raise InvalidInput(
                f"RUN is {str(federation.path)!r}, in which fewer than two clients have a local "
                "test set; there must be others to compare."
            )
        self.local_predictor: PredictorName = federation.method.predictor_on("local_test")
        is_costly = len(names) * len(self.tests) > _MOST_PERSONAL_CLASSIFIERS
        if self.local_predictor == "personal_classifier_prior" and is_costly:
            self.local_predictor = "global_classifier_prior"
        self._kind = PredictorKind.of(self.local_predictor)
        self._own = {name: self._prepare(federation.statistics_of(name)) for name in self.tests}
        # A choice needs the client's samples, and is not made again for each client left out.
        self._sharpness = dict.fromkeys(self.tests, 1.0)
        for client in data.clients if self._kind.model == "personal" else ():
            if client.name in self.tests:
                method, received = federation.method, federation.received
                personal = method.personalize(received, client.inputs, client.labels)
                if personal is not None:
                    own = self._own[client.name]
                    self._sharpness[client.name] = method.sharpness_of(received, own, personal)

    def _prepare(self, own: Tensors) -> Tensors:
        """Return the needed part of a client's statistics; its scatter is factored only once."""
        kept = {"counts": own["counts"], "sums": own["sums"]}
        return kept | {"rows": scatter_rows(own)} if self._kind.model == "personal" else kept

    def evaluate(self, federation: OneShotFederation) -> _Correct:
        """Predict the test samples with the classifiers of a federation."""
        scores = federation.scores(federation.server.params, self._inputs)
        by_client = {}
        for name, rows in self.tests.items():
            own_scores, own = scores[rows], self._own[name]
            if self._kind.model == "personal" and name in federation.pool.names:
                personal = federation.method.personalize_from(
                    federation.received, own, self._sharpness[name]
                )
                if personal is not None:
                    own_scores = federation.scores(personal, self._inputs[rows])
            if self._kind.prior == "labels":
                own_scores = own_scores + log_prior(own["counts"]).to(own_scores)
            by_client[name] = own_scores.argmax(1) == self._labels[rows]
        return scores.argmax(1) == self._labels, by_client

    def accuracies(self, correct: _Correct, left_out: str) -> tuple[float, float]:
        """Return the accuracy of all clients but one, on the global and the local test sets."""
        everywhere, by_client = correct
        others = [name for name in self.tests if name != left_out]
        if not self._is_shared:
            everywhere = everywhere[torch.cat([self.tests[name] for name in others])]
        on_local = fmean(percent_correct(by_client[name]) or 0.0 for name in others)
        return percent_correct(everywhere) or 0.0, on_local


def _load_data(federation: OneShotFederation) -> FederatedData:
    """Load the run's data, which must be unchanged."""
    path = federation.path
    try:
        data, _ = load_data_and_model(federation.experiment, _CPU)
    except InvalidInput as error:
        raise InvalidInput(
            f"the data of {path} cannot be read, and contributions are measured on them: {error}"
        ) from None
    same = data.class_names == federation.class_names
    if not same or data.partition.get("encoder") != federation.encoder:
        raise InvalidInput(
            f"the data of {path} have other classes, or another encoder, than the run had; they "
            "must be the same."
        )
    num_features = federation.method.make_model(data.input_size).embedding_size
    if num_features != federation.pool.dimension:
        raise InvalidInput(
            f"the data of {path} have {num_features} features; the run had "
            f"{federation.pool.dimension}, and they must be the same."
        )
    return data
