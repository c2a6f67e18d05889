"""The only round loop: broadcast, train, guard, aggregate, evaluate, record."""

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch

from mpfedcl.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.messages import Broadcast, ClientReadings, Failure
from mpfedcl.methods import Method, Server
from mpfedcl.prototypes import PrototypePool, Prototypes
from mpfedcl.rng import numpy_generator
from mpfedcl.rounds.clock import Clock
from mpfedcl.rounds.engine import Engine
from mpfedcl.rounds.evaluation import AccuracyTable, ConfusionCounts, RoundReadings
from mpfedcl.rounds.guard import Guard
from mpfedcl.rounds.measurement import Diagnostics
from mpfedcl.rounds.update_collector import UpdateCollector, in_name_order
from mpfedcl.tensors import Tensors


@dataclass(frozen=True)
class Attendance:
    """Who took part in a round."""

    answered: list[str]
    missing: list[str]
    rejected: dict[str, str]


@dataclass(frozen=True)
class RoundRecord:
    """What is written down of a round: one line of rounds.jsonl."""

    round: int
    loss: float | None
    accuracy: AccuracyTable | None
    accuracy_per_client: dict[str, float | None] | None
    loss_per_client: dict[str, float]
    """Of the clients that were accepted."""
    seconds: dict[str, float]
    bytes: dict[str, int]
    clients: Attendance
    sent: dict[str, int]
    """The largest upload of one client: parameters, and floats of prototypes."""
    unchanged: bool
    """True where no client was accepted, so that the state stayed as it was."""
    remarks: dict[str, Any]
    """What else the method says of the round."""
    diagnostics: dict[str, Any] | None = None
    """What was measured beside, where the experiment asks for it."""

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain values; without diagnostics where nobody asked."""
        values = asdict(self)
        if self.diagnostics is None:
            del values["diagnostics"]
        return values


@dataclass(frozen=True)
class RoundState:
    """All that the next round depends on."""

    round: int
    server: Server
    prototypes: dict[str, tuple[int, Prototypes]]
    """Each client's latest prototypes and the round they came in."""

    def to(self, device: torch.device) -> Self:
        """Return the state on a device."""
        return type(self)(
            self.round,
            Server(
                {name: value.to(device) for name, value in self.server.params.items()},
                {name: value.to(device) for name, value in self.server.extra.items()},
            ),
            {
                name: (received, rows.to(device))
                for name, (received, rows) in self.prototypes.items()
            },
        )


