"""A receipt: every field that would leave a client, by its own program, on its own data.

The client answers a server that is not there: the messages are made as they would be sent, looked
at, and thrown away with the folder that the client wrote its state to.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.methods import Asynchronous, Method, SharesPrototypes, find_method, prototype_rule
from mpfedcl.methods.messages import Broadcast
from mpfedcl.network.client.client import ClientSettings, NetworkClient
from mpfedcl.network.message import FORMAT, Kind, Message, MessageError
from mpfedcl.network.packing import Introduction, pack_broadcast, pack_experiment
from mpfedcl.network.secure_rehearsal import rehearse_secure_sum
from mpfedcl.privacy.accounting import spent_epsilon
from mpfedcl.privacy.gaussian_mechanism import gaussian_multiplier
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.assembly import assemble
from mpfedcl.rounds.budget_check import check_budget
from mpfedcl.rounds.noise_shares import fix_noise

Counts = NDArray[numpy.int64]
"""Samples by class."""
_OF_ALL = ("averaged/", "summed/within", "summed/moment", "summed/scatter")
"""Fields whose every number is made of all samples that are sent."""


@dataclass(frozen=True)
class Field:
    """One field of a message up."""

    message: str
    """hello, secure, round or close."""
    name: str
    numbers: int
    num_bytes: int
    least: int | None
    """The smallest number of samples behind any of its numbers; None: it tells of no samples."""
    is_noisy: bool


@dataclass(frozen=True)
class Receipt:
    """All that would leave, of one client in its first round and when the run is closed."""

    fields: list[Field]
    method: str
    train: int
    """The client's training samples."""
    epsilon: float | None
    delta: float
    unit: str
    model: str
    """Who adds the noise: the server, this client (nobody), or all clients to their sum (sum)."""

    @property
    def least(self) -> int | None:
        """The smallest number of samples behind any bare number that leaves."""
        counts = [e.least for e in self.fields if e.least is not None and not e.is_noisy]
        return min(counts, default=None)

    def below(self, threshold: int) -> list[Field]:
        """Return the bare fields with a number that stands for fewer samples."""
        return [
            each
            for each in self.fields
            if each.least is not None and each.least < threshold and not each.is_noisy
        ]


def make_receipt(experiment: Experiment, settings: ClientSettings) -> Receipt:
    """Let a client answer once to all that a server asks; return what it would have sent.

    Args:
        experiment: As the server has it.
        settings: The client's own; its folder for what it keeps is not touched.
    """
    method_class = find_method(experiment.method)
    with tempfile.TemporaryDirectory(prefix="mpfedcl-receipt-") as folder:
        client = NetworkClient(replace(settings, state=Path(folder)))
        hello = client.answer("hello", _request(experiment))
        introduction = _read_introduction(hello)
        if not experiment.dataset.classes:
            # As the server does; here this client is alone.
            experiment = experiment.replace(dataset__classes=introduction.classes)
            hello = client.answer("hello", _request(experiment))
        experiment = fix_noise(experiment.resolved(method_class.defaults))
        assert client.loaded is not None
        own, data, model = client.loaded
        assembly = assemble(own, model, num_classes=data.num_classes, input_size=data.input_size)
        check_budget(assembly.method)
        broadcast = _first_broadcast(assembly.method, assembly.initial, assembly.model)
        answers: dict[Kind, Message] = {"hello": hello}
        begun = _request(experiment, broadcast)
        if experiment.secure_aggregation:
            answers |= rehearse_secure_sum(client.answer, settings.name, experiment, begun)
        else:
            answers["round"] = client.answer("round", begun)
        closing = replace(broadcast, round=broadcast.round + 1)
        answers["close"] = client.answer(
            "close", _request(experiment, closing, settled=broadcast.round)
        )
    counts = data.label_counts()[0]
    kept = numpy.where(counts >= settings.min_cluster_size, counts, 0)
    test = len(data.test_labels)
    fields = [
        field
        for kind, message in answers.items()
        for field in _fields(kind, message, kept, test, own)
    ]
    privacy = own.privacy
    return Receipt(
        fields,
        own.method,
        int(counts.sum()),
        privacy.epsilon if privacy.epsilon is None else _promised(privacy.epsilon, privacy.delta),
        privacy.delta,
        privacy.unit_for(trains=assembly.method.trains),
        "sum" if own.secure_aggregation else privacy.model,
    )


