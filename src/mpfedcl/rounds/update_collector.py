"""What comes in during a round: each update judged, then folded, and everything counted."""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence

from mpfedcl.messages import Broadcast, ClientReadings, Failure, Update
from mpfedcl.prototypes import Prototypes
from mpfedcl.rounds.aggregation import WeightedMean
from mpfedcl.rounds.guard import Guard

_LONGEST_REASON = 300
"""It may quote what a stranger sent, and stays in the records."""


class UpdateCollector:
    """The updates of one round, as far as they are accepted."""

    def __init__(self, guard: Guard, broadcast: Broadcast, chosen: Collection[str]) -> None:
        self.mean = WeightedMean()
        self.prototypes: dict[str, Prototypes] = {}
        self.losses: dict[str, float] = {}
        self.readings: dict[str, ClientReadings] = {}
        self.rejected: dict[str, str] = {}
        self.bytes_up = 0
        self.largest = {"parameters": 0, "prototype_floats": 0}
        """The largest upload of one client."""
        self.template = guard.template
        """A tensor of the right shape for each name that is averaged."""
        self._guard = guard
        self._broadcast = broadcast
        self._chosen = chosen

    @property
    def accepted(self) -> list[str]:
        """The clients whose updates count, in order of name."""
        return sorted(self.prototypes)

    def add(self, update: Update | Failure) -> None:
        """Judge an update; fold it in, or write down why not. A client's first verdict stands."""
        if isinstance(update, Failure):
            self._reject(update, update.reason)
            return
        if malformed := self._guard.judge_form(update):
            self._reject(update, malformed)
            return
        self.bytes_up += update.num_bytes
        if update.client in self.prototypes or update.client in self.rejected:
            self._reject(update, "this client answered twice")
        elif reason := self._guard.judge(update, self._broadcast):
            self._reject(update, reason)
        elif update.client not in self._chosen:
            self._reject(update, "this client was not asked")
        else:
            self._accept(update)

    def _accept(self, update: Update) -> None:
        self.mean.add(update)
        self.prototypes[update.client], self.losses[update.client] = update.prototypes, update.loss
        if update.readings is not None:
            self.readings[update.client] = update.readings
        sizes = {
            "parameters": update.num_parameters,
            "prototype_floats": update.prototypes.vectors.numel(),
        }
        self.largest = {name: max(self.largest[name], size) for name, size in sizes.items()}

    def _reject(self, update: Update | Failure, reason: str) -> None:
        name = update.client if isinstance(update.client, str) else repr(update.client)
        if name in self.prototypes or name in self.rejected:
            name = f"{name} (again)"
        self.rejected.setdefault(name, reason[:_LONGEST_REASON])


def in_name_order(
    updates: Iterable[Update | Failure], chosen: Sequence[str]
) -> Iterator[Update | Failure]:
    """Pass updates on in the order of `chosen`, whatever their arrival: sums depend on the order.

    One that comes early waits for those before it; what nobody asked for comes last.
    """
    early: dict[str, Update | Failure] = {}
    last: list[Update | Failure] = []
    expected = deque(chosen)
    for update in updates:
        # A list, not a set: a name that cannot be hashed must not end the round.
        if update.client not in expected or update.client in early:
            last.append(update)
            continue
        early[update.client] = update
        while expected and expected[0] in early:
            yield early.pop(expected.popleft())
    yield from (early[name] for name in sorted(early))
    yield from last
