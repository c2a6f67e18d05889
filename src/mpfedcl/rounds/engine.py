"""The seam between the round loop and where clients live."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from mpfedcl.messages import Broadcast, Failure, LateReading, Update
from mpfedcl.models import Tensors
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.evaluation import Readings
from mpfedcl.rounds.measurement import Inspection
from mpfedcl.rounds.update_collector import Intake


class Engine(Protocol):
    """Runs clients: in this process, in many, or across a network. It knows no method by name."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Training samples by client name, in name order."""
        ...

    def muster(self) -> Collection[str]:
        """Before a round: let clients take part that have come since the one before.

        Return those of the known clients that are away: they are not asked, and are missing.
        """
        ...

    def here(self, names: Sequence[str]) -> Sequence[str]:
        """Return those of the named clients whose updates come to this process."""
        ...

    def train(
        self, broadcast: Broadcast, names: Sequence[str], *, keep: Collection[str]
    ) -> Iterator[Update | Failure]:
        """Train the named clients and yield their updates in any order; name order is cheapest.

        Only of the clients in `keep` may `evaluate` and `personal_models` be asked afterwards for
        models that clients do not need themselves.
        """
        ...

    def unite(self, intake: Intake) -> None:
        """Bring what was taken in here together with what other processes took in."""
        ...

    def evaluate(
        self,
        averaged: Tensors | None,
        pool: PrototypePool | None,
        names: Sequence[str],
        *,
        confuse: bool = False,
    ) -> Readings | None:
        """Read this round's personal models of the named clients, and the averaged model.

        None where clients read a round only when the next one begins: what they read then comes
        with their updates, and of the last round by `close`.
        `confuse`: count too which class is taken for which, by the method's own reading.
        """
        ...

    def close(self, broadcast: Broadcast) -> Mapping[str, LateReading | Failure]:
        """Ask for what is still to be read once the last round is over."""
        ...

    def remarks(self) -> dict[str, Any]:
        """Return what the round's record should say of where the clients were run."""
        ...

    def inspect(
        self, broadcast: Broadcast, following: Broadcast, names: Sequence[str]
    ) -> Inspection:
        """Measure the named clients' objectives and gradients around this round's training.

        Before `settle`, and only of clients that `train` was told to keep; `following` is what the
        next round will begin with.
        """
        ...

    def settle(self, accepted: Sequence[str]) -> None:
        """Let the accepted clients keep what this round made of them; the others go back."""
        ...

    def personal_models(self, shared: Tensors) -> Iterator[tuple[str, Tensors]]:
        """Yield the personal models that clients hold, given the shared parameters of now."""
        ...

    def state(self) -> Tensors:
        """Return what clients keep between rounds, for the checkpoint."""
        ...

    def load_state(self, state: Tensors) -> None:
        """Take up what `state` returned."""
        ...
