"""Messages between server and clients, as Flower's records: opened or refused, nothing else."""

import json
import math
import tempfile
from abc import abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from fuzz_target import Target
from mutations import WireArrays, change_arrays, change_value, choose, to_text, to_wire

from mpfedcl.data.loading import load_data_and_model
from mpfedcl.engines import InProcessEngine
from mpfedcl.experiment import Experiment
from mpfedcl.methods import PREDICTORS, TESTS, find_method
from mpfedcl.methods.messages import Update
from mpfedcl.network.flower.records import PACKED
from mpfedcl.network.packing import (
    Introduction,
    ReportedEvaluation,
    gather_evaluations,
    pack_broadcast,
    pack_update,
    unpack_broadcast,
    unpack_evaluation,
    unpack_update,
)
from mpfedcl.network.server.registry import agree_on_classes
from mpfedcl.network.transport import Message, MessageError
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.assembly import assemble
from mpfedcl.rounds.collector import UpdateCollector
from mpfedcl.rounds.evaluation import AccuracyTable
from mpfedcl.rounds.loop import RoundLoop
from mpfedcl.rounds.validation import UpdateValidator
from mpfedcl.runs.file_schemas import Partition
from opened_records import from_records

NUM_CLASSES = 3
LONGEST_REASON = 300
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Records:
    """A message as it travels: a text of values, and one file of arrays."""

    text: str
    arrays: WireArrays | None

    @classmethod
    def of(cls, message: Message) -> "Records":
        """Return what an honest program sends."""
        arrays = to_wire(message.arrays) if message.arrays else None
        return cls(json.dumps(message.values), arrays)

    def to_flower(self) -> RecordDict:
        """Return Flower's records."""
        records = RecordDict({"values": ConfigRecord({"json": self.text})})
        packed = {}
        if self.arrays is not None:
            kind, data = self.arrays
            packed = {PACKED: Array("uint8", (len(data),), kind, data)}
        records["arrays"] = ArrayRecord(packed)
        return records

    def to_bytes(self) -> bytes:
        """Return what is kept in the corpus."""
        arrays = self.arrays and [self.arrays.kind, self.arrays.data.hex()]
        return json.dumps({"text": self.text, "arrays": arrays}).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> "Records":
        """Return what `to_bytes` was given."""
        values = json.loads(content)
        arrays = values["arrays"] and WireArrays(
            values["arrays"][0], bytes.fromhex(values["arrays"][1])
        )
        return cls(values["text"], arrays)

    def changed(self, random: Random) -> "Records":
        """Return a message that no honest program sends."""
        values, arrays = json.loads(self.text), self.arrays
        for _ in range(random.choice((1, 1, 1, 2, 4))):
            if arrays is None or random.random() < 0.5:
                values = change_value(random, values)
            else:
                arrays = change_arrays(random, arrays)
        return Records(to_text(random, values), arrays)


class MessageTarget(Target):
    """A message of one kind that is opened, and refused only by a MessageError."""

    refusals = (MessageError,)

    def __init__(self) -> None:
        self._seeds = [Records.of(each) for each in self.honest()]

    @abstractmethod
    def honest(self) -> list[Message]:
        """Return what honest programs send."""

    def make(self, random: Random) -> Any:
        """Return a changed message."""
        return choose(random, self._seeds).changed(random)

    def to_bytes(self, made: Any) -> bytes:
        """Return what is kept in the corpus."""
        content: bytes = made.to_bytes()
        return content

    def from_bytes(self, content: bytes) -> Any:
        """Return what `to_bytes` was given."""
        return Records.from_bytes(content)

    def check(self, made: Any) -> None:
        """Open it; a MessageError is as good as an answer."""
        self.open(from_records(made.to_flower()))

    @abstractmethod
    def open(self, message: Message) -> None:
        """Open a message, and use what is in it."""


DIGITS = tuple("0123456789")


class IntroductionTarget(MessageTarget):
    """What a client says of itself; what is let in can be written down, and harms nobody else."""

    name = "introduction"

    def honest(self) -> list[Message]:
        """Return introductions, one of them without an encoder."""
        return [_introduce("client-1").to_message(), _introduce("client-2", "abc").to_message()]

    def open(self, message: Message) -> None:
        """Let a client in beside two honest ones."""
        member = Introduction.from_message("a", message)
        honest = {name: _introduce(name) for name in ("a", "b")}
        experiment, odd = agree_on_classes(Experiment(), {**honest, "fuzzed": member})
        assert odd.keys() <= {member.name}, "an honest client was shut out"
        assert Experiment.parse_toml(experiment.to_toml(), Path("a")) == experiment
        train = list(member.train) or [0] * len(member.classes)
        counts = {"train": train, "test": member.test}
        written = {"classes": list(member.classes), "clients": {member.name: counts}}
        assert json.loads(json.dumps(written, allow_nan=False)) == written
        Partition.model_validate(written)
        assert (Path("models") / f"{member.name}.safetensors").parent == Path("models")


def _introduce(name: str, encoder: str = "") -> Introduction:
    return Introduction(name, DIGITS, (5,) * 10, 9, 784, encoder, "images", (), own_data=True)


