"""Whom a round waits for, and how long, on the virtual clock."""

from collections.abc import Mapping, Sequence

from mpfedcl.methods.messages import Broadcast
from mpfedcl.rounds.systems import SystemModel


class WaitingRound:
    """A round that is over once enough of its clients have answered.

    Those who would come later, and those whose answers are lost, are missing. Where too few answers
    are left it waits until nobody can be expected any more.

    Args:
        pace: How fast clients are.
        broadcast: What they are sent.
        chosen: The clients of the round.
        enough: Share of them whose answers are waited for.
        bytes_up: What a whole answer takes, as far as it is known before there is one.
    """

    def __init__(
        self,
        pace: SystemModel,
        broadcast: Broadcast,
        chosen: Sequence[str],
        *,
        enough: float,
        bytes_up: int,
    ) -> None:
        self._pace, self._number, self._chosen = pace, broadcast.round, chosen
        self._down = {name: broadcast.num_bytes_to([name]) for name in chosen}
        reached = [name for name in chosen if not pace.loses(name, self._number)]
        needed = max(1, round(enough * len(chosen)))
        self._is_enough = len(reached) >= needed
        # A part of the model comes back as large as it went.
        parts = {name: self._down[name] for name in broadcast.units}
        expected = {name: self._seconds(name, parts.get(name, bytes_up)) for name in reached}
        first = sorted(reached, key=lambda name: (expected[name], name))[:needed]
        self.in_time = sorted(first) if self._is_enough else reached
        """The clients whose answers count."""

    def seconds(self, uploads: Mapping[str, int], otherwise: int) -> float:
        """Return how long it takes, given the bytes that clients have sent, others being alike."""
        awaited = self.in_time if self._is_enough else self._chosen
        taken = []
        for name in awaited:
            up, down = uploads.get(name, otherwise), self._down[name]
            is_lost = self._pace.loses(name, self._number)
            taken.append(
                self._pace.gives_up_after(name, down, up) if is_lost else self._seconds(name, up)
            )
        return max(taken, default=0.0)

    def _seconds(self, name: str, bytes_up: int) -> float:
        return self._pace.seconds(name, self._number, self._down[name], bytes_up)