class RoundLoop:
    """A server and its clients. It knows neither files nor how the clients are run."""

    def __init__(
        self,
        experiment: Experiment,
        method: Method,
        engine: Engine,
        initial: Tensors,
        *,
        dimension: int,
        clock: Clock,
    ) -> None:
        if experiment.min_clients > len(engine.sizes):
            raise InvalidInput(
                f"min_clients is {experiment.min_clients}; it must be at most the number of "
                f"clients, {len(engine.sizes)}."
            )
        self.state = RoundState(0, method.init_server(initial), {})
        self.confusion: dict[str, ConfusionCounts] = {}
        """What the last round counted, by client, if it was asked to."""
        self.previous_readings: RoundReadings | None = None
        """What clients said with their updates of the round before, where they read so late."""
        self.diagnostics: Diagnostics | None = None
        """What judges the measurements, in the process that writes the records."""
        self._experiment = experiment
        self._method = method
        self.engine = engine
        self._clock = clock
        like = next(iter(initial.values()))
        self._empty_pool = PrototypePool.empty(
            method.num_classes,
            dimension,
            method.num_prototypes,
            dtype=like.dtype,
            device=like.device,
        )
        self._guard = Guard.of(method, initial, engine.sizes, dimension=dimension)

    @property
    def shared_parameters(self) -> Tensors:
        """The parameters that travel."""
        params = self.state.server.params
        return {name: value for name, value in params.items() if self._method.shared(name)}

    @property
    def averaged_model(self) -> Tensors | None:
        """The model that clients share, or None where some of it stays at home."""
        params = self.state.server.params
        return params if all(self._method.shared(name) for name in params) else None

    @property
    def pool(self) -> PrototypePool:
        """The prototypes that the next broadcast carries."""
        rows = {name: prototypes for name, (_, prototypes) in self.state.prototypes.items()}
        if not rows:
            return self._empty_pool
        return PrototypePool.gather(
            rows,
            num_classes=self._method.num_classes,
            num_prototypes=self._method.num_prototypes,
        )

    def run_round(
        self, *, evaluate: bool, keep_models: bool = False, with_confusion: bool = False
    ) -> RoundRecord:
        """Run the next round and move the state on.

        `keep_models` for the engine to hand out; `with_confusion` where it evaluates.
        """
        with self._clock.phase("broadcast"):
            absent = set(self.engine.absent_clients())
            broadcast = self._broadcast()
            chosen = self._choose(broadcast.round, absent)
        collector = UpdateCollector(self._guard, broadcast, chosen)
        read = self._choose_to_evaluate(broadcast.round, chosen) if evaluate else []
        keep = chosen if keep_models or self._experiment.diagnostics else read
        updates = self.engine.train(broadcast, chosen, keep=keep)
        for update in in_name_order(updates, self.engine.local_clients(chosen)):
            with self._clock.phase("aggregate"):
                collector.add(update)
        with self._clock.phase("exchange"):
            self.engine.merge(collector)
        with self._clock.phase("aggregate"):
            self._aggregate(broadcast.round, collector)
        # Before clients keep their new states: what they began with is still there.
        diagnostics = self._diagnose(broadcast, collector.accepted)
        with self._clock.phase("aggregate"):
            self.engine.keep_accepted(collector.accepted)
        accepted = set(collector.accepted)
        own = [name for name in read if name in accepted]
        readings = self._evaluate(own, with_confusion=with_confusion) if evaluate else None
        self.confusion = readings.confusion if readings else {}
        self.previous_readings = (
            RoundReadings.gather(collector.readings) if collector.readings else None
        )
        heard = {*collector.accepted, *collector.rejected}
        return RoundRecord(
            round=broadcast.round,
            loss=self._mean_loss(collector.losses),
            accuracy=readings.table() if readings else None,
            accuracy_per_client=readings.per_client(self._method.reading) if readings else None,
            loss_per_client={name: collector.losses[name] for name in sorted(collector.losses)},
            seconds=self._clock.lap(),
            bytes={"up": collector.bytes_up, "down": broadcast.num_bytes * len(chosen)},
            clients=Attendance(
                collector.accepted, sorted(absent.union(chosen) - heard), collector.rejected
            ),
            sent=collector.largest,
            unchanged=not collector.accepted,
            remarks={**self._method.remarks(broadcast), **self.engine.remarks()},
            diagnostics=diagnostics,
        )

    def read_last_round(self) -> tuple[RoundReadings | None, dict[str, Any]]:
        """Return what is read of the last round only now that it is over, and who said nothing."""
        late: dict[str, ClientReadings] = {}
        rejected: dict[str, str] = {}
        for name, said in sorted(self.engine.read_last_round(self._broadcast()).items()):
            if isinstance(said, Failure):
                rejected[name] = said.reason
            elif reason := self._guard.judge_readings(said):
                rejected[name] = reason
            else:
                late[name] = said
        remarks = {**self.engine.remarks(), **({"rejected": rejected} if rejected else {})}
        return RoundReadings.gather(late) if late else None, remarks

    def restore(self, state: RoundState, record: dict[str, Any]) -> None:
        """Go on from the state after a round, and from that round's record."""
        self.state = state
        if self.diagnostics is not None:
            self.diagnostics.restore(record)

    def _broadcast(self) -> Broadcast:
        pool = self._method.reference(self.pool)
        return Broadcast(
            self.state.round + 1, self.shared_parameters, self.state.server.extra, pool
        )

    def _choose(self, round_number: int, absent: Collection[str]) -> list[str]:
        names = sorted(name for name in self.engine.sizes if name not in absent)
        count = max(self._experiment.min_clients, round(self._experiment.fraction * len(names)))
        if count >= len(names):
            return names
        draw = numpy_generator(self._experiment.seed, round_number, "sample of clients")
        return sorted(str(name) for name in draw.choice(names, count, replace=False))

    def _choose_to_evaluate(self, round_number: int, chosen: list[str]) -> list[str]:
        """Return the clients whose personal models are read."""
        count = self._experiment.evaluate_clients
        if count is None or count >= len(chosen):
            return chosen
        draw = numpy_generator(self._experiment.seed, round_number, "sample to read")
        return sorted(str(name) for name in draw.choice(chosen, count, replace=False))

    def _aggregate(self, number: int, collector: UpdateCollector) -> None:
        """Move the state on; where nobody was accepted only the round's number moves."""
        rows = collector.prototypes
        if not rows:
            self.state = RoundState(number, self.state.server, self.state.prototypes)
            return
        oldest = number - self._experiment.prototypes.pool_ttl
        kept = {name: entry for name, entry in self.state.prototypes.items() if entry[0] > oldest}
        fresh = {name: (number, each) for name, each in rows.items() if len(each)}
        for name in rows.keys() - fresh.keys():
            kept.pop(name, None)
        server = self._method.reduce(self.state.server, collector.mean.means())
        self.state = RoundState(number, server, {**kept, **fresh})

    def _evaluate(self, read: list[str], *, with_confusion: bool) -> RoundReadings | None:
        with self._clock.phase("evaluate"):
            pool = self.pool if self._method.shares_prototypes else None
            return self.engine.evaluate(
                self.averaged_model, pool, read, with_confusion=with_confusion
            )

    def _diagnose(self, broadcast: Broadcast, accepted: list[str]) -> dict[str, Any] | None:
        if not self._experiment.diagnostics:
            return None
        with self._clock.phase("diagnose"):
            inspection = self.engine.inspect(broadcast, self._broadcast(), accepted)
            if self.diagnostics is None:
                return None
            factor = self._method.pool_factor(broadcast)
            return self.diagnostics.judge(broadcast.round, inspection, factor)

    def _mean_loss(self, losses: dict[str, float]) -> float | None:
        sizes = {name: self.engine.sizes[name] for name in sorted(losses)}
        if not sizes:
            return None
        return sum(losses[name] * size for name, size in sizes.items()) / sum(sizes.values())
