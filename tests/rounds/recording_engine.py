"""A federation whose broadcasts and updates are recorded."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from mpfedcl.engines import Engine
from mpfedcl.experiment import Experiment
from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.rounds.loop import RoundLoop
from small_experiments import MeddledEngine, build_federation


class WatchingEngine(MeddledEngine):
    """An engine that records broadcasts, clients and updates, and may reorder the updates."""

    def __init__(
        self,
        engine: Engine,
        reorder: Callable[[list[Update]], Sequence[Update]] = lambda updates: updates,
    ) -> None:
        super().__init__(engine)
        self.reorder = reorder
        self.broadcasts: list[Broadcast] = []
        self.asked: list[list[str]] = []
        self.updates: list[list[Update]] = []

    def meddle(
        self, broadcast: Broadcast, names: Sequence[str], updates: Iterable[Update]
    ) -> Iterator[Update]:
        self.broadcasts.append(broadcast)
        self.asked.append(list(names))
        self.updates.append(list(updates))
        yield from self.reorder(self.updates[-1])


def watch(
    experiment: Experiment,
    reorder: Callable[[list[Update]], Sequence[Update]] = lambda updates: updates,
) -> tuple[RoundLoop, WatchingEngine]:
    engines: list[WatchingEngine] = []

    def wrap(engine: Engine) -> WatchingEngine:
        engines.append(WatchingEngine(engine, reorder))
        return engines[0]

    return build_federation(experiment, wrap), engines[0]
