"""The loop of asynchronous methods: clients are sent out and fold in as they come, by a clock."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from mpfedcl.errors import InvalidInput
from mpfedcl.messages import Broadcast
from mpfedcl.methods import Arrival, Asynchronous
from mpfedcl.rng import numpy_generator
from mpfedcl.rounds.arrival_counting import CountedArrivals
from mpfedcl.rounds.arrival_state import ArrivalState, Dispatch, SentModel
from mpfedcl.rounds.assembly import Assembly
from mpfedcl.rounds.engine import Engine
from mpfedcl.rounds.pace import Pace
from mpfedcl.rounds.record import Attendance, RoundRecord
from mpfedcl.rounds.round_loop import RoundLoop
from mpfedcl.rounds.round_state import RoundState
from mpfedcl.rounds.update_collector import UpdateCollector

_ROUNDING = 1e-9
"""Who is due at a tick has come by it, whatever sums of seconds round to."""
_FINEST_TICK = 1e-3
"""Of what a client takes: finer ticks would mostly be idle."""


class ArrivalLoop(RoundLoop):
    """A server that waits for nobody, on a virtual clock.

    Its "rounds" are records: each is over once as many answers have come as a round has clients, so
    that so many rounds are the same work with every method.
    """

    def __init__(self, assembly: Assembly, engine: Engine, pace: Pace | None = None) -> None:
        super().__init__(assembly, engine, pace)
        assert pace is not None
        assert isinstance(assembly.method, Asynchronous)
        self._rule = assembly.method
        self._speeds = pace
        settings, names = self._experiment.pace, sorted(engine.sizes)
        self._per_record = len(self._choose(1, ()))
        self._concurrency = min(len(names), settings.concurrency or self._per_record)
        template = [*self._guard.template.values(), *self._guard.sums.values()]
        self._bytes_up = sum(each.numel() * each.element_size() for each in template)
        self._tiers = [names]
        if self._rule.timing == "tiers":
            self._tiers = pace.in_tiers(names, self._rule.num_tiers, self._bytes_up)
        typical = pace.typical(self.broadcast().num_bytes, self._bytes_up)
        self._tick = settings.tick or typical
        if self._tick < _FINEST_TICK * typical:
            raise InvalidInput(
                f"pace.tick is {self._tick:g}; it must be at least {_FINEST_TICK * typical:.3g}, a "
                "thousandth of what clients mostly need."
            )
        self.state = replace(self.state, arrivals=ArrivalState())
        self._counted = CountedArrivals()

    @property
    def _arrivals(self) -> ArrivalState:
        assert self.state.arrivals is not None
        return self.state.arrivals

    def accepts(self, state: RoundState) -> bool:
        """Tell whether those who are under way are clients of this run, with models that fit."""
        if state.arrivals is None:
            return False
        counts, wanted = state.arrivals.counts, self.shared_parameters
        names = [each.client for each in counts.under_way]
        return (
            len(set(names)) == len(names)
            and set(names) <= set(self.engine.sizes)
            and all(
                each.version <= counts.version
                and each.round <= state.round
                and each.tier < len(self._tiers)
                for each in counts.under_way
            )
            and all(
                each.params.keys() == wanted.keys()
                and all(value.shape == wanted[n].shape for n, value in each.params.items())
                for each in state.arrivals.models.values()
            )
        )

    def run_round(
        self, *, evaluate: bool, keep_models: bool = False, with_confusion: bool = False
    ) -> RoundRecord:
        """Let the clock run until a record's answers have come."""
        number = self.state.round + 1
        self._counted = CountedArrivals()
        self.engine.begin_record(keep_models=evaluate or keep_models)
        # After a checkpoint the engine must hear again of those who have not trained yet.
        self._tell_engine(self._arrivals.counts.under_way)
        while True:
            with self._clock.phase("broadcast"):
                self._send_out()
            self._take_next()
            if self._arrivals.counts.answers >= number * self._per_record:
                break
        counted, remarks = self._counted, self._rule.remarks(self.broadcast())
        self.state = replace(self.state, round=number)
        read = self._choose_to_evaluate(number, counted.accepted) if evaluate else []
        readings = self._evaluate(read, with_confusion=with_confusion) if evaluate else None
        self.confusion = readings.confusion if readings else {}
        main = self._rule.reading_on("own")
        return RoundRecord(
            round=number,
            loss=counted.mean_loss(),
            accuracy=readings.table() if readings else None,
            accuracy_per_client=readings.per_client(main) if readings else None,
            loss_per_client=dict(sorted(counted.loss_by_client.items())),
            seconds=self._clock.lap(),
            bytes={"up": counted.bytes_up, "down": counted.bytes_down},
            clients=Attendance(
                answered=counted.accepted,
                missing=sorted(counted.lost - {*counted.accepted, *counted.rejected}),
                rejected=counted.rejected,
            ),
            sent=counted.largest,
            unchanged=not counted.answers,
            withheld=sorted(counted.withheld),
            processed={mark: sorted(who) for mark, who in sorted(counted.processed.items())},
            remarks={**remarks, **self.engine.remarks()},
            calibration_error=readings.calibration_error() if readings and with_confusion else None,
            calibration_bins=readings.calibration_bins() if readings and with_confusion else None,
            virtual_seconds=self.state.virtual_seconds,
            arrivals=counted.describe(self._arrivals),
        )

    # Sending out

    def _send_out(self) -> None:
        """Send the present model to clients that are idle, as many as have a place."""
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

    def _share_of(self, size: int) -> int:
        return max(self._experiment.min_clients, round(self._experiment.fraction * size))

    def _draw(self, names: Sequence[str], count: int, tier: int = 0) -> list[str]:
        """Draw clients by the number of the sending, as rounds draw theirs by the round's."""
        if count >= len(names):
            return list(names)
        parts = (tier,) if len(self._tiers) > 1 else ()
        number = self._arrivals.counts.sendings + 1
        draw = numpy_generator(self._experiment.seed, number, "sample of clients", *parts)
        return sorted(str(name) for name in draw.choice(names, count, replace=False))

    def _dispatch(self, chosen: Sequence[tuple[str, int]]) -> None:
        arrivals, now = self._arrivals, self.state.virtual_seconds
        counts, broadcast = arrivals.counts, self.broadcast()
        number = counts.sendings + 1
        sent = [
            Dispatch(
                client=name,
                number=number,
                version=counts.version,
                round=broadcast.round,
                sent=now,
                due=now + self._seconds(name, number, broadcast.num_bytes),
                tier=tier,
                is_lost=self._speeds.loses(name, number),
            )
            for name, tier in chosen
        ]
        if self._rule.timing == "tiers":
            # A tier's round is over when the last of its clients is back.
            last = {tier: max(e.due for e in sent if e.tier == tier) for _, tier in chosen}
            sent = [each.model_copy(update={"due": last[each.tier]}) for each in sent]
        self._counted.bytes_down += broadcast.num_bytes * len(sent)
        under_way = [*counts.under_way, *sent]
        model = SentModel(broadcast.params, broadcast.extra)
        moved = ArrivalState(
            counts.model_copy(update={"sendings": number, "under_way": under_way}),
            {**arrivals.models, counts.version: model},
        )
        self.state = replace(self.state, arrivals=moved)
        self._tell_engine(sent)

    def _seconds(self, client: str, number: int, bytes_down: int) -> float:
        if self._speeds.loses(client, number):
            return self._speeds.gives_up_after(client, bytes_down, self._bytes_up)
        return self._speeds.seconds(client, number, bytes_down, self._bytes_up)

    def _tell_engine(self, dispatches: Sequence[Dispatch]) -> None:
        self.engine.dispatch(
            {each.client: self._sent_to(each) for each in dispatches if not each.is_lost}
        )

    def _sent_to(self, dispatch: Dispatch) -> Broadcast:
        """Return what a client under way was sent."""
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

    def _take_next(self) -> None:
        """Move the clock on to the next moment at which the server does something."""
        counts = self._arrivals.counts
        if self._rule.timing == "ticks":
            now = (counts.ticks + 1) * self._tick
            due = [each for each in counts.under_way if each.due <= now * (1 + _ROUNDING)]
        else:
            first = min(counts.under_way, key=lambda each: (each.due, each.client))
            now, due = first.due, [first]
            if self._rule.timing == "tiers":
                due = [each for each in counts.under_way if each.tier == first.tier]
        answered = sum(not each.is_lost for each in due)
        update: dict[str, Any] = {
            "ticks": counts.ticks + 1,
            "answers": counts.answers + answered,
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
        self.state = replace(self.state, server=server, virtual_seconds=now, arrivals=moved)

    def _collect(self, due: Sequence[Dispatch], staleness: int) -> Arrival | None:
        """Judge what clients have sent who had set out with one version, and average it."""
        self._counted.lost |= {each.client for each in due if each.is_lost}
        back = [each for each in due if not each.is_lost]
        if not back:
            return None
        names, sizes = [each.client for each in back], dict(self.engine.sizes)
        collector = UpdateCollector(
            self._rule, self._guard, self.state.server, self._sent_to(back[0]), names
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
        self._counted.add(collector, staleness, sizes)
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
            sum(sizes[name] for name in folded) / sum(sizes.values()),
            back[0].tier,
            len(self._tiers),
        )


def make_loop(assembly: Assembly, engine: Engine, pace: Pace | None = None) -> RoundLoop:
    """Return the loop that an experiment's method is run by."""
    kind = RoundLoop if assembly.method.timing == "rounds" else ArrivalLoop
    return kind(assembly, engine, pace)
