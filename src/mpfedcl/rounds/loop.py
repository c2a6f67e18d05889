"""The round loop: broadcast, train, validate, aggregate, evaluate, record."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.rng import numpy_generator
from mpfedcl.core.tensors import Tensors
from mpfedcl.methods import (
    PREDICTORS,
    Asynchronous,
    OneShot,
    PartialModel,
    Server,
    SharesPrototypes,
    Tally,
    prototype_rule,
    shares_prototypes_in,
)
from mpfedcl.methods.messages import Broadcast
from mpfedcl.privacy.private_rounds import PrivateRounds, released_predictors
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.aggregation import find_aggregator
from mpfedcl.rounds.assembly import Assembly, split_buffers
from mpfedcl.rounds.collector import UpdateCollector, in_name_order
from mpfedcl.rounds.engine import ArrivalEngine, Engine, RemoteArrivalEngine
from mpfedcl.rounds.evaluation import RoundEvaluation
from mpfedcl.rounds.metrics import ConfusionCounts
from mpfedcl.rounds.prototype_pool import PrototypePooling
from mpfedcl.rounds.record import ArrivalRecord, Attendance, RoundRecord
from mpfedcl.rounds.reputation import RelativeBounds
from mpfedcl.rounds.secure_aggregation import MaskingCollector, TotalCollector
from mpfedcl.rounds.state import RoundState
from mpfedcl.rounds.systems import SystemModel, WaitingRound, check_clock
from mpfedcl.rounds.validation import UpdateValidator

_MOST_KEPT, _MOST_STATISTICS = 10**9, 10_000
"""Bytes and files of clients' statistics that are kept on disk if `statistics.keep` is auto."""


class Population:
    """The names and sizes of the clients; a round does not iterate over all of them.

    They are counted once if `is_fixed`: clients then never join or leave.
    """

    def __init__(self, sizes: Mapping[str, int], *, is_fixed: bool) -> None:
        self.sizes = sizes
        self._is_fixed = is_fixed
        self._count()

    def begin_round(self) -> None:
        """Take in clients that joined since the round before."""
        if not self._is_fixed:
            self._count()

    def _count(self) -> None:
        self._names = sorted(self.sizes)
        self.num_samples = sum(self.sizes.values())
        """Training samples of all clients."""

    def without(self, absent: Collection[str]) -> Sequence[str]:
        """Return the clients that are not absent, in name order."""
        return [name for name in self._names if name not in absent] if absent else self._names


def sample_names(names: Sequence[str], count: int, draw: numpy.random.Generator) -> list[str]:
    """Sample `count` names without replacement; return them in order.

    The same names as `draw.choice(names, count, replace=False)`, without its copy of all names.
    """
    places = draw.choice(len(names), count, replace=False)
    return sorted(names[place] for place in places.tolist())


@dataclass
class RoundCounts:
    """The outcome of a round's collectors: one of a round, several with asynchronous methods."""

    chosen: Collection[str] = ()
    """The clients that were sent the model in this round."""
    evaluated: Sequence[str] = ()
    """The clients whose personal models can be evaluated."""
    answers: list[tuple[str, int]] = field(default_factory=list)
    """Accepted clients and their staleness, in order of arrival."""
    loss_by_client: dict[str, float | None] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    rejected: dict[str, str] = field(default_factory=dict)
    withheld: set[str] = field(default_factory=set)
    left_out: set[str] = field(default_factory=set)
    """Accepted clients whose update has no weight."""
    processed: dict[str, set[str]] = field(default_factory=dict)
    largest: dict[str, int] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0
    remarks: dict[str, Any] = field(default_factory=dict)
    arrivals: ArrivalRecord | None = None
    elapsed_seconds: float | None = None
    _losses: list[tuple[float, int]] = field(default_factory=list)
    """With the client's number of samples."""
    _mean_loss: float | None = None

    @property
    def accepted(self) -> list[str]:
        """The clients whose updates count, in order of name."""
        return sorted({name for name, _ in self.answers})

    def add(self, collector: UpdateCollector, sizes: Mapping[str, int], staleness: int = 0) -> None:
        """Add the outcome of a collector."""
        self.answers += [(name, staleness) for name in collector.accepted]
        for name, loss in sorted(collector.losses.items()):
            self.loss_by_client[name] = loss
            if loss is not None:
                self._losses.append((loss, sizes[name]))
        self._mean_loss = collector.mean_loss
        self.rejected |= collector.rejected
        self.withheld |= set(collector.withheld)
        weightless = {name for name in collector.accepted if not collector.weights[name]}
        self.left_out |= weightless - set(collector.withheld)
        for mark, names in collector.processed.items():
            self.processed.setdefault(mark, set()).update(names)
        for name, size in collector.largest.items():
            self.largest[name] = max(size, self.largest.get(name, 0))
        self.bytes_up += collector.bytes_up

    def mean_loss(self) -> float | None:
        """Return the mean training loss, weighted by samples."""
        if not self._losses:
            return self._mean_loss
        return sum(loss * size for loss, size in self._losses) / sum(s for _, s in self._losses)


