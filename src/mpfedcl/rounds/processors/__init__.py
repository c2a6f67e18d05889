"""Processors change updates between clients and validation."""

from collections.abc import Collection, MutableMapping

from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment import Experiment
from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.rounds.processors.base import Processor
from mpfedcl.rounds.processors.clip import Clip, PrivateStatistics
from mpfedcl.rounds.processors.compress import Compress

__all__ = ["Processor", "ProcessorChain"]

PROCESSORS: tuple[type[Processor], ...] = (Clip, PrivateStatistics, Compress)
"""In the order at the client; the server reverses it."""


class ProcessorChain:
    """The processors that an experiment asks for."""

    def __init__(self, experiment: Experiment) -> None:
        made = [each.of(experiment) for each in PROCESSORS]
        self._processors = [each for each in made if each is not None]

    @property
    def names(self) -> tuple[str, ...]:
        """The names allowed in `Update.processed`."""
        return tuple(each.name for each in self._processors)

    def outgoing(self, update: Update, broadcast: Broadcast) -> Update:
        """Process an update at the client, before it is sent."""
        for each in self._processors:
            update = each.outgoing(update, broadcast)
        return update

    def keep_accepted(self, accepted: Collection[str]) -> None:
        """Keep the state that belongs to accepted updates."""
        for each in self._processors:
            each.keep_accepted(accepted)

    def keep_in(self, kept: MutableMapping[str, Tensors]) -> None:
        """Set where processors keep their state by client."""
        for each in self._processors:
            each.keep_in(kept)

    def unpack(self, update: Update, broadcast: Broadcast) -> Update:
        """Return the decompressed update, so that its shapes can be checked."""
        for each in reversed(self._processors):
            if isinstance(each, Compress):
                update = each.incoming(update, broadcast)
        return update

    def incoming(self, update: Update, broadcast: Broadcast) -> Update:
        """Process an unpacked update at the server, in reverse order."""
        for each in reversed(self._processors):
            if not isinstance(each, Compress):
                update = each.incoming(update, broadcast)
        return update
