"""What is each client worth: the accuracy of the others without it, exactly, and nobody trains."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import FORMAT
from mpfedcl.core.tensors import Tensors
from mpfedcl.data.client_data import FederatedData
from mpfedcl.data.loading import load_data_and_model
from mpfedcl.gaussian import scatter_rows
from mpfedcl.inference.exchange import Exchange, open_exchange
from mpfedcl.methods import PredictorName
from mpfedcl.rounds.evaluation import percent_correct
from mpfedcl.rounds.label_prior import log_prior

_MOST_OWN_CLASSIFIERS = 2500
"""Without each client all others make their own classifier anew: up to so many in all."""
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class OthersAccuracy:
    """The accuracy of some clients in %, with and without another one in the federation."""

    whole: float
    without: float

    @property
    def difference(self) -> float:
        """Points that the others have because of the client."""
        return self.whole - self.without


@dataclass(frozen=True)
class ClientWorth:
    """What one client is worth to the others."""

    client: str
    images: int
    union: OthersAccuracy
    """On all test samples of the others together."""
    own: OthersAccuracy
    """On each other's local test set samples, averaged over them."""


@dataclass(frozen=True)
class Contributions:
    """What all clients are worth, the most valuable first."""

    clients: list[ClientWorth]
    untested: list[str]
    """Clients whose test samples are not here; they have only joined since the run."""
    predictor_global: PredictorName
    predictor_local: PredictorName

    def to_json(self) -> dict[str, Any]:
        """Return what contribution.json holds, in %."""

        def tell(found: OthersAccuracy) -> dict[str, float]:
            return {
                "with": found.whole,
                "without": found.without,
                "difference": found.difference,
            }

        return {
            "format": FORMAT,
            "predictor": {"global_test": self.predictor_global, "local_test": self.predictor_local},
            "untested": self.untested,
            "clients": [
                {
                    "client": each.client,
                    "train": each.images,
                    "global_test": tell(each.union),
                    "local_test": tell(each.own),
                }
                for each in self.clients
            ],
        }


def find_contributions(
    run: Path | str, *, on_progress: Callable[[int, int], None] = lambda *_: None
) -> Contributions:
    """Find what each client of a federation of one exchange is worth.

    The run's data must be where they were; `on_progress` is told how many clients of how many
    have been looked at.
    """
    exchange = open_exchange(Path(run))
    names = exchange.pool.names
    if len(names) < 3:
        raise InvalidInput(
            f"RUN is {str(run)!r}, a federation of {len(names)} clients; there must be at least 3, "
            "so that others are left to compare."
        )
    readers = _Readers(exchange, _load_tests(exchange))
    with_all = readers.read(exchange)
    found = []
    for number, name in enumerate(names, start=1):
        own = exchange.own_of(name)
        without = readers.read(exchange.without(name, own))
        found.append(
            ClientWorth(
                name,
                int(own["counts"].sum()),
                OthersAccuracy(with_all.union(name), without.union(name)),
                OthersAccuracy(with_all.own(name), without.own(name)),
            )
        )
        on_progress(number, len(names))
    found.sort(key=lambda each: (-each.union.difference, -each.own.difference, each.client))
    untested = [name for name in names if name not in readers.tests]
    return Contributions(
        found, untested, exchange.method.predictor_on("global_test"), readers.local_predictor
    )


@dataclass(frozen=True)
class _Right:
    """Which test samples were answered rightly: of the union, and by client of its own."""

    on_global: Tensor
    on_own: Mapping[str, Tensor]
    tests: Mapping[str, Tensor]
    is_shared: bool

    def union(self, without: str) -> float:
        """Return the accuracy on the test samples of all clients but one."""
        if self.is_shared:
            return percent_correct(self.on_global) or 0.0
        rows = torch.cat([rows for name, rows in self.tests.items() if name != without])
        return percent_correct(self.on_global[rows]) or 0.0

    def own(self, without: str) -> float:
        """Return the mean accuracy of all clients but one on their local test set samples."""
        right = [percent_correct(each) for name, each in self.on_own.items() if name != without]
        known = [each for each in right if each is not None]
        return sum(known) / max(1, len(known))


class _Readers:
    """Reads federations on the tests of the run's clients."""

    def __init__(self, exchange: Exchange, data: FederatedData) -> None:
        self._inputs, self._labels = data.test_inputs, data.test_labels
        self._is_shared = exchange.experiment.partition.test == "shared"
        self.tests = {
            client.name: client.test
            for client in data.clients
            if client.name in exchange.pool.names and len(client.test)
        }
        if len(self.tests) < 2:
            raise InvalidInput(
                f"RUN is {str(exchange.path)!r}, where fewer than two clients have test samples of "
                "their own; there must be others to compare."
            )
        self.local_predictor: PredictorName = exchange.method.predictor_on("local_test")
        if self.local_predictor == "personal_classifier_prior" and (
            exchange.pool.num_clients * len(self.tests) > _MOST_OWN_CLASSIFIERS
        ):
            self.local_predictor = "global_classifier_prior"
        self._own = {name: self._keep(exchange.own_of(name)) for name in self.tests}

    def _keep(self, own: Tensors) -> Tensors:
        """Return what is needed again and again; the factor of its scatter is found once."""
        kept = {"counts": own["counts"], "sums": own["sums"]}
        is_personal = self.local_predictor.startswith("personal")
        return kept | {"rows": scatter_rows(own)} if is_personal else kept

    def read(self, exchange: Exchange) -> _Right:
        """Read a federation, each client's local test set by its own predictor."""
        fitted = exchange.fit()
        scores = exchange.scores(fitted.params, self._inputs)
        on_global = scores.argmax(1) == self._labels
        on_own = {}
        for name, rows in self.tests.items():
            said, added = scores[rows], torch.zeros(())
            if self.local_predictor.startswith("personal") and name in exchange.pool.names:
                personal = exchange.method.personalize_from(fitted.received, self._own[name])
                if personal is not None:
                    said = exchange.scores(personal, self._inputs[rows])
            if self.local_predictor.endswith("prior"):
                added = log_prior(self._own[name]["counts"])
            on_own[name] = (said + added.to(said)).argmax(1) == self._labels[rows]
        return _Right(on_global, on_own, self.tests, self._is_shared)


def _load_tests(exchange: Exchange) -> FederatedData:
    """Load the run's data as it did; they must still be here, and the same."""
    try:
        data, _ = load_data_and_model(exchange.experiment, _CPU)
    except InvalidInput as error:
        raise InvalidInput(
            f"the data of {exchange.path} cannot be read, and clients' worth is measured on "
            f"them: {error}"
        ) from None
    known: Sequence[str] = exchange.class_names
    same = list(data.class_names) == list(known[: data.num_classes])
    if not same or data.partition.get("encoder") != exchange.encoder:
        raise InvalidInput(
            f"the data of {exchange.path} have other classes, or another encoder, than the run "
            "had; they must be the same."
        )
    if data.input_size != exchange.pool.dimension:
        raise InvalidInput(
            f"the data of {exchange.path} have {data.input_size} features; the run had "
            f"{exchange.pool.dimension}, and they must be the same."
        )
    return data
