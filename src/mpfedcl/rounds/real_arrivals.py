"""Arrivals over a network: clients come when they come, and time is what a clock on the wall shows.

Versions, staleness and draws mean what they mean in a simulation. Who comes first does not follow
from anything that could be written down, unless there is one client under way at a time.
"""

import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from mpfedcl.rounds.arrival_loop import ArrivalLoop
from mpfedcl.rounds.arrival_state import Dispatch
from mpfedcl.rounds.assembly import Assembly
from mpfedcl.rounds.engine import Engine
from mpfedcl.rounds.systems import sort_into_tiers

_LOOK_SECONDS = 1.0
"""Between two looks at who is connected, where there is a place to fill."""
_SHORTEST_TICK = 1.0
"""Of those that are measured."""


class RealArrivals(ArrivalLoop):
    """A server whose clients are on machines of their own, and may go away and come back."""

    def __init__(self, assembly: Assembly, engine: Engine) -> None:
        super().__init__(assembly, engine)
        self._zero: float | None = None
        """When the run began, by this process's clock; None: it has not gone on yet."""
        self._closed = 0
        """Dispatches of this record that were answered or given up."""
        self._back: dict[str, Dispatch] = {}
        """Who has come and waits to be folded, in order of arrival."""
        self._absent: Collection[str] = ()
        self._last_sent: dict[str, float] = {}
        self._next_tick: float | None = None

    def _now(self) -> float:
        """Return the seconds that the run has taken."""
        assert self._zero is not None
        return time.monotonic() - self._zero

    def _begin_record(self) -> None:
        self._closed = 0
        if self._zero is not None:
            return
        arrivals = self._arrivals
        self._zero = time.monotonic() - arrivals.counts.elapsed_seconds
        # After a checkpoint: nobody waits any more for what was under way.
        self.state = replace(self.state, arrivals=arrivals.without(arrivals.counts.under_way))

    def _is_over(self, number: int) -> bool:
        # Who is given up counts too: where nobody answers a record must end.
        return self._closed >= self._per_record

    def _find_missing(self) -> Collection[str]:
        return {*self._counted.lost, *self._absent}

    def _end_record(self) -> None:
        self._note(elapsed_seconds=round(self._now(), 3))
        self.engine.keep_accepted(self._counted.accepted, self.broadcast)

    def _show_clock(self) -> dict[str, Any]:
        return {
            "elapsed_seconds": self._arrivals.counts.elapsed_seconds,
            "arrivals": self._counted.describe(self._arrivals),
        }

    def _note(self, **values: Any) -> None:
        """Write something down that a resumed run must know."""
        counts = self._arrivals.counts.model_copy(update=values)
        self.state = replace(self.state, arrivals=replace(self._arrivals, counts=counts))

    # Sending out

    def _send_out(self) -> None:
        under_way = self._arrivals.counts.under_way
        has_tiers = self._rule.timing == "tiers"
        if len(under_way) >= (len(self.engine.sizes) if has_tiers else self._concurrency):
            return
        self._absent = self.engine.absent_clients()
        away = {each.client for each in under_way}
        idle = [n for n in sorted(self.engine.sizes) if n not in self._absent and n not in away]
        self._sort()
        if has_tiers:
            chosen = self._choose_in_tiers(idle)
        else:
            ready = [name for name in idle if self._may_be_sent(name)]
            chosen = [(name, 0) for name in self._draw(ready, self._concurrency - len(away))]
        if chosen:
            self._dispatch(chosen)

    def _sort(self) -> None:
        """Sort clients into the tiers that were measured; who came later is of the slowest."""
        *others, slowest = self._arrivals.counts.tiers or [[]]
        elsewhere = {name for names in others for name in names}
        self._tiers = [*others, sorted({*slowest, *self.engine.sizes} - elsewhere)]

    def _choose_in_tiers(self, idle: list[str]) -> list[tuple[str, int]]:
        """Return who is sent out of the tiers that have nobody under way."""
        under_way = self._arrivals.counts.under_way
        if self._is_unmeasured:
            # Everybody, once: nobody knows yet who is fast.
            return [] if under_way else [(name, 0) for name in idle]
        busy, chosen = {each.tier for each in under_way}, []
        for tier, names in enumerate(self._tiers):
            here = [name for name in names if name in idle]
            # A tier has rounds: it waits until all that are here may be sent out.
            if tier not in busy and all(self._may_be_sent(name) for name in here):
                drawn = self._draw(here, self._share_of(len(here)), tier)
                chosen += [(name, tier) for name in drawn]
        return chosen

    @property
    def _is_unmeasured(self) -> bool:
        return self._rule.num_tiers > 1 and not self._arrivals.counts.tiers

    def _may_be_sent(self, client: str) -> bool:
        most, last = self._experiment.systems.most_per_minute, self._last_sent.get(client)
        return not most or last is None or self._now() - last >= 60 / most

    def _plan(self, client: str, number: int, num_bytes: int) -> dict[str, Any]:
        now = self._last_sent[client] = self._now()
        return {"sent": now, "due": now + self._experiment.network.round_timeout}

    # Taking in

    def _take_next(self) -> None:
        if self._rule.timing == "ticks":
            self._take_at_tick()
        elif self._rule.timing == "tiers":
            self._take_tiers()
        else:
            if not self._back:
                self._hear(_LOOK_SECONDS)
            for first in list(self._back)[:1]:
                self._take([first])

    def _hear(self, seconds: float) -> None:
        """Note who has come, waiting at most so long for somebody."""
        found = self.engine.arrivals(seconds)
        under_way = {each.client: each for each in self._arrivals.counts.under_way}
        now = self._now()
        for name, is_lost in found.items():
            self._back[name] = under_way[name].model_copy(update={"due": now, "is_lost": is_lost})

    def _take(self, names: Collection[str], tier: int | None = None) -> None:
        """Fold what these clients have brought."""
        due = [self._back.pop(name) for name in names]
        if tier is not None:
            due = [each.model_copy(update={"tier": tier}) for each in due]
        self._closed += len(due)
        self._take_in(due)

    def _take_at_tick(self) -> None:
        tick = self._experiment.systems.tick or self._arrivals.counts.tick
        if tick is None:
            self._measure_tick()
            return
        if self._next_tick is None:
            self._next_tick = self._now() + tick
        left = self._next_tick - self._now()
        if left > 0:
            self._hear(min(left, _LOOK_SECONDS))
            return
        self._take(list(self._back))
        # Not at fixed times: who was busy for long does not have to catch up.
        self._next_tick = self._now() + tick

    def _measure_tick(self) -> None:
        """Wait for half of the first ones: what they take is the time between ticks from now on."""
        self._hear(_LOOK_SECONDS)
        answered = [each.seconds for each in self._back.values() if not each.is_lost]
        under_way = self._arrivals.counts.under_way
        if answered and 2 * len(answered) >= len(under_way):
            self._note(tick=max(_SHORTEST_TICK, max(answered)))
            self._next_tick = self._now()
        elif under_way and len(self._back) == len(under_way):
            # Most were given up.
            self._take(list(self._back))

    def _take_tiers(self) -> None:
        self._hear(_LOOK_SECONDS)
        under_way = self._arrivals.counts.under_way
        waiting = {each.tier for each in under_way if each.client not in self._back}
        ready = {each.tier for each in under_way} - waiting
        if ready and self._is_unmeasured:
            self._measure_tiers()
            return
        for tier in sorted(ready):
            self._take([each.client for each in under_way if each.tier == tier])

    def _measure_tiers(self) -> None:
        """Sort all clients by what they took the first time; each tier has done a round by it."""
        back = self._back
        if all(each.is_lost for each in back.values()):
            self._take(list(back))
            return
        # Who was given up is slower than anybody who has come.
        order = sorted(back, key=lambda name: (back[name].is_lost, back[name].seconds, name))
        self._note(tiers=sort_into_tiers(order, self._rule.num_tiers))
        self._sort()
        for tier, names in enumerate(self._arrivals.counts.tiers):
            self._take(names, tier)
