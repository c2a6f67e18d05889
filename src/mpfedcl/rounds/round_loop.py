"""The only round loop: broadcast, train, guard, aggregate, evaluate, record."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.rng import numpy_generator
from mpfedcl.core.tensors import Tensors
from mpfedcl.methods import (
    PREDICTORS,
    OneShot,
    PartialModel,
    SharesPrototypes,
    Tally,
    prototype_rule,
    shares_prototypes_in,
)
from mpfedcl.methods.messages import Broadcast
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.aggregation import find_aggregator
from mpfedcl.rounds.assembly import Assembly
from mpfedcl.rounds.bounds import RelativeBounds
from mpfedcl.rounds.budget_check import released_predictors
from mpfedcl.rounds.engine import Engine
from mpfedcl.rounds.evaluation import ConfusionCounts, RoundEvaluation
from mpfedcl.rounds.listed_clients import NOT_READ
from mpfedcl.rounds.population import Population, sample_names
from mpfedcl.rounds.private_rounds import PrivateRounds
from mpfedcl.rounds.prototype_pooling import PrototypePooling
from mpfedcl.rounds.record import Attendance, RoundRecord
from mpfedcl.rounds.round_state import RoundState
from mpfedcl.rounds.systems import SystemModel
from mpfedcl.rounds.total_collector import TotalCollector
from mpfedcl.rounds.update_collector import UpdateCollector, in_name_order
from mpfedcl.rounds.validation import UpdateValidator
from mpfedcl.rounds.waiting import WaitingRound

_MOST_KEPT, _MOST_STATISTICS = 10**9, 10_000
"""Bytes that the sums of all clients may take on disk, where nobody says whether to keep them, and
files: one for each client."""


class RoundLoop:
    """A server and its clients. It knows neither files nor how the clients are run.

    With a `pace` it has a virtual clock: a round takes as long as the slowest of its clients, or of
    the first `network.enough` of them.
    """

    def __init__(self, assembly: Assembly, engine: Engine, pace: SystemModel | None = None) -> None:
        self._experiment, self._method = assembly.experiment, assembly.method
        if self._experiment.min_clients > len(engine.sizes):
            raise InvalidInput(
                f"min_clients is {self._experiment.min_clients}; it must be at most the number of "
                f"clients, {len(engine.sizes)}."
            )
        self.state = RoundState(0, self._method.init_server(assembly.initial), {})
        self.confusion: dict[str, ConfusionCounts] = {}
        """What the last round counted, by client, if it was asked to."""
        self.statistics: Tensors = {}
        """What the last round's sums came to, where a method keeps only the total."""
        self.client_sums: dict[str, Tensors] | None = None
        """What each client has sent, where that is kept."""
        self.engine = engine
        # Clients of this program's own are there from the beginning to the end.
        self._population = Population(engine.sizes, is_fixed=engine.label_counts is None)
        self._clock = assembly.clock
        self._pace = pace
        like = next(iter(assembly.initial.values()))
        self._empty_pool = PrototypePool.empty(
            self._method.num_classes,
            assembly.model.embedding_size,
            prototype_rule(self._method).num_prototypes,
            dtype=like.dtype,
            device=like.device,
        )
        self._pooling = PrototypePooling(self._method, self._empty_pool)
        self._validator = UpdateValidator(assembly, engine.sizes, engine.label_counts)
        self.private: PrivateRounds | None = None
        """What may leave the server's hands, under a privacy budget."""
        if self._experiment.privacy.has_budget:
            size = assembly.model.embedding_size
            self.private = PrivateRounds(self._method, len(engine.sizes), size)
        if engine.label_counts is None and self._validator.template:
            rule = find_aggregator(self._experiment.aggregation.rule)
            rule.check(self._experiment, len(self._choose(1, ())))
        # Clients on other machines are strangers.
        automatic = engine.label_counts is not None
        asked = self._experiment.validation.bounds
        self._is_bounded = asked == "on" or (asked == "auto" and automatic)
        if self.private is not None or self._experiment.secure_aggregation:
            # Bounds compare single clients: noise does not cover that, and masks hide them.
            if asked == "on":
                raise InvalidInput(
                    "validation.bounds is 'on'; with a privacy budget or secure_aggregation it must be auto or "
                    "off: bounds compare single clients."
                )
            self._is_bounded = False

    @property
    def shared_parameters(self) -> Tensors:
        """The parameters that travel."""
        params = self.state.server.params
        return {name: value for name, value in params.items() if self._method.shared(name)}

    @property
    def global_model(self) -> Tensors | None:
        """The model that clients share, or None where some of it stays at home."""
        params = self.state.server.params
        return params if all(self._method.shared(name) for name in params) else None

    @property
    def pool(self) -> PrototypePool:
        """The prototypes that the next broadcast carries."""
        return self._pooling.make(self.state.prototypes, self.state.round)

    def accepts(self, state: RoundState) -> bool:
        """Tell whether a state is one of this kind of loop, with these clients."""
        return state.arrivals is None

    def run_round(
        self, *, evaluate: bool, keep_models: bool = False, with_confusion: bool = False
    ) -> RoundRecord:
        """Run the next round and move the state on.

        `keep_models` for the engine to hand out; `with_confusion` where it evaluates.
        """
        with self._clock.phase("broadcast"):
            absent = set(self.engine.absent_clients())
            self._population.begin_round()
            broadcast = self.broadcast()
            merged = self._pooling.remarks()
            chosen = self._choose(broadcast.round, absent)
            broadcast = replace(broadcast, units=self._thin(broadcast.round, chosen))
            waiting = self._wait_for(broadcast, chosen)
            reached = chosen if waiting is None else waiting.in_time
        server = self.state.server
        collect = TotalCollector if self._experiment.secure_aggregation else UpdateCollector
        collector = collect(
            self._method,
            self._validator,
            server,
            broadcast,
            reached,
            keep_sums=self._keeps_client_sums(),
            bounds=self._make_bounds(),
        )
        read = self._choose_to_evaluate(broadcast.round, reached) if evaluate else []
        most = self._experiment.most_personal_models
        keep = {*read, *reached[:most]} if keep_models else read
        updates = self.engine.train(broadcast, reached, keep=keep)
        for update in in_name_order(updates, self.engine.local_clients(reached)):
            with self._clock.phase("aggregate"):
                collector.add(update)
        with self._clock.phase("exchange"):
            self.engine.merge(collector)
        with self._clock.phase("aggregate"):
            collector.settle()
            collector.drop_misplaced_prototypes()
            self._aggregate(broadcast.round, collector)
            # Merged here: it is the server's work, and not that of whoever asks for it first.
            self._pooling.make(self.state.prototypes, self.state.round)
        if self.private is None:
            self.statistics = collector.pooled_statistics()
        if waiting is not None:
            mean = collector.bytes_up // max(1, len(collector.accepted))
            now = self.state.virtual_seconds + waiting.seconds(collector.uploads, mean)
            self.state = replace(self.state, virtual_seconds=now)
        self.client_sums = collector.client_sums
        self.engine.keep_accepted(collector.accepted, self.broadcast)
        accepted = set(collector.accepted)
        own = [name for name in read if name in accepted]
        predictors = self._evaluate(own, with_confusion=with_confusion) if evaluate else None
        self.confusion = predictors.confusion if predictors else {}
        # The next round's broadcast brings the outcome; of one exchange it is the other half.
        is_half = not self._method.trains and broadcast.round == self._experiment.rounds
        closing = self.broadcast().num_bytes * len(collector.accepted) if is_half else 0
        heard = {*collector.accepted, *collector.rejected}
        listed = (
            predictors.listed(self._method.predictor_on("local_test"), heard)
            if predictors
            else NOT_READ
        )
        record = RoundRecord(
            round=broadcast.round,
            loss=self._mean_loss(collector),
            accuracy=predictors.table() if predictors else None,
            accuracy_per_client=listed.rows,
            accuracy_spread=listed.spread,
            loss_per_client={name: collector.losses[name] for name in sorted(collector.losses)},
            seconds=self._clock.lap(),
            bytes={"up": collector.bytes_up, "down": broadcast.num_bytes_to(chosen) + closing},
            clients=Attendance(
                answered=collector.accepted,
                missing=sorted(absent.union(chosen) - heard),
                rejected=collector.rejected,
            ),
            sent=collector.largest,
            unchanged=not collector.accepted,
            withheld=sorted(collector.withheld),
            processed={name: sorted(who) for name, who in sorted(collector.processed.items())},
            remarks={
                **self._method.remarks(broadcast),
                **merged,
                **collector.remarks(),
                **self.engine.remarks(),
            },
            calibration_error=predictors.calibration_error()
            if predictors and with_confusion
            else None,
            calibration_bins=predictors.calibration_bins()
            if predictors and with_confusion
            else None,
            virtual_seconds=None if self._pace is None else self.state.virtual_seconds,
        )
        return record if self.private is None else self.private.tell(record, len(chosen))

    def broadcast(self) -> Broadcast:
        """Return what the next round will begin with."""
        method, pool = self._method, self._empty_pool
        if isinstance(method, SharesPrototypes) and method.sends_pool:
            pool = method.reference(self.pool)
        return Broadcast(
            self.state.round + 1, self.shared_parameters, self.state.server.extra, pool
        )

    def _thin(self, number: int, names: Sequence[str]) -> dict[str, Tensors]:
        """Return which part of the model each client is sent, where it is not the whole."""
        method, server = self._method, self.state.server
        if not isinstance(method, PartialModel):
            return {}
        found = {name: method.masks(server, name, number) for name in names}
        return {name: units for name, units in found.items() if units}

    def _make_bounds(self) -> RelativeBounds | None:
        """Return what the round before, and the other clients' sizes, allow a client to send."""
        if not self._is_bounded:
            return None
        state = self.state
        return RelativeBounds(
            self._experiment.validation,
            self._population.median_size if self.engine.sizes else None,
            state.median_length,
            state.standings,
        )

    def _keeps_client_sums(self) -> bool:
        """Tell whether each client's sums are kept beside the total."""
        keep = self._experiment.statistics.keep
        is_blind = self.private is not None or self._experiment.secure_aggregation
        if not isinstance(self._method, OneShot) or keep == "pooled" or is_blind:
            return False
        own = self._method.own_statistics(self._validator.sums)
        size = 8 * sum(each.numel() for each in own.values())
        count = len(self.engine.sizes)
        is_little = size * count <= _MOST_KEPT and count <= _MOST_STATISTICS
        return keep == "clients" or is_little

    def _choose(self, round_number: int, absent: Collection[str]) -> list[str]:
        names = self._population.without(absent)
        if self.private is not None and self.private.samples:
            told = self.engine.agree(self.private.choose(round_number, names)).decode()
            return [name for name in told.split("\n") if name]
        count = max(self._experiment.min_clients, round(self._experiment.fraction * len(names)))
        if count >= len(names):
            return list(names)
        draw = numpy_generator(self._experiment.seed, round_number, "sample of clients")
        return sample_names(names, count, draw)

    def _wait_for(self, broadcast: Broadcast, chosen: Sequence[str]) -> WaitingRound | None:
        """Return whom the round waits for on the virtual clock; None: there is none."""
        if self._pace is None:
            return None
        enough, bytes_up = self._experiment.network.enough, self._validator.bytes_up
        return WaitingRound(self._pace, broadcast, chosen, enough=enough, bytes_up=bytes_up)

    def _choose_to_evaluate(self, round_number: int, chosen: list[str]) -> list[str]:
        """Return the clients whose personal models are read."""
        count = self._experiment.evaluate_clients
        if count is None or count >= len(chosen):
            return chosen
        draw = numpy_generator(self._experiment.seed, round_number, "sample to read")
        return sample_names(chosen, count, draw)

    def _aggregate(self, number: int, collector: UpdateCollector) -> None:
        """Move the state on; where nobody was accepted only the round's number moves."""
        rows = collector.prototypes
        if self.private is not None and (rows or self.private.samples):
            self._release(number, collector)
            return
        if not rows:
            self.state = replace(self.state, round=number)
            return
        oldest = number - self._experiment.prototypes.pool_ttl
        kept = {name: entry for name, entry in self.state.prototypes.items() if entry[0] > oldest}
        fresh = {name: (number, each) for name, each in rows.items() if len(each)}
        for name in rows.keys() - fresh.keys():
            kept.pop(name, None)
        server, means = self.state.server, collector.means()
        # Where all have withheld what is averaged there is nothing to fold.
        if means or self._validator.sums or not self._validator.template:
            server = self._method.reduce(server, means, self._tally(collector))
        length = collector.median_length or self.state.median_length
        standings = {**self.state.standings, **collector.standings}
        self.state = replace(
            self.state,
            round=number,
            server=server,
            prototypes={**kept, **fresh},
            median_length=length,
            standings=standings,
        )

    def _tally(self, collector: UpdateCollector) -> Tally:
        return collector.tally(self.engine.sizes, self._population.num_samples)

    def _release(self, number: int, collector: UpdateCollector) -> None:
        """Move the state on by what a privacy budget lets out of the round, and nothing else."""
        assert self.private is not None
        server, tally = self.state.server, self._tally(collector)
        content = self.engine.agree(self.private.release(number, self.shared_parameters, collector))
        released = self.private.open(content, next(iter(server.params.values())))
        rows = released.prototypes or {}
        tally = tally._replace(
            names=[], sizes=[], weights=[], losses=[], prototypes=rows, sums=released.sums
        )
        self.statistics = released.statistics
        prototypes = self.state.prototypes
        if released.prototypes is not None:
            prototypes = {name: (number, each) for name, each in rows.items() if len(each)}
        server = self._method.reduce(server, released.means, tally)
        self.state = replace(self.state, round=number, server=server, prototypes=prototypes)

    def _evaluate(self, read: list[str], *, with_confusion: bool) -> RoundEvaluation | None:
        with self._clock.phase("evaluate"):
            has_pool = shares_prototypes_in(self._method, self.state.round)
            pool = self.pool if has_pool else None
            predictors = self.engine.evaluate(
                self.global_model, pool, read, with_confusion=with_confusion
            )
            told = released_predictors(self._method)
            return predictors if predictors is None or told is PREDICTORS else predictors.only(told)

    def _mean_loss(self, collector: UpdateCollector) -> float | None:
        known = [
            (each, self.engine.sizes[n])
            for n, each in sorted(collector.losses.items())
            if each is not None
        ]
        if not known:
            return collector.mean_loss
        return sum(loss * size for loss, size in known) / sum(size for _, size in known)
