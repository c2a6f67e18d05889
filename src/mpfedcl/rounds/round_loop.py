"""The only round loop: broadcast, train, guard, aggregate, evaluate, record."""

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch

from mpfedcl.convergence import Diagnosis
from mpfedcl.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.messages import Broadcast, Failure, LateReading
from mpfedcl.methods import Method, Server
from mpfedcl.models import Tensors
from mpfedcl.prototypes import PrototypePool, Prototypes
from mpfedcl.rng import numpy_generator
from mpfedcl.rounds.clock import Clock
from mpfedcl.rounds.engine import Engine
from mpfedcl.rounds.evaluation import Counts, Readings, Table
from mpfedcl.rounds.guard import Guard
from mpfedcl.rounds.update_collector import Intake, in_name_order


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
    accuracy: Table | None
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
class FederationState:
    """All that the next round depends on."""

    round: int
    server: Server
    rows: dict[str, tuple[int, Prototypes]]
    """Each client's latest prototypes and the round they came in."""

    def to(self, device: torch.device) -> Self:
        """Return the state on a device."""
        return type(self)(
            self.round,
            Server(
                {name: value.to(device) for name, value in self.server.params.items()},
                {name: value.to(device) for name, value in self.server.extra.items()},
            ),
            {name: (received, rows.to(device)) for name, (received, rows) in self.rows.items()},
        )


