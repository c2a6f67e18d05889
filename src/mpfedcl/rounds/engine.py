"""The interface between the round loop and the place where clients train."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpfedcl.core.tensors import Tensors
from mpfedcl.methods.messages import Broadcast, Failure, Total, Update
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.aggregation import Peers
from mpfedcl.rounds.evaluation import RoundEvaluation


@dataclass(frozen=True)
class Members:
    """The clients of an engine: their sizes, where they train, and whether they are trusted."""

    sizes: Mapping[str, int]
    """Training samples by client, in name order."""
    label_counts: Mapping[str, Sequence[int]] | None = None
    """Training samples by class that remote clients have announced, against which their updates are
    validated. None for clients that this program runs itself."""
    local: Collection[str] | None = None
    """The clients that train in this process; None for all of them."""

    @property
    def are_trusted(self) -> bool:
        """Whether this program runs the clients; remote clients are not trusted."""
        return self.label_counts is None

    def here(self, names: Sequence[str]) -> Sequence[str]:
        """Return those of the named clients that train in this process."""
        return names if self.local is None else [name for name in names if name in self.local]


class Engine(ABC):
    """Runs clients: in this process, in several processes, or across a network.

    Only `train` is abstract. The defaults fit an engine whose clients are always present, keep no
    state and are not evaluated.
    """

    members: Members
    peers: Peers | None = None
    """The processes that share the clients, if there are several."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Training samples by client, in name order."""
        return self.members.sizes

    def absent_clients(self) -> Collection[str]:
        """Admit clients that have joined; return the known clients that cannot be reached now."""
        return ()

    @abstractmethod
    def train(
        self, broadcast: Broadcast, names: Sequence[str], *, keep: Collection[str]
    ) -> Iterator[Update | Failure | Total]:
        """Train the named clients and yield their updates in any order; name order is cheapest.

        Remote clients that use secure aggregation yield one `Total` at the end instead. `evaluate`
        and `personal_models` need the models of the clients in `keep` after the round.
        """

    def keep(  # noqa: B027  -- without a state there is nothing to keep
        self, accepted: Sequence[str], following: Callable[[], Broadcast]
    ) -> None:
        """Keep the new states of accepted clients, and discard those of the others.

        `following` returns the message that the next round begins with.
        """

    def evaluate(
        self,
        averaged: Tensors | None,
        pool: PrototypePool | None,
        names: Sequence[str],
        *,
        with_confusion: bool = False,
    ) -> RoundEvaluation | None:
        """Evaluate the global model and the personalized models of the named clients.

        Return None if they cannot be evaluated, or not yet. `with_confusion` adds the confusion
        matrices of the primary predictor.
        """
        return None

    def personal_models(self, shared: Tensors) -> Iterator[tuple[str, Tensors]]:
        """Yield the personalized models that clients hold, given the current shared parameters."""
        return iter(())

    def remarks(self) -> dict[str, Any]:
        """Return remarks about the clients for the round's record."""
        return {}

    def state(self) -> Tensors:
        """Return the states that clients keep between rounds, for the checkpoint."""
        return {}

    def restore(  # noqa: B027  -- without a state there is nothing to restore
        self, state: Tensors, record: Mapping[str, Any], folder: Path | None = None
    ) -> None:
        """Continue after a round, from the result of `state` and the round's record.

        Both are empty at the start of a run. `folder` is the place for states that are too large
        for the memory.
        """


class ArrivalEngine(Engine):
    """An engine for asynchronous methods, which dispatches single clients."""

    @abstractmethod
    def begin_record(self, *, keep_models: bool) -> None:
        """Begin a record; `keep_models` keeps the models of clients that arrive from now on."""

    @abstractmethod
    def dispatch(self, broadcasts: Mapping[str, Broadcast]) -> None:
        """Send each client its broadcast; clients under way keep their earlier one."""

    @abstractmethod
    def answer(self, client: str) -> Update | Failure:
        """Return the answer of a client that has arrived."""

    @abstractmethod
    def settle(self, client: str, *, seconds: float | None) -> None:
        """End a dispatch that took `seconds`; None if the answer was rejected."""


class RemoteArrivalEngine(ArrivalEngine):
    """An engine whose dispatched clients arrive by the wall clock."""

    @abstractmethod
    def arrivals(self, seconds: float) -> Mapping[str, bool]:
        """Wait at most `seconds`; return the clients that are no longer under way.

        The value is whether the client was lost: it has no answer.
        """
