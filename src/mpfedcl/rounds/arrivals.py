"""The loop of asynchronous methods: each update is aggregated when it arrives.

`VirtualArrivals` simulates a clock: arrivals follow from settings, random keys and sizes only.
`WallArrivals` serves clients on other machines by the wall clock. Versions, staleness and the
sampling of clients mean the same on both.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.rng import numpy_generator
from mpfedcl.methods import Arrival, Asynchronous
from mpfedcl.methods.messages import Broadcast
from mpfedcl.rounds.assembly import Assembly
from mpfedcl.rounds.collector import UpdateCollector
from mpfedcl.rounds.engine import ArrivalEngine, RemoteArrivalEngine
from mpfedcl.rounds.loop import RoundCounts, RoundLoop
from mpfedcl.rounds.population import sample_names
from mpfedcl.rounds.record import ArrivalRecord
from mpfedcl.rounds.state import ArrivalState, Dispatch, RoundState, SentModel
from mpfedcl.rounds.systems import SystemModel, sort_into_tiers

_ROUNDING = 1e-9
"""Relative tolerance: a client due at a tick has arrived by it."""
_FINEST_TICK = 1e-3
"""The shortest tick, relative to the time of a typical client: shorter ones are mostly idle."""
_LOOK_SECONDS = 1.0
"""Seconds between two looks for connected clients while there is a place to fill."""
_SHORTEST_TICK = 1.0
"""The shortest measured tick in seconds."""


class ArrivalLoop(RoundLoop, ABC):
    """A server that does not wait for stragglers.

    Its "rounds" are records: each ends after as many answers as a round has clients, so that a
    number of rounds is the same work with every method.
    """

    engine: ArrivalEngine

    def __init__(
        self, assembly: Assembly, engine: ArrivalEngine, systems: SystemModel | None = None
    ) -> None:
        super().__init__(assembly, engine, systems)
        assert isinstance(assembly.method, Asynchronous)
        self._rule = assembly.method
        self._bytes_up = self._validator.bytes_up
        self._tiers = [sorted(engine.sizes)]
        """The clients by tier, the fastest first; one tier if the method has none."""
        self.state = replace(self.state, arrivals=ArrivalState())
        self._counts = RoundCounts()

    @abstractmethod
    def _begin_record(self) -> None:
        """Prepare a record; the first one may follow a checkpoint."""

    @abstractmethod
    def _is_over(self, number: int) -> bool:
        """Return whether a record has enough answers."""

    @abstractmethod
    def _send_out(self) -> None:
        """Send the current model to idle clients, up to the allowed concurrency."""

    @abstractmethod
    def _take_next(self) -> None:
        """Wait for the next arrival or tick, and process it."""

    @abstractmethod
    def _plan(self, client: str, number: int, num_bytes: int) -> dict[str, Any]:
        """Return when a client is sent a model of this size, when it is due, and if it is lost."""

    def _end_record(self) -> None:
        """Finish a record after its last answer."""

    @property
    def _arrivals(self) -> ArrivalState:
        assert self.state.arrivals is not None
        return self.state.arrivals

    @property
    def _per_record(self) -> int:
        """The answers of a record: as many as a round has clients."""
        return min(len(self.engine.sizes), self._share_of(len(self.engine.sizes)))

    @property
    def _concurrency(self) -> int:
        """The largest number of clients under way at the same time."""
        asked = self._experiment.systems.concurrency or self._per_record
        return min(len(self.engine.sizes), asked)

    def accepts(self, state: RoundState) -> bool:
        """Return whether the clients under way are distinct and their models fit."""
        if state.arrivals is None:
            return False
        counts, wanted = state.arrivals.counts, self.shared_parameters
        names = [each.client for each in counts.under_way]
        return (
            len(set(names)) == len(names)
            and all(
                each.version <= counts.version and each.round <= state.round
                for each in counts.under_way
            )
            and all(
                each.params.keys() == wanted.keys()
                and all(value.shape == wanted[n].shape for n, value in each.params.items())
                for each in state.arrivals.models.values()
            )
        )

    def _collect_round(self, *, evaluate: bool, keep_models: bool) -> RoundCounts:
        """Let the clock run until the answers of a record have arrived."""
        number = self.state.round + 1
        self._counts = RoundCounts()
        self.engine.begin_record(keep_models=evaluate or keep_models)
        self._begin_record()
        while True:
            with self._clock.phase("broadcast"):
                self._send_out()
            self._take_next()
            if self._is_over(number):
                break
        self._counts.remarks = self._rule.remarks(self.broadcast())
        self.state = replace(self.state, round=number)
        self._end_record()
        if evaluate:
            self._counts.evaluated = self._choose_to_evaluate(number, self._counts.accepted)
        return self._counts

    def _show_time(self, counts: RoundCounts) -> dict[str, Any]:
        arrivals, names = self._arrivals.counts, [name for name, _ in counts.answers]
        staleness = [each for _, each in counts.answers]
        record = ArrivalRecord(
            version=arrivals.version,
            by_client={name: names.count(name) for name in counts.accepted},
            staleness={
                "mean": sum(staleness) / max(1, len(staleness)),
                "largest": float(max(staleness, default=0)),
            },
            left_out=sorted(counts.left_out),
            under_way=len(arrivals.under_way),
        )
        return {**super()._show_time(counts), "arrivals": record}

    # Sending out

    def _share_of(self, size: int) -> int:
        return max(self._experiment.min_clients, round(self._experiment.fraction * size))

    def _draw(self, names: Sequence[str], count: int, tier: int = 0) -> list[str]:
        """Sample clients, keyed by the number of the dispatch as rounds are by theirs."""
        if count >= len(names):
            return list(names)
        parts = (tier,) if len(self._tiers) > 1 else ()
        number = self._arrivals.counts.sendings + 1
        draw = numpy_generator(self._experiment.seed, number, "sample of clients", *parts)
        return sample_names(names, count, draw)

    def _dispatch(self, chosen: Sequence[tuple[str, int]]) -> None:
        """Send the current model to clients, given with their tiers."""
        arrivals = self._arrivals
        counts, broadcast = arrivals.counts, self.broadcast()
        number = counts.sendings + 1
        sent = [
            Dispatch(
                client=name,
                number=number,
                version=counts.version,
                round=broadcast.round,
                tier=tier,
                **self._plan(name, number, broadcast.num_bytes),
            )
            for name, tier in chosen
        ]
        self._counts.bytes_down += broadcast.num_bytes * len(sent)
        model = SentModel(broadcast.params, broadcast.extra)
        moved = ArrivalState(
            counts.model_copy(update={"sendings": number, "under_way": [*counts.under_way, *sent]}),
            {**arrivals.models, counts.version: model},
        )
        self.state = replace(self.state, arrivals=moved)
        self._tell_engine(sent)

    def _tell_engine(self, dispatches: Sequence[Dispatch]) -> None:
        self.engine.dispatch(
            {each.client: self._sent_to(each) for each in dispatches if not each.is_lost}
        )

    def _sent_to(self, dispatch: Dispatch) -> Broadcast:
        """Return the message that a client under way was sent."""
        model = self._arrivals.models[dispatch.version]
        return Broadcast(
            dispatch.round,
            model.params,
            model.extra,
            self._empty_pool,
            version=dispatch.version,
            dispatch=dispatch.number,
        )

    # Taking in

    def _take_in(self, due: Sequence[Dispatch]) -> None:
        """Aggregate the due answers, the oldest version first; an idle tick has none."""
        counts = self._arrivals.counts
        update: dict[str, Any] = {
            "ticks": counts.ticks + 1,
            "answers": counts.answers + sum(not each.is_lost for each in due),
        }
        folded = [
            arrival
            for version, each in groupby(
                sorted(due, key=lambda each: (each.version, each.client)),
                key=lambda each: each.version,
            )
            if (arrival := self._collect(list(each), counts.version - version)) is not None
        ]
        server = self.state.server
        if folded or self._rule.timing == "ticks":
            with self._clock.phase("aggregate"):
                server = self._rule.arrive(server, folded)
        update["version"] = counts.version + bool(folded)
        left = self._arrivals.without(due)
        moved = replace(left, counts=left.counts.model_copy(update=update))
        self.state = replace(self.state, server=server, arrivals=moved)

    def _collect(self, due: Sequence[Dispatch], staleness: int) -> Arrival | None:
        """Validate and average the answers of clients that were sent the same version."""
        self._counts.missing |= {each.client for each in due if each.is_lost}
        back = [each for each in due if not each.is_lost]
        if not back:
            return None
        names = [each.client for each in back]
        self._population.begin_round()
        sizes, num_samples = self.engine.sizes, self._population.num_samples
        collector = UpdateCollector(
            self._rule, self._validator, self.state.server, self._sent_to(back[0]), names
        )
        for name in names:
            answer = self.engine.answer(name)
            with self._clock.phase("aggregate"):
                collector.add(answer)
        collector.settle()
        accepted = set(collector.accepted)
        for each in back:
            seconds = each.seconds if each.client in accepted else None
            self.engine.settle(each.client, seconds=seconds)
        self._counts.add(collector, sizes, staleness)
        means, folded = collector.means(), [n for n in collector.accepted if collector.weights[n]]
        if not means:
            return None
        return Arrival(
            means,
            folded,
            [collector.weights[name] for name in folded],
            sum(sizes[name] for name in folded),
            staleness,
            max(each.seconds for each in back),
            sum(sizes[name] for name in folded) / num_samples,
            back[0].tier,
            len(self._tiers),
        )


class VirtualArrivals(ArrivalLoop):
    """Arrivals on a virtual clock: the server knows when each client is due."""

    def __init__(self, assembly: Assembly, engine: ArrivalEngine, systems: SystemModel) -> None:
        super().__init__(assembly, engine, systems)
        self._speeds = systems
        if self._rule.timing == "tiers":
            (names,) = self._tiers
            self._tiers = systems.in_tiers(names, self._rule.num_tiers, self._bytes_up)
        typical = systems.typical(self.broadcast().num_bytes, self._bytes_up)
        self._tick = self._experiment.systems.tick or typical
        if self._tick < _FINEST_TICK * typical:
            raise InvalidInput(
                f"systems.tick is {self._tick:g}; it must be at least "
                f"{_FINEST_TICK * typical:.3g}, a thousandth of what clients usually need."
            )

    def accepts(self, state: RoundState) -> bool:
        """Return whether the clients under way belong to this run, and their models fit."""
        under_way = state.arrivals.counts.under_way if state.arrivals else []
        return super().accepts(state) and all(
            each.client in self.engine.sizes and each.tier < len(self._tiers) for each in under_way
        )

    def _begin_record(self) -> None:
        # After a checkpoint, the engine does not know the clients under way.
        self._tell_engine(self._arrivals.counts.under_way)

    def _is_over(self, number: int) -> bool:
        return self._arrivals.counts.answers >= number * self._per_record

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
            idle = [name for name in self._tiers[0] if name not in away]
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
        """Return the next arrivals; the round of a tier ends with the last of its clients."""
        if self._rule.timing != "tiers":
            return [min(under_way, key=lambda each: (each.due, each.client))]
        ends: dict[int, float] = {}
        for each in under_way:
            ends[each.tier] = max(each.due, ends.get(each.tier, 0.0))
        first = min(under_way, key=lambda each: (ends[each.tier], each.client)).tier
        end = ends[first]
        return [each.model_copy(update={"due": end}) for each in under_way if each.tier == first]


class WallArrivals(ArrivalLoop):
    """Arrivals by the wall clock: clients are on other machines, and may leave and return.

    The order of arrival cannot be reproduced, unless one client is under way at a time.
    """

    engine: RemoteArrivalEngine

    def __init__(self, assembly: Assembly, engine: RemoteArrivalEngine) -> None:
        super().__init__(assembly, engine)
        self._zero: float | None = None
        """The start of the run by the monotonic clock; None before the first record."""
        self._closed = 0
        """Dispatches of this record that were answered or given up."""
        self._back: dict[str, Dispatch] = {}
        """Answers that wait to be aggregated, in order of arrival."""
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
        # After a checkpoint, dispatches of the previous process are abandoned.
        self.state = replace(self.state, arrivals=arrivals.without(arrivals.counts.under_way))

    def _is_over(self, number: int) -> bool:
        # Clients that are given up count too, so that a record ends without any answer.
        return self._closed >= self._per_record

    def _end_record(self) -> None:
        self._note(elapsed_seconds=round(self._now(), 3))
        self._counts.missing |= set(self._absent)
        self.engine.keep(self._counts.accepted, self.broadcast)

    def _show_time(self, counts: RoundCounts) -> dict[str, Any]:
        elapsed = self._arrivals.counts.elapsed_seconds
        return {**super()._show_time(counts), "elapsed_seconds": elapsed}

    def _note(self, **values: Any) -> None:
        """Keep values in the state for a resumed run."""
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
        """Assign clients to the measured tiers; clients that joined later are in the slowest."""
        *others, slowest = self._arrivals.counts.tiers or [[]]
        elsewhere = {name for names in others for name in names}
        self._tiers = [*others, sorted({*slowest, *self.engine.sizes} - elsewhere)]

    def _choose_in_tiers(self, idle: list[str]) -> list[tuple[str, int]]:
        """Return the clients to dispatch from tiers with none under way."""
        under_way = self._arrivals.counts.under_way
        if self._is_unmeasured:
            # All clients once, to measure their speed.
            return [] if under_way else [(name, 0) for name in idle]
        busy, chosen = {each.tier for each in under_way}, []
        for tier, names in enumerate(self._tiers):
            here = [name for name in names if name in idle]
            # A tier has rounds: it waits until all its present clients may be dispatched.
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
        """Note the clients that have answered, waiting at most `seconds`."""
        found = self.engine.arrivals(seconds)
        under_way = {each.client: each for each in self._arrivals.counts.under_way}
        now = self._now()
        for name, is_lost in found.items():
            self._back[name] = under_way[name].model_copy(update={"due": now, "is_lost": is_lost})

    def _take(self, names: Collection[str], tier: int | None = None) -> None:
        """Aggregate the answers of these clients."""
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
        # Not at fixed times: a server that was busy does not have to catch up.
        self._next_tick = self._now() + tick

    def _measure_tick(self) -> None:
        """Wait for half of the first dispatches: their time becomes the tick."""
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
        """Sort all clients into tiers by the time of their first answers."""
        back = self._back
        if all(each.is_lost for each in back.values()):
            self._take(list(back))
            return
        # Clients that were given up are slower than all that answered.
        order = sorted(back, key=lambda name: (back[name].is_lost, back[name].seconds, name))
        self._note(tiers=sort_into_tiers(order, self._rule.num_tiers))
        self._sort()
        for tier, names in enumerate(self._arrivals.counts.tiers):
            self._take(names, tier)
