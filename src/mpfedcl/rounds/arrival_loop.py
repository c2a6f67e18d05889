"""The loop of asynchronous methods: clients are sent out and fold in as they come.

What is here holds on any clock; `virtual_arrivals` and `real_arrivals` say who comes when.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from mpfedcl.core.rng import numpy_generator
from mpfedcl.methods import Arrival, Asynchronous
from mpfedcl.methods.messages import Broadcast
from mpfedcl.rounds.arrival_counting import CountedArrivals
from mpfedcl.rounds.arrival_state import ArrivalState, Dispatch, SentModel
from mpfedcl.rounds.assembly import Assembly
from mpfedcl.rounds.engine import Engine
from mpfedcl.rounds.listed_clients import NOT_READ
from mpfedcl.rounds.population import sample_names
from mpfedcl.rounds.record import Attendance, RoundRecord
from mpfedcl.rounds.round_loop import RoundLoop
from mpfedcl.rounds.round_state import RoundState
from mpfedcl.rounds.systems import SystemModel
from mpfedcl.rounds.update_collector import UpdateCollector


class ArrivalLoop(RoundLoop, ABC):
    """A server that waits for nobody.

    Its "rounds" are records: each is over once as many answers have come as a round has clients, so
    that so many rounds are the same work with every method.
    """

    def __init__(self, assembly: Assembly, engine: Engine, pace: SystemModel | None = None) -> None:
        super().__init__(assembly, engine, pace)
        assert isinstance(assembly.method, Asynchronous)
        self._rule = assembly.method
        template = [*self._validator.template.values(), *self._validator.sums.values()]
        self._bytes_up = sum(each.numel() * each.element_size() for each in template)
        self._tiers = [sorted(engine.sizes)]
        """The clients; where there are tiers, the fastest first."""
        self.state = replace(self.state, arrivals=ArrivalState())
        self._counted = CountedArrivals()

    @abstractmethod
    def _begin_record(self) -> None:
        """Get ready for a record; the first one may be after a checkpoint."""

    @abstractmethod
    def _is_over(self, number: int) -> bool:
        """Tell whether enough has come for a record."""

    @abstractmethod
    def _send_out(self) -> None:
        """Send the present model to clients that are idle, as many as have a place."""

    @abstractmethod
    def _take_next(self) -> None:
        """Wait for the next moment at which the server does something, and do it."""

    @abstractmethod
    def _plan(self, client: str, number: int, num_bytes: int) -> dict[str, Any]:
        """Return when a client is sent a model of this size, when it is due, whether it is lost."""

    def _end_record(self) -> None:
        """Do what is left when a record's answers have come."""

    @abstractmethod
    def _show_clock(self) -> dict[str, Any]:
        """Return what the record says of the time and of what has come."""

    def _find_missing(self) -> Collection[str]:
        """Return the clients of whom nothing has come, though it should have."""
        return self._counted.lost

    @property
    def _arrivals(self) -> ArrivalState:
        assert self.state.arrivals is not None
        return self.state.arrivals

    @property
    def _per_record(self) -> int:
        """As many clients as a round has."""
        return min(len(self.engine.sizes), self._share_of(len(self.engine.sizes)))

    @property
    def _concurrency(self) -> int:
        """Clients that are under way at the same time, at most."""
        asked = self._experiment.systems.concurrency or self._per_record
        return min(len(self.engine.sizes), asked)

    def accepts(self, state: RoundState) -> bool:
        """Tell whether those who are under way are different clients, with models that fit."""
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

    def run_round(
        self, *, evaluate: bool, keep_models: bool = False, with_confusion: bool = False
    ) -> RoundRecord:
        """Let the clock run until a record's answers have come."""
        number = self.state.round + 1
        self._counted = CountedArrivals()
        self.engine.begin_record(keep_models=evaluate or keep_models)
        self._begin_record()
        while True:
            with self._clock.phase("broadcast"):
                self._send_out()
            self._take_next()
            if self._is_over(number):
                break
        counted, remarks = self._counted, self._rule.remarks(self.broadcast())
        self.state = replace(self.state, round=number)
        self._end_record()
        read = self._choose_to_evaluate(number, counted.accepted) if evaluate else []
        predictors = self._evaluate(read, with_confusion=with_confusion) if evaluate else None
        self.confusion = predictors.confusion if predictors else {}
        heard = {*counted.accepted, *counted.rejected}
        listed = (
            predictors.listed(self._rule.predictor_on("local_test"), heard)
            if predictors
            else NOT_READ
        )
        return RoundRecord(
            round=number,
            loss=counted.mean_loss(),
            accuracy=predictors.table() if predictors else None,
            accuracy_per_client=listed.rows,
            accuracy_spread=listed.spread,
            loss_per_client=dict(sorted(counted.loss_by_client.items())),
            seconds=self._clock.lap(),
            bytes={"up": counted.bytes_up, "down": counted.bytes_down},
            clients=Attendance(
                answered=counted.accepted,
                missing=sorted(set(self._find_missing()) - heard),
                rejected=counted.rejected,
            ),
            sent=counted.largest,
            unchanged=not counted.answers,
            withheld=sorted(counted.withheld),
            processed={mark: sorted(who) for mark, who in sorted(counted.processed.items())},
            remarks={**remarks, **self.engine.remarks()},
            calibration_error=predictors.calibration_error()
            if predictors and with_confusion
            else None,
            calibration_bins=predictors.calibration_bins()
            if predictors and with_confusion
            else None,
            **self._show_clock(),
        )

    # Sending out

    def _share_of(self, size: int) -> int:
        return max(self._experiment.min_clients, round(self._experiment.fraction * size))

    def _draw(self, names: Sequence[str], count: int, tier: int = 0) -> list[str]:
        """Draw clients by the number of the sending, as rounds draw theirs by the round's."""
        if count >= len(names):
            return list(names)
        parts = (tier,) if len(self._tiers) > 1 else ()
        number = self._arrivals.counts.sendings + 1
        draw = numpy_generator(self._experiment.seed, number, "sample of clients", *parts)
        return sample_names(names, count, draw)

    def _dispatch(self, chosen: Sequence[tuple[str, int]]) -> None:
        """Send the present model to clients, each of a tier."""
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
        self._counted.bytes_down += broadcast.num_bytes * len(sent)
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

    def _take_in(self, due: Sequence[Dispatch]) -> None:
        """Fold what has come by now, the oldest versions first; at an idle tick it is nothing."""
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
        """Judge what clients have sent who had set out with one version, and average it."""
        self._counted.lost |= {each.client for each in due if each.is_lost}
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
            sum(sizes[name] for name in folded) / num_samples,
            back[0].tier,
            len(self._tiers),
        )
