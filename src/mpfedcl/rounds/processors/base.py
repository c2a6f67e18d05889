"""What every processor of updates offers."""

from abc import ABC, abstractmethod
from collections.abc import Collection, MutableMapping
from typing import ClassVar, Literal, Self

from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment import Experiment
from mpfedcl.methods.messages import Broadcast, Update

Stage = Literal["clip", "noise", "compress", "mask"]
STAGES: tuple[Stage, ...] = ("clip", "noise", "compress", "mask")
"""In this order on the way out, and the other way round on the way in."""


class Processor(ABC):
    """Changes updates on their way from the clients to the server.

    One that has changed an update adds its name to `Update.processed`; the round's record says
    whose updates they were.
    """

    name: ClassVar[str]
    stage: ClassVar[Stage]

    @classmethod
    @abstractmethod
    def of(cls, experiment: Experiment) -> Self | None:
        """Return the processor that an experiment asks for, None where it does not."""

    def outgoing(self, update: Update, broadcast: Broadcast) -> Update:
        """Return what leaves the client."""
        return update

    def keep_accepted(self, accepted: Collection[str]) -> None:  # noqa: B027
        """Keep what goes with the updates that the server has accepted."""

    def keep_in(self, kept: MutableMapping[str, Tensors]) -> None:  # noqa: B027
        """Say where to keep, by client, what is needed for its next update."""

    def end_round(self) -> None:  # noqa: B027  -- most keep nothing
        """Forget what was kept for the clients of a round; all their updates are out."""

    def incoming(self, update: Update, broadcast: Broadcast) -> Update:
        """Return what the guard sees of what came in, which a stranger may have made up."""
        return update