class Situation:
    """A round of a method on a few short vectors, with honest clients' answers."""

    def __init__(self, method: str) -> None:
        random = numpy.random.default_rng(0)
        labels = numpy.arange(60) % NUM_CLASSES
        vectors = random.normal(size=(60, 4)).astype("f4") + labels[:, None]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "a.npz"
            numpy.savez(file, x_train=vectors, y_train=labels, x_test=vectors, y_test=labels)
            self._set_up(
                Experiment(method=method, clients=3, rounds=2).replace(
                    dataset__name="folder", dataset__root=folder, model__hidden=(5,)
                )
            )

    def _set_up(self, experiment: Experiment) -> None:
        experiment = experiment.resolved(find_method(experiment.method).defaults)
        data, model = load_data_and_model(experiment, CPU)
        sizes = (data.num_classes, data.input_size)
        self.assembly = assemble(
            experiment, model, num_classes=sizes[0], input_size=sizes[1], device=CPU
        )
        engine = InProcessEngine(self.assembly, data)
        loop = RoundLoop(self.assembly, engine)
        self.broadcast, self.server = loop.broadcast(), loop.state.server
        clients = data.partition["clients"].items()
        counts = {name: each["train"] for name, each in clients}
        self.guard = UpdateValidator(self.assembly, engine.sizes, counts)
        self.sizes = dict(engine.sizes)
        self.chosen = sorted(self.sizes)
        answers = list(engine.train(self.broadcast, self.chosen, keep=[]))
        self.updates = [each.written_out() for each in answers if isinstance(each, Update)]

    def collector(self) -> UpdateCollector:
        """Return what takes in the round's updates."""
        return UpdateCollector(
            self.assembly.method, self.guard, self.server, self.broadcast, self.chosen
        )


class UpdateTarget(MessageTarget):
    """A client's answer, judged and folded in beside an honest one."""

    name = "update"
    method = "mp-fedcl"

    def __init__(self) -> None:
        self._situation = Situation(self.method)
        self._client = self._situation.updates[0].client
        super().__init__()

    def honest(self) -> list[Message]:
        """Return an honest answer, with what the client has read of the round before."""
        packed = pack_update(self._situation.updates[0])
        table = _half_right()
        late = vars(ReportedEvaluation(table, True, None))
        return [packed, Message({**packed.values, "late": late}, packed.arrays)]

    def open(self, message: Message) -> None:
        """Fold it in, and hold the outcome to finite numbers."""
        situation = self._situation
        update = unpack_update(self._client, message)
        if "late" in message.values:
            unpack_evaluation(message.value("late", dict), NUM_CLASSES)
        collector = situation.collector()
        collector.add(update)
        collector.add(situation.updates[1])
        assert situation.updates[1].client in collector.accepted, "an honest client was rejected"
        for reason in collector.rejected.values():
            assert len(reason) <= LONGEST_REASON
        if self._client in collector.rejected:
            return
        tally = collector.tally(situation.sizes, sum(situation.sizes.values()))
        means = collector.means()
        for value in [*means.values(), *tally.sums.values()]:
            assert bool(value.isfinite().all()), "a mean or a sum is not finite"
        losses = [each for each in collector.losses.values() if each is not None]
        assert math.isfinite(sum(loss * 2**40 for loss in losses))
        reduced = situation.assembly.method.reduce(situation.server, means, tally)
        for value in reduced.params.values():
            assert bool(value.isfinite().all()), "the server's model is not finite"


class SumsTarget(UpdateTarget):
    """The same of a one-shot method, whose clients send sums."""

    name = "sums"
    method = "fedgauss"


def _half_right() -> AccuracyTable:
    return {test: {str(predictor): 50.0 for predictor in PREDICTORS} for test in TESTS}


class ReadingsTarget(MessageTarget):
    """What a client has read: percentages and counts, which go into the records."""

    name = "predictors"

    def honest(self) -> list[Message]:
        """Return predictors with and without counts of confusions."""
        table = _half_right()
        rows = [[3] * 4 for _ in range(3)]
        made = [ReportedEvaluation(table, True, confusion) for confusion in (None, rows)]
        return [Message({"late": vars(each)}) for each in made]

    def open(self, message: Message) -> None:
        """Read it, and join it with others'."""
        predictors = unpack_evaluation(message.value("late", dict), NUM_CLASSES)
        joined = gather_evaluations({"a": predictors})
        assert joined is not None
        record = {"table": joined.table(), "local_test": joined.per_client("global_classifier")}
        json.dumps([record, predictors.confusion], allow_nan=False)


class BroadcastTarget(MessageTarget):
    """What a server sends to a client."""

    name = "broadcast"

    def honest(self) -> list[Message]:
        """Return a broadcast with a pool of prototypes."""
        situation = Situation("mp-fedcl")
        rows = {each.client: each.prototypes for each in situation.updates}
        pool = PrototypePool.gather(rows, num_classes=NUM_CLASSES)
        return [pack_broadcast(replace(situation.broadcast, pool=pool))]

    def open(self, message: Message) -> None:
        """Read it, and look at the pool as a client does."""
        broadcast = unpack_broadcast(message, NUM_CLASSES, None)
        assert broadcast.num_bytes >= 0
        broadcast.pool.padded()