class Federation:
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
        self.state = FederationState(0, method.init_server(initial), {})
        self.confusion: dict[str, Counts] = {}
        """What the last round counted, by client, if it was asked to."""
        self.late: Readings | None = None
        """What clients said with their updates of the round before, where they read so late."""
        self._experiment = experiment
        self._method = method
        self._engine = engine
        self._clock = clock
        self._diagnosis = Diagnosis(experiment) if experiment.diagnostics else None
        like = next(iter(initial.values()))
        self._nothing = PrototypePool.empty(
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
        rows = {name: prototypes for name, (_, prototypes) in self.state.rows.items()}
        if not rows:
            return self._nothing
        return PrototypePool.gather(
            rows,
            num_classes=self._method.num_classes,
            num_prototypes=self._method.num_prototypes,
        )

    def run_round(
        self, *, evaluate: bool, keep_models: bool = False, confuse: bool = False
    ) -> RoundRecord:
        """Run the next round and move the state on.

        `keep_models` for the engine to hand out; `confuse` to count confusions where it evaluates.
        """
        with self._clock.phase("broadcast"):
            away = set(self._engine.muster())
            broadcast = self._broadcast()
            chosen = self._choose(broadcast.round, away)
        intake = Intake(self._guard, broadcast, chosen)
        read = self._choose_to_read(broadcast.round, chosen) if evaluate else []
        keep = chosen if keep_models or self._diagnosis else read
        updates = self._engine.train(broadcast, chosen, keep=keep)
        for update in in_name_order(updates, self._engine.here(chosen)):
            with self._clock.phase("aggregate"):
                intake.take(update)
        with self._clock.phase("exchange"):
            self._engine.unite(intake)
        with self._clock.phase("aggregate"):
            self._fold(broadcast.round, intake)
        # Before clients settle: what they set out with is still there.
        diagnostics = self._diagnose(broadcast, intake.accepted)
        with self._clock.phase("aggregate"):
            self._engine.settle(intake.accepted)
        accepted = set(intake.accepted)
        own = [name for name in read if name in accepted]
        readings = self._evaluate(own, confuse=confuse) if evaluate else None
        self.confusion = readings.confusion if readings else {}
        self.late = Readings.gather(intake.late) if intake.late else None
        heard = {*intake.accepted, *intake.rejected}
        return RoundRecord(
            round=broadcast.round,
            loss=self._mean_loss(intake.losses),
            accuracy=readings.table() if readings else None,
            accuracy_per_client=readings.per_client(self._method.reading) if readings else None,
            loss_per_client={name: intake.losses[name] for name in sorted(intake.losses)},
            seconds=self._clock.lap(),
            bytes={"up": intake.bytes_up, "down": broadcast.num_bytes * len(chosen)},
            clients=Attendance(
                intake.accepted, sorted(away.union(chosen) - heard), intake.rejected
            ),
            sent=intake.largest,
            unchanged=not intake.accepted,
            remarks={**self._method.remarks(broadcast), **self._engine.remarks()},
            diagnostics=diagnostics,
        )

    def close(self) -> tuple[Readings | None, dict[str, Any]]:
        """Return what is read of the last round only now that it is over, and who said nothing."""
        late: dict[str, LateReading] = {}
        rejected: dict[str, str] = {}
        for name, said in sorted(self._engine.close(self._broadcast()).items()):
            if isinstance(said, Failure):
                rejected[name] = said.reason
            elif reason := self._guard.judge_reading(said):
                rejected[name] = reason
            else:
                late[name] = said
        remarks = {**self._engine.remarks(), **({"rejected": rejected} if rejected else {})}
        return Readings.gather(late) if late else None, remarks

    def take_up(self, state: FederationState, record: dict[str, Any]) -> None:
        """Go on from the state after a round, and from that round's record."""
        self.state = state
        if self._diagnosis is not None:
            self._diagnosis.take_up(record)

    def _broadcast(self) -> Broadcast:
        pool = self._method.reference(self.pool)
        return Broadcast(
            self.state.round + 1, self.shared_parameters, self.state.server.extra, pool
        )

    def _choose(self, round_number: int, away: Collection[str]) -> list[str]:
        names = sorted(name for name in self._engine.sizes if name not in away)
        count = max(self._experiment.min_clients, round(self._experiment.fraction * len(names)))
        if count >= len(names):
            return names
        draw = numpy_generator(self._experiment.seed, round_number, "sample of clients")
        return sorted(str(name) for name in draw.choice(names, count, replace=False))

    def _choose_to_read(self, round_number: int, chosen: list[str]) -> list[str]:
        """Return the clients whose personal models are read."""
        count = self._experiment.evaluate_clients
        if count is None or count >= len(chosen):
            return chosen
        draw = numpy_generator(self._experiment.seed, round_number, "sample to read")
        return sorted(str(name) for name in draw.choice(chosen, count, replace=False))

    def _fold(self, number: int, intake: Intake) -> None:
        """Move the state on; where nobody was accepted only the round's number moves."""
        rows = intake.rows
        if not rows:
            self.state = FederationState(number, self.state.server, self.state.rows)
            return
        oldest = number - self._experiment.prototypes.pool_ttl
        kept = {name: entry for name, entry in self.state.rows.items() if entry[0] > oldest}
        fresh = {name: (number, each) for name, each in rows.items() if len(each)}
        for name in rows.keys() - fresh.keys():
            kept.pop(name, None)
        server = self._method.reduce(self.state.server, intake.mean.means())
        self.state = FederationState(number, server, {**kept, **fresh})

    def _evaluate(self, read: list[str], *, confuse: bool) -> Readings | None:
        with self._clock.phase("evaluate"):
            pool = self.pool if self._method.shares_prototypes else None
            return self._engine.evaluate(self.averaged_model, pool, read, confuse=confuse)

    def _diagnose(self, broadcast: Broadcast, accepted: list[str]) -> dict[str, Any] | None:
        if self._diagnosis is None:
            return None
        with self._clock.phase("diagnose"):
            inspection = self._engine.inspect(broadcast, self._broadcast(), accepted)
            factor = self._method.pool_factor(broadcast)
            return self._diagnosis.judge(broadcast.round, inspection, factor)

    def _mean_loss(self, losses: dict[str, float]) -> float | None:
        sizes = {name: self._engine.sizes[name] for name in sorted(losses)}
        if not sizes:
            return None
        return sum(losses[name] * size for name, size in sizes.items()) / sum(sizes.values())
