"""Arrivals on a virtual clock: who comes when follows from settings, keys and sizes alone."""

from dataclasses import replace
from typing import Any

from mpfedcl.core.errors import InvalidInput
from mpfedcl.rounds.arrival_loop import ArrivalLoop
from mpfedcl.rounds.arrival_state import Dispatch
from mpfedcl.rounds.assembly import Assembly
from mpfedcl.rounds.engine import Engine
from mpfedcl.rounds.population import Others
from mpfedcl.rounds.round_state import RoundState
from mpfedcl.rounds.systems import SystemModel

_ROUNDING = 1e-9
"""Who is due at a tick has come by it, whatever sums of seconds round to."""
_FINEST_TICK = 1e-3
"""Of what a client takes: finer ticks would mostly be idle."""


class VirtualArrivals(ArrivalLoop):
    """A simulated server: it knows when each client under way is due."""

    def __init__(self, assembly: Assembly, engine: Engine, pace: SystemModel) -> None:
        super().__init__(assembly, engine, pace)
        self._speeds = pace
        if self._rule.timing == "tiers":
            (names,) = self._tiers
            self._tiers = pace.in_tiers(names, self._rule.num_tiers, self._bytes_up)
        typical = pace.typical(self.broadcast().num_bytes, self._bytes_up)
        self._tick = self._experiment.systems.tick or typical
        if self._tick < _FINEST_TICK * typical:
            raise InvalidInput(
                f"systems.tick is {self._tick:g}; it must be at least {_FINEST_TICK * typical:.3g}, a "
                "thousandth of what clients usually need."
            )

    def accepts(self, state: RoundState) -> bool:
        """Tell whether those who are under way are clients of this run, with models that fit."""
        under_way = state.arrivals.counts.under_way if state.arrivals else []
        return super().accepts(state) and all(
            each.client in self.engine.sizes and each.tier < len(self._tiers) for each in under_way
        )

    def _begin_record(self) -> None:
        # After a checkpoint the engine must hear again of those who have not trained yet.
        self._tell_engine(self._arrivals.counts.under_way)

    def _is_over(self, number: int) -> bool:
        return self._arrivals.counts.answers >= number * self._per_record

    def _show_clock(self) -> dict[str, Any]:
        return {
            "virtual_seconds": self.state.virtual_seconds,
            "arrivals": self._counted.describe(self._arrivals),
        }

    def _send_out(self) -> None:
        if self._rule.timing == "tiers":
            busy = {each.tier for each in self._arrivals.counts.under_way}
            chosen = [
                (name, tier)
                for tier, names in enumerate(self._tiers)
                if tier not in busy
                for name in self._draw(names, self._share_of(len(names)), tier)
            ]
        else:
            away = {each.client for each in self._arrivals.counts.under_way}
            idle = Others(self._tiers[0], away)
            chosen = [(name, 0) for name in self._draw(idle, self._concurrency - len(away))]
        if chosen:
            self._dispatch(chosen)

    def _plan(self, client: str, number: int, num_bytes: int) -> dict[str, Any]:
        now, is_lost = self.state.virtual_seconds, self._speeds.loses(client, number)
        if is_lost:
            seconds = self._speeds.gives_up_after(client, num_bytes, self._bytes_up)
        else:
            seconds = self._speeds.seconds(client, number, num_bytes, self._bytes_up)
        return {"sent": now, "due": now + seconds, "is_lost": is_lost}

    def _take_next(self) -> None:
        counts = self._arrivals.counts
        if self._rule.timing == "ticks":
            now = (counts.ticks + 1) * self._tick
            due = [each for each in counts.under_way if each.due <= now * (1 + _ROUNDING)]
        else:
            due = self._first_due(counts.under_way)
            now = due[0].due
        self._take_in(due)
        self.state = replace(self.state, virtual_seconds=now)

    def _first_due(self, under_way: list[Dispatch]) -> list[Dispatch]:
        """Return who comes next; a tier's round is over when the last of its clients is back."""
        if self._rule.timing == "tiers":
            last = {each.tier: 0.0 for each in under_way}
            for each in under_way:
                last[each.tier] = max(last[each.tier], each.due)
            under_way = [each.model_copy(update={"due": last[each.tier]}) for each in under_way]
        first = min(under_way, key=lambda each: (each.due, each.client))
        if self._rule.timing == "tiers":
            return [each for each in under_way if each.tier == first.tier]
        return [first]
