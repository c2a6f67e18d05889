"""The interface of update processors."""

from abc import ABC, abstractmethod
from collections.abc import Collection, MutableMapping
from dataclasses import replace
from typing import ClassVar, Self

from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment import Experiment
from mpfedcl.methods.messages import Broadcast, Update


class Processor(ABC):
    """Changes updates on their way from the clients to the server.

    A processor that changes an update adds its name to `Update.processed`, which the round's
    record lists by client.
    """

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def of(cls, experiment: Experiment) -> Self | None:
        """Return the processor that an experiment asks for, or None."""

    def outgoing(self, update: Update, broadcast: Broadcast) -> Update:
        """Return the update that leaves the client."""
        return update

    def keep_accepted(self, accepted: Collection[str]) -> None:  # noqa: B027
        """Keep the state that belongs to accepted updates."""

    def keep_in(self, kept: MutableMapping[str, Tensors]) -> None:  # noqa: B027
        """Set where the state is kept by client."""

    def incoming(self, update: Update, broadcast: Broadcast) -> Update:
        """Return the update that is validated, given the untrusted one that arrived."""
        return update


def mark(update: Update, name: str) -> Update:
    """Return the update with the name of a processor that has changed it."""
    return replace(update, processed=tuple(sorted({*update.processed, name})))
