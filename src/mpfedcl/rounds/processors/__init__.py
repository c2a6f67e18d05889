"""Processors change updates between clients and validation. Each is a file of this folder."""

import pkgutil
from collections.abc import Collection, MutableMapping
from functools import cache
from importlib import import_module

from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment import Experiment
from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.rounds.processors.base import STAGES, Processor

__all__ = ["STAGES", "Processor", "ProcessorChain"]


class ProcessorChain:
    """The processors that an experiment asks for, in the order of their stages."""

    def __init__(self, experiment: Experiment) -> None:
        made = [each.of(experiment) for each in _find_processors()]
        asked = [each for each in made if each is not None]
        self._processors = sorted(asked, key=lambda each: STAGES.index(each.stage))

    @property
    def names(self) -> tuple[str, ...]:
        """The names allowed in `Update.processed`."""
        return tuple(each.name for each in self._processors)

    def outgoing(self, update: Update, broadcast: Broadcast) -> Update:
        """Process an update at the client, before it is sent."""
        for each in self._processors:
            update = each.outgoing(update, broadcast)
        return update

    def end_round(self) -> None:
        """Release what was kept for a round, after its last update."""
        for each in self._processors:
            each.end_round()

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
            if each.stage == "compress":
                update = each.incoming(update, broadcast)
        return update

    def incoming(self, update: Update, broadcast: Broadcast) -> Update:
        """Process an unpacked update at the server: the last stage first."""
        for each in reversed(self._processors):
            if each.stage != "compress":
                update = each.incoming(update, broadcast)
        return update


@cache
def _find_processors() -> tuple[type[Processor], ...]:
    """Import the files of this folder, once: a chain is made in every round."""
    for module in pkgutil.iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    return tuple(Processor.__subclasses__())
