"""What is done to updates between clients and guard. A processor is a file of this folder."""

import pkgutil
from functools import cache
from importlib import import_module

from mpfedcl.experiment import Experiment
from mpfedcl.messages import Broadcast, Update
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
        """What may stand in `Update.processed`."""
        return tuple(each.name for each in self._processors)

    def outgoing(self, update: Update, broadcast: Broadcast) -> Update:
        """Process an update where its client is, before it leaves."""
        for each in self._processors:
            update = each.outgoing(update, broadcast)
        return update

    def end_round(self) -> None:
        """Say that all updates of a round are out."""
        for each in self._processors:
            each.end_round()

    def incoming(self, update: Update, broadcast: Broadcast) -> Update:
        """Process an update at the server: the last stage first."""
        for each in reversed(self._processors):
            update = each.incoming(update, broadcast)
        return update


@cache
def _find_processors() -> tuple[type[Processor], ...]:
    """Import the files of this folder, once: a chain is made in every round."""
    for module in pkgutil.iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    return tuple(Processor.__subclasses__())