class RoundLoop:
    """A server and its clients; independent of files and of where clients run.

    With a `systems` model it has a virtual clock: a round takes as long as the slowest of its
    clients, or of the first `network.enough` of them.
    """

    def __init__(
        self, assembly: Assembly, engine: Engine, systems: SystemModel | None = None
    ) -> None:
        self._assembly = assembly
        self._experiment, self._method = assembly.experiment, assembly.method
        if self._experiment.min_clients > len(engine.sizes):
            raise InvalidInput(
                f"min_clients is {self._experiment.min_clients}; it must be at most the number of "
                f"clients, {len(engine.sizes)}."
            )
        params, buffers = split_buffers(assembly.initial, assembly.model)
        server = self._method.init_server(params)
        if buffers:
            server = replace(server, params=server.params | buffers)
        self.state = RoundState(0, server, {})
        self.confusion: dict[str, ConfusionCounts] = {}
        """Confusions of the last round by client, if it was asked for them."""
        self.statistics: Tensors = {}
        """The pooled statistics of the last round, if a method keeps only the total."""
        self.client_sums: dict[str, Tensors] | None = None
        """The statistics of each client, if they are kept."""
        self.engine = engine
        # Only remote clients join and leave.
        self._population = Population(engine.sizes, is_fixed=engine.members.are_trusted)
        self._clock = assembly.clock
        self._systems = systems
        like = next(iter(assembly.initial.values()))
        self._empty_pool = PrototypePool.empty(
            self._method.num_classes,
            assembly.model.embedding_size,
            prototype_rule(self._method).num_prototypes,
            dtype=like.dtype,
            device=like.device,
        )
        self._pooling = PrototypePooling(self._method, self._empty_pool)
        self._validator = UpdateValidator(assembly, engine.sizes, engine.members.label_counts)
        has_budget, size = self._experiment.privacy.has_budget, assembly.model.embedding_size
        self.private = PrivateRounds(self._method, len(engine.sizes), size) if has_budget else None
        """The releases under a privacy budget."""
        if engine.members.are_trusted and self._validator.template:
            rule = find_aggregator(self._experiment.aggregation.rule)
            rule.check(self._experiment, len(self._choose(1, ())))
        self._is_bounded = self._resolve_bounds()

    def _resolve_bounds(self) -> bool:
        """Return whether updates are bounded by those of the other clients."""
        asked = self._experiment.validation.bounds
        if self.private is None and not self._experiment.secure_aggregation:
            return asked == "on" or (asked == "auto" and not self.engine.members.are_trusted)
        # Noise does not cover a comparison of single clients, and masks prevent it.
        if asked == "on":
            raise InvalidInput(
                "validation.bounds is 'on'; with a privacy budget or secure_aggregation it must be "
                "auto or off: bounds compare single clients."
            )
        return False

    @property
    def shared_parameters(self) -> Tensors:
        """The parameters that are sent to clients."""
        params = self.state.server.params
        return {name: value for name, value in params.items() if self._method.shared(name)}

    @property
    def global_model(self) -> Tensors | None:
        """The global model, or None if some parameters stay at the clients."""
        params = self.state.server.params
        return params if all(self._method.shared(name) for name in params) else None

    @property
    def pool(self) -> PrototypePool:
        """The prototypes that the next broadcast carries."""
        return self._pooling.make(self.state.prototypes, self.state.round)

    def accepts(self, state: RoundState) -> bool:
        """Return whether a restored state belongs to this kind of loop and these clients."""
        return state.arrivals is None

    def run_round(
        self, *, evaluate: bool, keep_models: bool = False, with_confusion: bool = False
    ) -> RoundRecord:
        """Run the next round and move the state on.

        `keep_models`: keep personal models for the engine to return; `with_confusion`: also count
        confusions and calibration bins in the evaluation.
        """
        counts = self._collect_round(evaluate=evaluate, keep_models=keep_models)
        evaluation = None
        if evaluate:
            evaluation = self._evaluate(counts.evaluated, with_confusion=with_confusion)
        self.confusion = evaluation.confusion if evaluation else {}
        return self._make_record(counts, evaluation, is_last=with_confusion)

    def _collect_round(self, *, evaluate: bool, keep_models: bool) -> RoundCounts:
        """Train a sample of the clients and aggregate their updates."""
        with self._clock.phase("broadcast"):
            absent = set(self.engine.absent_clients())
            self._population.begin_round()
            broadcast = self.broadcast()
            chosen = self._choose(broadcast.round, absent)
            broadcast = replace(broadcast, units=self._thin(broadcast.round, chosen))
            waiting = self._wait_for(broadcast, chosen)
            reached = chosen if waiting is None else waiting.in_time
        evaluated = self._choose_to_evaluate(broadcast.round, reached) if evaluate else []
        most = self._experiment.most_personal_models
        keep = {*evaluated, *reached[:most]} if keep_models else evaluated
        collector = self._train(broadcast, reached, keep)
        with self._clock.phase("aggregate"):
            collector.settle()
            collector.drop_misplaced_prototypes()
            self._aggregate(broadcast.round, collector)
            # Merged here, so that its time counts as aggregation.
            self._pooling.make(self.state.prototypes, self.state.round)
        if self.private is None:
            self.statistics = collector.pooled_statistics()
        self.client_sums = collector.client_sums
        if waiting is not None:
            mean = collector.bytes_up // max(1, len(collector.accepted))
            now = self.state.virtual_seconds + waiting.seconds(collector.uploads, mean)
            self.state = replace(self.state, virtual_seconds=now)
        accepted = collector.accepted
        self.engine.keep(accepted, self.broadcast)
        counts = RoundCounts(chosen, missing=absent.union(chosen))
        counts.add(collector, self.engine.sizes)
        known = set(accepted)
        counts.evaluated = [name for name in evaluated if name in known]
        counts.bytes_down = broadcast.num_bytes_to(chosen)
        if not self._method.trains and broadcast.round == self._experiment.rounds:
            # A one-shot method's result is sent back, without another round.
            counts.bytes_down += self.broadcast().num_bytes * len(accepted)
        counts.remarks = {**self._method.remarks(broadcast), **collector.remarks()}
        return counts

    def _train(
        self, broadcast: Broadcast, names: Sequence[str], keep: Collection[str]
    ) -> UpdateCollector:
        """Train clients and collect their updates, in the order of their names."""
        collector = self._make_collector(broadcast, names)
        updates = self.engine.train(broadcast, names, keep=keep)
        for update in in_name_order(updates, self.engine.members.here(names)):
            with self._clock.phase("aggregate"):
                collector.add(update)
        if self.engine.peers is not None:
            with self._clock.phase("exchange"):
                collector.merge(self.engine.peers)
        return collector

    def _make_record(
        self, counts: RoundCounts, evaluation: RoundEvaluation | None, *, is_last: bool
    ) -> RoundRecord:
        heard = {*counts.accepted, *counts.rejected}
        measured: dict[str, Any] = {"accuracy": None, "accuracy_per_client": None}
        if evaluation is not None:
            primary = self._method.predictor_on("local_test")
            measured = evaluation.to_record(
                primary, heard, self._experiment.metric, is_last=is_last
            )
        record = RoundRecord(
            round=self.state.round,
            loss=counts.mean_loss(),
            loss_per_client=dict(sorted(counts.loss_by_client.items())),
            seconds=self._clock.lap(),
            bytes={"up": counts.bytes_up, "down": counts.bytes_down},
            clients=Attendance(
                answered=counts.accepted,
                missing=sorted(counts.missing - heard),
                rejected=counts.rejected,
            ),
            sent=counts.largest,
            unchanged=not counts.answers,
            withheld=sorted(counts.withheld),
            processed={mark: sorted(names) for mark, names in sorted(counts.processed.items())},
            remarks={**counts.remarks, **self.engine.remarks()},
            virtual_seconds=None if self._systems is None else self.state.virtual_seconds,
            elapsed_seconds=counts.elapsed_seconds,
            arrivals=counts.arrivals,
            **measured,
        )
        return record if self.private is None else self.private.redact(record, len(counts.chosen))

    def _make_collector(self, broadcast: Broadcast, reached: Sequence[str]) -> UpdateCollector:
        arguments = self._method, self._validator, self.state.server, broadcast, reached
        if not self._experiment.secure_aggregation:
            keep_sums, bounds = self._keeps_client_sums(), self._make_bounds()
            return UpdateCollector(*arguments, keep_sums=keep_sums, bounds=bounds)
        if self.engine.members.are_trusted:
            return MaskingCollector(*arguments, assembly=self._assembly)
        # Remote clients mask their updates themselves.
        return TotalCollector(*arguments)

    def broadcast(self) -> Broadcast:
        """Return the message that the next round begins with."""
        method, pool = self._method, self._empty_pool
        if isinstance(method, SharesPrototypes) and method.sends_pool:
            pool = method.reference(self.pool)
        return Broadcast(
            self.state.round + 1, self.shared_parameters, self.state.server.extra, pool
        )

    def _thin(self, number: int, names: Sequence[str]) -> dict[str, Tensors]:
        """Return the part of the model that each client is sent, if it is not the whole."""
        method, server = self._method, self.state.server
        if not isinstance(method, PartialModel):
            return {}
        found = {name: method.masks(server, name, number) for name in names}
        return {name: units for name, units in found.items() if units}

    def _make_bounds(self) -> RelativeBounds | None:
        """Return the bounds set by the round before and by the other clients' sizes."""
        if not self._is_bounded:
            return None
        settings, sizes = self._experiment.validation, self._population.sizes.values()
        return RelativeBounds(settings, [*sizes], self.state.median_norm, self.state.reputations)

    def _wait_for(self, broadcast: Broadcast, chosen: Sequence[str]) -> WaitingRound | None:
        """Return when the clients answer on the virtual clock, if there is one."""
        if self._systems is None:
            return None
        enough, bytes_up = self._experiment.network.enough, self._validator.bytes_up
        return WaitingRound(self._systems, broadcast, chosen, enough=enough, bytes_up=bytes_up)

    def _keeps_client_sums(self) -> bool:
        """Return whether each client's statistics are kept next to the total."""
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
            sampled = self._agree(self.private.choose(round_number, names)).decode()
            return [name for name in sampled.split("\n") if name]
        return self._sample(names, self._share_of(len(names)), round_number, "sample of clients")

    def _share_of(self, size: int) -> int:
        """Return how many of so many clients a round has."""
        return max(self._experiment.min_clients, round(self._experiment.fraction * size))

    def _sample(self, names: Sequence[str], count: int, *key: str | int) -> list[str]:
        if count >= len(names):
            return list(names)
        return sample_names(names, count, numpy_generator(self._experiment.seed, *key))

    def _agree(self, content: bytes) -> bytes:
        """Return the content of the leading process in every process."""
        peers = self.engine.peers
        return content if peers is None else peers.broadcast(content)

    def _choose_to_evaluate(self, round_number: int, chosen: Sequence[str]) -> list[str]:
        """Return the clients whose personal models are evaluated."""
        count = self._experiment.evaluate_clients
        most = len(chosen) if count is None else count
        return self._sample(chosen, most, round_number, "sample to read")

    def _aggregate(self, number: int, collector: UpdateCollector) -> None:
        """Move the state on; if no client was accepted, only the number of the round changes."""
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
        # Nothing to reduce if all clients have withheld their updates.
        if means or self._validator.sums or not self._validator.template:
            server = self._reduce(server, means, self._tally(collector))
        bounded = collector.aggregation
        self.state = replace(
            self.state,
            round=number,
            server=server,
            prototypes={**kept, **fresh},
            median_norm=bounded.median_norm or self.state.median_norm,
            reputations={**self.state.reputations, **bounded.reputations},
        )

    def _reduce(self, server: Server, means: Tensors, tally: Tally) -> Server:
        """Return the method's next server state; running statistics are averaged."""
        model = self._assembly.model
        params, buffers = split_buffers(server.params, model)
        means, averaged = split_buffers(means, model)
        reduced = self._method.reduce(replace(server, params=params), means, tally)
        return replace(reduced, params={**reduced.params, **buffers, **averaged})

    def _tally(self, collector: UpdateCollector) -> Tally:
        return collector.tally(self.engine.sizes, self._population.num_samples)

    def _release(self, number: int, collector: UpdateCollector) -> None:
        """Move the state on by the noisy release of the round only."""
        assert self.private is not None
        server, tally = self.state.server, self._tally(collector)
        content = self._agree(self.private.release(number, self.shared_parameters, collector))
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

    def _evaluate(self, names: Sequence[str], *, with_confusion: bool) -> RoundEvaluation | None:
        with self._clock.phase("evaluate"):
            has_pool = shares_prototypes_in(self._method, self.state.round)
            pool = self.pool if has_pool else None
            evaluation = self.engine.evaluate(
                self.global_model, pool, names, with_confusion=with_confusion
            )
            released = released_predictors(self._method)
            if evaluation is None or released is PREDICTORS:
                return evaluation
            return evaluation.only(released)


def make_loop(assembly: Assembly, engine: Engine, systems: SystemModel | None = None) -> RoundLoop:
    """Return the round loop, or that of an asynchronous method on a virtual or a wall clock."""
    if not isinstance(assembly.method, Asynchronous):
        return RoundLoop(assembly, engine, systems)
    # Imported late, because these loops are round loops.
    from mpfedcl.rounds.arrivals import VirtualArrivals, WallArrivals

    if systems is not None and isinstance(engine, ArrivalEngine):
        return VirtualArrivals(assembly, engine, systems)
    if engine.members.are_trusted:
        # Without a clock, clients of this process would all be equally fast.
        check_clock(type(assembly.method), assembly.experiment)
    if not isinstance(engine, RemoteArrivalEngine):
        raise InvalidInput(
            f"method is {assembly.experiment.method!r}, which is asynchronous; it must be a method "
            "with rounds, because these clients are only trained together."
        )
    return WallArrivals(assembly, engine)
