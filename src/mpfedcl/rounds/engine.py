"""The seam between the round loop and where clients train."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from mpfedcl.messages import Broadcast, ClientReadings, Failure, Update
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.evaluation import RoundReadings
from mpfedcl.rounds.measurement import Inspection
from mpfedcl.rounds.update_collector import UpdateCollector
from mpfedcl.tensors import Tensors


class Engine(ABC):
    """Runs clients: in this process, in many, or across a network. It knows no method by name.

    The defaults are those of an engine whose clients are all in this process all the time.
    """

    sizes: Mapping[str, int]
    """Training samples by client name, in name order."""

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
    ) -> Iterator[Update | Failure]:
        """Train the named clients and yield their updates in any order; name order is cheapest.

        Only of the clients in `keep` may `evaluate` and `personal_models` be asked afterwards for
        models that clients do not need themselves.
        """

    def merge(self, collector: UpdateCollector) -> None:  # noqa: B027  -- one process has nothing to merge
        """Bring what was collected here together with what other processes collected."""

    @abstractmethod
    def evaluate(
        self,
        averaged: Tensors | None,
        pool: PrototypePool | None,
        names: Sequence[str],
        *,
        with_confusion: bool = False,
    ) -> RoundReadings | None:
        """Read this round's personal models of the named clients, and the averaged model.

        None where clients read a round only when the next one begins: what they read then comes
        with their updates, and of the last round by `read_last_round`.
        `with_confusion`: count too which class is taken for which, by the method's own reading.
        """

    def read_last_round(self, broadcast: Broadcast) -> Mapping[str, ClientReadings | Failure]:
        """Ask for what is still to be read once the last round is over."""
        return {}

    def remarks(self) -> dict[str, Any]:
        """Return what the round's record should say of where the clients were run."""
        return {}

    @abstractmethod
    def inspect(
        self, broadcast: Broadcast, following: Broadcast, names: Sequence[str]
    ) -> Inspection:
        """Measure the named clients' objectives and gradients around this round's training.

        Before `keep_accepted`, and only of clients that `train` was told to keep; `following` is
        what the next round will begin with.
        """

    @abstractmethod
    def keep_accepted(self, accepted: Sequence[str]) -> None:
        """Let the accepted clients keep what this round made of them; the others go back."""

    @abstractmethod
    def personal_models(self, shared: Tensors) -> Iterator[tuple[str, Tensors]]:
        """Yield the personal models that clients hold, given the shared parameters of now."""

    @abstractmethod
    def state(self) -> Tensors:
        """Return what clients keep between rounds, for the checkpoint."""

    @abstractmethod
    def load_state(self, state: Tensors) -> None:
        """Restore what `state` returned."""
