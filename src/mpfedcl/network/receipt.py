"""A receipt: every field that would leave a client, from a dry run on its own data.

The client answers the messages of a server that does not exist. Its answers are examined and
discarded, together with the temporary state folder.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.gaussian.mechanism import gaussian_multiplier
from mpfedcl.methods import Asynchronous, Method, SharesPrototypes, prototype_rule
from mpfedcl.methods.messages import Broadcast
from mpfedcl.network.client.client import ClientSettings, NetworkClient
from mpfedcl.network.packing import Introduction, pack_broadcast, pack_experiment
from mpfedcl.network.transport import FORMAT, Kind, Message, MessageError
from mpfedcl.privacy.accounting import spent_epsilon
from mpfedcl.privacy.releases import check_budget
from mpfedcl.privacy.secure_aggregation.layout import fix_noise
from mpfedcl.privacy.secure_aggregation.protocol import Advert, Roster, Session, SumClient
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.assembly import assemble
from mpfedcl.runs.plan import resolve

Counts = NDArray[numpy.int64]
"""Number of samples by class."""
_OF_ALL = ("averaged/", "summed/within", "summed/moment", "summed/scatter")
"""Fields whose values each depend on all samples."""
_OTHER_CLIENTS = ("another client", "a third client")


@dataclass(frozen=True)
class Field:
    """One field of a message to the server."""

    message: str
    """The kind: hello, secure, round or close."""
    name: str
    numbers: int
    num_bytes: int
    least: int | None
    """The smallest number of samples behind any value; None if it does not depend on samples."""
    is_noisy: bool


@dataclass(frozen=True)
class Receipt:
    """Everything that one client would send in its first round and at the end of a run."""

    fields: list[Field]
    method: str
    train: int
    """Number of training samples of the client."""
    epsilon: float | None
    delta: float
    unit: str
    model: str
    """Source of the noise: the server (central), this client (local), or all clients (sum)."""

    @property
    def least(self) -> int | None:
        """The smallest number of samples behind any value without noise."""
        counts = [e.least for e in self.fields if e.least is not None and not e.is_noisy]
        return min(counts, default=None)

    def below(self, threshold: int) -> list[Field]:
        """Return the fields without noise that depend on fewer samples than `threshold`."""
        return [
            each
            for each in self.fields
            if each.least is not None and each.least < threshold and not each.is_noisy
        ]


def make_receipt(experiment: Experiment, settings: ClientSettings) -> Receipt:
    """Let a client answer each kind of request once, and return the fields of its answers.

    Args:
        experiment: The server's experiment.
        settings: The client's settings; its state folder is not touched.
    """
    with tempfile.TemporaryDirectory(prefix="mpfedcl-receipt-") as folder:
        client = NetworkClient(replace(settings, state=Path(folder)))
        hello = client.answer("hello", _request(experiment))
        introduction = _read_introduction(hello)
        if not experiment.dataset.classes:
            # As the server does with the classes of all clients.
            experiment = experiment.replace(dataset__classes=introduction.classes)
            hello = client.answer("hello", _request(experiment))
        experiment = fix_noise(resolve(experiment))
        assert client.loaded is not None
        own, data, model = client.loaded
        assembly = assemble(own, model, num_classes=data.num_classes, input_size=data.input_size)
        check_budget(assembly.method)
        broadcast = _first_broadcast(assembly.method, assembly.initial, assembly.model)
        answers: dict[Kind, Message] = {"hello": hello}
        request = _request(experiment, broadcast)
        if experiment.secure_aggregation:
            answers |= _dry_run_secure_aggregation(
                client.answer, settings.name, experiment, request
            )
        else:
            answers["round"] = client.answer("round", request)
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
        raise InvalidInput(f"data must be accepted by a server: {error}.") from None


def _promised(epsilon: float, delta: float) -> float:
    """Return the epsilon that the accountant computes for the noise of a budget."""
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
    # The first or the last round, whichever shares prototypes.
    is_all = not isinstance(method, SharesPrototypes) or method.shares_in(1)
    number = 1 if is_all else method.experiment.rounds
    sent = Broadcast(number, shared, server.extra, pool)
    is_asynchronous = isinstance(method, Asynchronous)
    return replace(sent, version=0, dispatch=number) if is_asynchronous else sent


def _fields(
    kind: Kind, message: Message, counts: Counts, test: int, experiment: Experiment
) -> Iterator[Field]:
    """Yield the fields of a message; `counts` are the reported samples by class."""
    for name, value in message.values.items():
        size = len(json.dumps(value))
        numbers = len(value) if isinstance(value, list) else 1
        yield Field(kind, name, numbers, size, _fewest_in_value(name, value, counts, test), False)
    noisy = experiment.privacy.has_budget and experiment.privacy.model == "local"
    for name, array in message.arrays.items():
        yield Field(
            kind,
            name,
            int(array.size),
            int(array.nbytes),
            _fewest_in_array(name, message.arrays, counts),
            noisy and name.startswith("summed/"),
        )


def _fewest_in_value(name: str, value: Any, counts: Counts, test: int) -> int | None:
    """Return the fewest samples behind a plain value, or None."""
    if name == "train" and value:
        return min((each for each in value if each), default=None)
    if name == "test" and value:
        return int(value)
    if name in ("num_samples", "loss") and value not in (None, 1):
        return int(counts.sum())
    if name == "late":
        # An entry of a confusion matrix may count a single sample.
        return 1 if value.get("confusion") else test
    return None


def _fewest_in_array(name: str, arrays: Mapping[str, Any], counts: Counts) -> int | None:
    """Return the fewest samples behind any value of an array, or None."""
    # A masked value reveals nothing by itself.
    if not arrays[name].size or name == "masked":
        return None
    # The scale of a compressed tensor depends on the same samples as the tensor.
    base = name.removeprefix("coding/")
    if base.startswith("prototypes"):
        return int(arrays["prototypes/counts"].min())
    if base.startswith(_OF_ALL):
        return int(counts.sum())
    held = counts[counts > 0]
    return int(held.min()) if len(held) else None


def _dry_run_secure_aggregation(
    answer: Callable[[Kind, Message], Message], name: str, experiment: Experiment, request: Message
) -> dict[Kind, Message]:
    """Let a client answer all four stages with simulated other clients; return its answers.

    `request` is the training message without shares.
    """
    values = {name: request.values[name] for name in ("format", "experiment", "run", "round")}
    session = Session(values["run"], values["round"], experiment.secure.threshold)

    def ask(stage: str, **more: object) -> Message:
        return answer("secure", Message({**values, "stage": stage, **more}))

    advertised = ask("advertise")
    others = {each: SumClient(each, session) for each in _OTHER_CLIENTS if each != name}
    adverts = {each: client.advertise() for each, client in others.items()}
    adverts[name] = Advert.from_values(advertised.values["advert"])
    shared = ask("share", adverts={each: advert.to_values() for each, advert in adverts.items()})
    roster = Roster(session, adverts)
    sealed = {each: client.share(roster)[name].hex() for each, client in others.items()}
    masked = answer("round", Message({**request.values, "sealed": sealed}, request.arrays))
    revealed = ask("reveal", survivors=sorted(adverts))
    answers = {**advertised.values, **shared.values, **revealed.values}
    return {"secure": Message(answers), "round": masked}
