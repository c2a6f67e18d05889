"""The loop of asynchronous methods: each update is aggregated when it arrives.

`VirtualArrivals` simulates a clock: arrivals follow from settings, random keys and sizes only.
`WallArrivals` serves clients on other machines by the wall clock. A clock plans dispatches and
waits for arrivals; all else is the same with both.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from mpfedcl.core.errors import InvalidInput
from mpfedcl.methods import Arrival, Asynchronous, Server, mix
from mpfedcl.methods.messages import Broadcast
from mpfedcl.rounds.assembly import Assembly, split_buffers
from mpfedcl.rounds.collector import UpdateCollector
from mpfedcl.rounds.engine import ArrivalEngine, RemoteArrivalEngine
from mpfedcl.rounds.loop import RoundCounts, RoundLoop
from mpfedcl.rounds.record import ArrivalRecord
from mpfedcl.rounds.state import ArrivalState, Dispatch, RoundState, SentModel
from mpfedcl.rounds.systems import SystemModel, sort_into_tiers

_ROUNDING = 1e-9
"""Relative tolerance: a client due at a tick has arrived by it."""
_FINEST_TICK = 1e-3
"""The shortest tick, relative to the time of a typical client: shorter ones are mostly idle."""
_LOOK_SECONDS = 1.0
"""Seconds between two looks for connected clients while there is a place to fill."""
_TICK_SHARE = 0.1
"""The tick over a network, relative to `network.round_timeout`, unless `systems.tick` is given."""


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
        self._has_tiers = self._rule.timing == "tiers"
        self.state = replace(self.state, arrivals=ArrivalState())
        self._counts = RoundCounts()

    # The clock

    @abstractmethod
    def _begin_record(self) -> None:
        """Prepare a record; the first one may follow a checkpoint."""

    @abstractmethod
    def _is_over(self, number: int) -> bool:
        """Return whether a record has enough answers."""

    @abstractmethod
    def _plan(self, client: str, number: int, num_bytes: int) -> dict[str, Any]:
        """Return when a client is sent a model of this size, when it is due, and if it is lost."""

    @abstractmethod
    def _take_next(self) -> None:
        """Wait for the next arrival or tick, and process it."""

    def _end_record(self) -> None:
        """Finish a record after its last answer."""

    def _absent_now(self) -> Collection[str]:
        """Return the clients that cannot be reached."""
        return ()

    def _may_be_sent(self, client: str) -> bool:
        """Return whether a client may be sent a model again so soon."""
        return True

    @property
    def _arrivals(self) -> ArrivalState:
        assert self.state.arrivals is not None
        return self.state.arrivals

    @property
    def _under_way(self) -> list[Dispatch]:
        return self._arrivals.counts.under_way

    def _note(self, arrivals: ArrivalState | None = None, **counts: Any) -> None:
        """Move the state of the arrivals on."""
        before = self._arrivals if arrivals is None else arrivals
        after = replace(before, counts=before.counts.model_copy(update=counts))
        self.state = replace(self.state, arrivals=after)

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
        """Return whether the clients under way are distinct and known, and their models fit."""
        if state.arrivals is None:
            return False
        counts, wanted = state.arrivals.counts, self.shared_parameters
        is_remote, shapes = self._systems is None, {n: v.shape for n, v in wanted.items()}
        return (
            len({each.client for each in counts.under_way}) == len(counts.under_way)
            and all(
                each.version <= counts.version
                and each.round <= state.round
                and (is_remote or each.client in self.engine.sizes)
                and (is_remote or each.tier < len(self._tiers))
                for each in counts.under_way
            )
            and all(
                {name: value.shape for name, value in each.params.items()} == shapes
                for each in state.arrivals.models.values()
            )
        )

    def _collect_round(self, *, evaluate: bool, keep_models: bool) -> RoundCounts:
        """Let the clock run until the answers of a record have arrived."""
        number = self.state.round + 1
        self._counts = counts = RoundCounts()
        self.engine.begin_record(keep_models=evaluate or keep_models)
        self._begin_record()
        while True:
            with self._clock.phase("broadcast"):
                self._send_out()
            self._take_next()
            if self._is_over(number):
                break
        counts.remarks = self._rule.remarks(self.broadcast())
        self.state = replace(self.state, round=number)
        self._end_record()
        if evaluate:
            counts.evaluated = self._choose_to_evaluate(number, counts.accepted)
        counts.arrivals = self._describe(counts)
        return counts

    def _describe(self, counts: RoundCounts) -> ArrivalRecord:
        arrivals, names = self._arrivals.counts, [name for name, _ in counts.answers]
        staleness = [each for _, each in counts.answers]
        return ArrivalRecord(
            version=arrivals.version,
            by_client={name: names.count(name) for name in counts.accepted},
            staleness={
                "mean": sum(staleness) / max(1, len(staleness)),
                "largest": float(max(staleness, default=0)),
            },
            left_out=sorted(counts.left_out),
            under_way=len(arrivals.under_way),
        )

    # Sending out

    def _send_out(self) -> None:
        """Send the current model to idle clients, up to the allowed concurrency."""
        away = {each.client for each in self._under_way}
        if len(away) >= (len(self.engine.sizes) if self._has_tiers else self._concurrency):
            return
        unavailable = away.union(self._absent_now())
        idle = [name for name in sorted(self.engine.sizes) if name not in unavailable]
        if self._has_tiers:
            chosen = self._choose_in_tiers(idle)
        else:
            ready = [name for name in idle if self._may_be_sent(name)]
            chosen = [(name, 0) for name in self._draw(ready, self._concurrency - len(away))]
        if chosen:
            self._dispatch(chosen)

    def _choose_in_tiers(self, idle: Sequence[str]) -> list[tuple[str, int]]:
        """Return the clients to dispatch, with their tiers, from tiers with none under way."""
        chosen, here = [], set(idle)
        busy = {each.tier for each in self._under_way}
        for tier, members in enumerate(self._tiers):
            names = [name for name in members if name in here]
            # A tier has rounds: it waits until all its present clients may be dispatched.
            if tier not in busy and all(map(self._may_be_sent, names)):
                drawn = self._draw(names, self._share_of(len(names)), tier)
                chosen += [(name, tier) for name in drawn]
        return chosen

    def _draw(self, names: Sequence[str], count: int, tier: int = 0) -> list[str]:
        """Sample clients, keyed by the number of the dispatch as rounds are by theirs."""
        parts = (tier,) if len(self._tiers) > 1 else ()
        number = self._arrivals.counts.sendings + 1
        return self._sample(names, count, number, "sample of clients", *parts)

    def _dispatch(self, chosen: Sequence[tuple[str, int]]) -> None:
        """Send the current model to clients, given with their tiers."""
        counts, broadcast = self._arrivals.counts, self.broadcast()
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
        models = {**self._arrivals.models, counts.version: model}
        self._note(
            replace(self._arrivals, models=models),
            sendings=number,
            under_way=[*counts.under_way, *sent],
        )
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
        by_version: dict[int, list[Dispatch]] = {}
        for each in sorted(due, key=lambda each: (each.version, each.client)):
            by_version.setdefault(each.version, []).append(each)
        arrived = [self._collect(each, counts.version - v) for v, each in by_version.items()]
        folded = [each for each in arrived if each is not None]
        if folded or self._rule.timing == "ticks":
            with self._clock.phase("aggregate"):
                server = self._arrive(folded)
            self.state = replace(self.state, server=server)
        self._note(
            self._arrivals.without(due),
            version=counts.version + bool(folded),
            ticks=counts.ticks + 1,
            answers=counts.answers + sum(not each.is_lost for each in due),
        )

    def _arrive(self, arrivals: Sequence[Arrival]) -> Server:
        """Return the method's next server state; running statistics are mixed by samples."""
        server, model = self.state.server, self._assembly.model
        params, buffers = split_buffers(server.params, model)
        given = []
        for each in arrivals:
            means, statistics = split_buffers(each.means, model)
            buffers = mix(buffers, statistics, each.share)
            given.append(each._replace(means=means))
        arrived = self._rule.arrive(replace(server, params=params), given)
        return replace(arrived, params={**arrived.params, **buffers})

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
        if self._has_tiers:
            (names,) = self._tiers
            self._tiers = systems.in_tiers(names, self._rule.num_tiers, self._bytes_up)
        typical = systems.typical(self.broadcast().num_bytes, self._bytes_up)
        self._tick = self._experiment.systems.tick or typical
        if self._tick < _FINEST_TICK * typical:
            raise InvalidInput(
                f"systems.tick is {self._tick:g}; it must be at least "
                f"{_FINEST_TICK * typical:.3g}, a thousandth of what clients usually need."
            )

    def _begin_record(self) -> None:
        # After a checkpoint, the engine does not know the clients under way.
        self._tell_engine(self._under_way)

    def _is_over(self, number: int) -> bool:
        return self._arrivals.counts.answers >= number * self._per_record

    def _plan(self, client: str, number: int, num_bytes: int) -> dict[str, Any]:
        now, is_lost = self.state.virtual_seconds, self._speeds.loses(client, number)
        if is_lost:
            seconds = self._speeds.gives_up_after(client, num_bytes, self._bytes_up)
        else:
            seconds = self._speeds.seconds(client, number, num_bytes, self._bytes_up)
        return {"sent": now, "due": now + seconds, "is_lost": is_lost}

    def _take_next(self) -> None:
        if self._rule.timing == "ticks":
            now = (self._arrivals.counts.ticks + 1) * self._tick
            due = [each for each in self._under_way if each.due <= now * (1 + _ROUNDING)]
        else:
            due = self._first_due(self._under_way)
            now = due[0].due
        self._take_in(due)
        self.state = replace(self.state, virtual_seconds=now)

    def _first_due(self, under_way: list[Dispatch]) -> list[Dispatch]:
        """Return the next arrivals; the round of a tier ends with the last of its clients."""
        if not self._has_tiers:
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
        self._zero = time.monotonic() - self._arrivals.counts.elapsed_seconds
        # After a checkpoint, dispatches of the previous process are abandoned.
        self._note(self._arrivals.without(self._under_way))

    def _is_over(self, number: int) -> bool:
        # Clients that are given up count too, so that a record ends without any answer.
        return self._closed >= self._per_record

    def _end_record(self) -> None:
        self._note(elapsed_seconds=round(self._now(), 3))
        self._counts.elapsed_seconds = self._arrivals.counts.elapsed_seconds
        self._counts.missing |= set(self._absent)
        self.engine.keep(self._counts.accepted, self.broadcast)

    # Sending out

    def _absent_now(self) -> Collection[str]:
        self._absent = self.engine.absent_clients()
        self._sort()
        return self._absent

    def _sort(self) -> None:
        """Assign clients to the measured tiers; clients that joined later are in the slowest."""
        *others, slowest = self._arrivals.counts.tiers or [[]]
        elsewhere = {name for names in others for name in names}
        self._tiers = [*others, sorted({*slowest, *self.engine.sizes} - elsewhere)]

    def _choose_in_tiers(self, idle: Sequence[str]) -> list[tuple[str, int]]:
        if not self._is_unmeasured:
            return super()._choose_in_tiers(idle)
        # All clients once, to measure their speed.
        return [] if self._under_way else [(name, 0) for name in idle]

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
        under_way, now = {each.client: each for each in self._under_way}, self._now()
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
        experiment = self._experiment
        tick = experiment.systems.tick or _TICK_SHARE * experiment.network.round_timeout
        if self._next_tick is None:
            self._next_tick = self._now() + tick
        left = self._next_tick - self._now()
        if left > 0:
            self._hear(min(left, _LOOK_SECONDS))
            return
        self._take(list(self._back))
        # Not at fixed times: a server that was busy does not have to catch up.
        self._next_tick = self._now() + tick

    def _take_tiers(self) -> None:
        self._hear(_LOOK_SECONDS)
        waiting = {each.tier for each in self._under_way if each.client not in self._back}
        ready = {each.tier for each in self._under_way} - waiting
        if ready and self._is_unmeasured:
            self._measure_tiers()
            return
        for tier in sorted(ready):
            self._take([each.client for each in self._under_way if each.tier == tier])

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