def _read_introduction(hello: Message) -> Introduction:
    try:
        return Introduction.from_message(hello)
    except MessageError as error:
        raise InvalidInput(
            f"data must be such that a server lets the client take part: {error}."
        ) from None


def _promised(epsilon: float, delta: float) -> float:
    """Return what the accountant says of the noise that a budget asks for."""
    return min(epsilon, spent_epsilon({gaussian_multiplier(epsilon, delta): 1}, delta))


def _request(
    experiment: Experiment, broadcast: Broadcast | None = None, *, settled: int = 0
) -> Message:
    values: dict[str, Any] = {"format": FORMAT, "experiment": pack_experiment(experiment)}
    if broadcast is None:
        return Message(values)
    packed = pack_broadcast(broadcast)
    asked = {"run": "0" * 32, "read": settled > 0, "confuse": settled > 0, "settled": settled}
    return Message({**packed.values, **values, **asked}, packed.arrays)


def _first_broadcast(method: Method, initial: dict[str, Tensor], model: Any) -> Broadcast:
    server = method.init_server(initial)
    shared = {name: value for name, value in server.params.items() if method.shared(name)}
    like = next(iter(initial.values()))
    pool = PrototypePool.empty(
        method.num_classes,
        model.embedding_size,
        prototype_rule(method).num_prototypes,
        dtype=like.dtype,
    )
    # The round in which all travels that ever does.
    is_all = not isinstance(method, SharesPrototypes) or method.shares_in(1)
    number = 1 if is_all else method.experiment.rounds
    sent = Broadcast(number, shared, server.extra, pool)
    is_asynchronous = isinstance(method, Asynchronous)
    return replace(sent, version=0, dispatch=number) if is_asynchronous else sent


def _fields(
    kind: Kind, message: Message, counts: Counts, test: int, experiment: Experiment
) -> Iterator[Field]:
    """Yield what is in a message; `counts` are the samples by class that may be told of."""
    for name, value in message.values.items():
        size = len(json.dumps(value))
        numbers = len(value) if isinstance(value, list) else 1
        yield Field(kind, name, numbers, size, _least_behind(name, value, counts, test), False)
    noisy = experiment.privacy.has_budget and experiment.privacy.model == "local"
    for name, array in message.arrays.items():
        yield Field(
            kind,
            name,
            int(array.size),
            int(array.nbytes),
            _least_in(name, message.arrays, counts),
            noisy and name.startswith("summed/"),
        )


def _least_behind(name: str, value: Any, counts: Counts, test: int) -> int | None:
    """Return the fewest samples behind a plain value, None where it tells of none."""
    if name == "train" and value:
        return min((each for each in value if each), default=None)
    if name == "test" and value:
        return int(value)
    if name in ("num_samples", "loss") and value not in (None, 1):
        return int(counts.sum())
    if name == "late":
        # The confusion matrix is counted image by image.
        return 1 if value.get("confusion") else test
    return None


def _least_in(name: str, arrays: Mapping[str, Any], counts: Counts) -> int | None:
    """Return the fewest samples behind any number of an array, None where it is empty."""
    # Masked, a number is one of the sum, and tells of no samples by itself.
    if not arrays[name].size or name == "masked":
        return None
    # The scale of a compressed tensor tells of whom the tensor does.
    base = name.removeprefix("coding/")
    if base.startswith("prototypes"):
        return int(arrays["prototypes/counts"].min())
    if base.startswith(_OF_ALL):
        return int(counts.sum())
    held = counts[counts > 0]
    return int(held.min()) if len(held) else None
