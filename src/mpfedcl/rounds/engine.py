"""The seam between the round loop and where clients train."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors
from mpfedcl.methods.messages import Broadcast, Failure, Total, Update
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.collector import UpdateCollector
from mpfedcl.rounds.evaluation import RoundEvaluation

_NO_DISPATCHES = (
    "method is asynchronous; it must be one with rounds, because these clients are only asked "
    "together."
)


@dataclass(frozen=True)
class StatePlace:
    """Where clients' states may be kept that are too many for the memory."""

    folder: Path
    names: Sequence[str]
    """All clients of the run, in name order."""
    rank: int = 0
    ranks: int = 1
    """The processes that write there, of which this is one."""


class Engine(ABC):
    """Runs clients: in this process, in many, or across a network. It knows no method by name.

    Only `train` must be written. The defaults are those of an engine whose clients are all in this
    process all the time, keep nothing between rounds and cannot be evaluated.
    """

    sizes: Mapping[str, int]
    """Training samples by client name, in name order."""
    label_counts: Mapping[str, Sequence[int]] | None = None
    """What clients on other machines have said that they hold of each class: they are strangers,
    and what they send is held to it. None: they are this program's own."""

    def absent_clients(self) -> Collection[str]:
        """Before a round: let clients take part that have come since the one before.

        Return those of the known clients that are away: they are not asked, and are missing.
        """
        return ()

    def local_clients(self, names: Sequence[str]) -> Sequence[str]:
        """Return those of the named clients whose updates come to this process."""
        return names

    @abstractmethod
    def train(
        self, broadcast: Broadcast, names: Sequence[str], *, keep: Collection[str]
    ) -> Iterator[Update | Failure | Total]:
        """Train the named clients and yield their updates in any order; name order is cheapest.

        With secure aggregation yield their total instead, at the end.

        Only of the clients in `keep` may `evaluate` and `personal_models` be asked afterwards for
        models that clients do not need themselves.
        """

    def merge(self, collector: UpdateCollector) -> None:  # noqa: B027  -- one process has nothing to merge
        """Bring what was collected here together with what other processes collected."""

    def keep_accepted(  # noqa: B027  -- nothing is kept
        self, accepted: Sequence[str], following: Callable[[], Broadcast]
    ) -> None:
        """Let the accepted clients keep what this round made of them; the others go back.

        `following` returns what the next round will begin with.
        """

    # Asynchronous methods

    def begin_record(self, *, keep_models: bool) -> None:
        """Begin to count anew; `keep_models`: those that arrive from now on can be read."""
        raise InvalidInput(_NO_DISPATCHES)

    def dispatch(self, broadcasts: Mapping[str, Broadcast]) -> None:
        """Send clients out, each with its own broadcast; those under way already stay so."""
        raise InvalidInput(_NO_DISPATCHES)

    def arrivals(self, seconds: float) -> Mapping[str, bool]:
        """Wait at most so long for clients elsewhere; return who is back, and if empty-handed.

        Of those who are not `answer` may be asked. The others are no longer under way.
        """
        raise InvalidInput(_NO_DISPATCHES)

    def answer(self, client: str) -> Update | Failure:
        """Return what a client under way sends."""
        raise InvalidInput(_NO_DISPATCHES)

    def settle(self, client: str, *, seconds: float | None) -> None:
        """End a dispatch that was answered after so many seconds; None: it does not count."""
        raise InvalidInput(_NO_DISPATCHES)

    # After a round

    def evaluate(
        self,
        averaged: Tensors | None,
        pool: PrototypePool | None,
        names: Sequence[str],
        *,
        with_confusion: bool = False,
    ) -> RoundEvaluation | None:
        """Read this round's personal models of the named clients, and the global model.

        None where they cannot be read, or not yet.
        `with_confusion`: also count the confusion matrix, by the method's own predictor.
        """
        return None

    def agree(self, content: bytes) -> bytes:
        """Return what the leading process has given, in all processes of this run."""
        return content

    def remarks(self) -> dict[str, Any]:
        """Return what the round's record should say of where the clients were run."""
        return {}

    def personal_models(self, shared: Tensors) -> Iterator[tuple[str, Tensors]]:
        """Yield the personal models that clients hold, given the shared parameters of now."""
        return iter(())

    def keep_states_in(self, place: StatePlace) -> None:  # noqa: B027  -- nothing is kept
        """Say before anything is kept or restored where large states of clients may be kept."""

    def state(self) -> Tensors:
        """Return what clients keep between rounds, for the checkpoint."""
        return {}

    def sync_state(self) -> None:  # noqa: B027  -- as above
        """Make what `state` has told to be in files safe there, before the checkpoint is.

        Each process does it for its own; the leading one perhaps while the next round trains.
        """

    def restore(self, state: Tensors, record: Mapping[str, Any]) -> None:  # noqa: B027  -- as above
        """Continue after a round: from what `state` returned then, and from its record."""


class WrappedEngine(Engine):
    """Does as another engine does; a subclass says what it does besides."""

    def __init__(self, engine: Engine) -> None:
        self.sizes, self.label_counts = engine.sizes, engine.label_counts
        self._engine = engine

    def absent_clients(self) -> Collection[str]:  # noqa: D102
        return self._engine.absent_clients()

    def local_clients(self, names: Sequence[str]) -> Sequence[str]:  # noqa: D102
        return self._engine.local_clients(names)

    def train(  # noqa: D102
        self, broadcast: Broadcast, names: Sequence[str], *, keep: Collection[str]
    ) -> Iterator[Update | Failure | Total]:
        return self._engine.train(broadcast, names, keep=keep)

    def merge(self, collector: UpdateCollector) -> None:  # noqa: D102
        self._engine.merge(collector)

    def keep_accepted(  # noqa: D102
        self, accepted: Sequence[str], following: Callable[[], Broadcast]
    ) -> None:
        self._engine.keep_accepted(accepted, following)

    def evaluate(  # noqa: D102
        self,
        averaged: Tensors | None,
        pool: PrototypePool | None,
        names: Sequence[str],
        *,
        with_confusion: bool = False,
    ) -> RoundEvaluation | None:
        return self._engine.evaluate(averaged, pool, names, with_confusion=with_confusion)

    def agree(self, content: bytes) -> bytes:  # noqa: D102
        return self._engine.agree(content)

    def remarks(self) -> dict[str, Any]:  # noqa: D102
        return self._engine.remarks()

    def personal_models(self, shared: Tensors) -> Iterator[tuple[str, Tensors]]:  # noqa: D102
        return self._engine.personal_models(shared)

    def keep_states_in(self, place: StatePlace) -> None:  # noqa: D102
        self._engine.keep_states_in(place)

    def state(self) -> Tensors:  # noqa: D102
        return self._engine.state()

    def sync_state(self) -> None:  # noqa: D102
        self._engine.sync_state()

    def restore(self, state: Tensors, record: Mapping[str, Any]) -> None:  # noqa: D102
        self._engine.restore(state, record)
