"""A receipt: every field that would leave a client, from a dry run on its own data.

The server's engine asks the client in this process. Answers are examined and discarded, together
with the temporary state folder.
"""

import json
import shutil
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.secret_split import SECRET_FILE
from mpfedcl.experiment import Experiment
from mpfedcl.gaussian.mechanism import gaussian_multiplier
from mpfedcl.methods import Asynchronous, SharesPrototypes
from mpfedcl.network.client.answers import answer_kind
from mpfedcl.network.client.budget import LEDGER_FILE, ClientLedger, plan_releases
from mpfedcl.network.client.client import NetworkClient
from mpfedcl.network.client.policy import ClientPolicy
from mpfedcl.network.server.engine import NetworkEngine
from mpfedcl.network.server.registry import ClientRegistry
from mpfedcl.network.server.status import Status
from mpfedcl.network.setup.folders import ClientSettings
from mpfedcl.network.transport import AnswerLimit, Kind, Message, Reply
from mpfedcl.privacy.accounting import spent_epsilon
from mpfedcl.privacy.secure_aggregation.layout import fix_noise
from mpfedcl.rounds.assembly import assemble
from mpfedcl.rounds.loop import RoundLoop
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
    epsilon: float | None
    """What the client's ledger charges for the message in a run; None if no budget covers it."""


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
    spent: Mapping[str, float]
    """Epsilon that the client's ledger has charged so far."""

    @property
    def covered(self) -> list[Field]:
        """Return the fields that the client's ledger covers."""
        return [each for each in self.fields if each.epsilon is not None]

    @property
    def not_covered(self) -> list[Field]:
        """Return the fields without a guarantee."""
        return [each for each in self.fields if each.epsilon is None]

    honest_clients: int = 1
    """Of a sum: the number of honest clients, this one included, whose noise suffices."""

    @property
    def least(self) -> int | None:
        """The smallest number of samples behind any value without noise."""
        return min((e.least for e in self.not_covered if e.least is not None), default=None)

    def below(self, threshold: int) -> list[Field]:
        """Return the fields without noise that depend on fewer samples than `threshold`."""
        found = [each for each in self.not_covered if each.least is not None]
        return [each for each in found if (each.least or 0) < threshold]


def make_receipt(experiment: Experiment, settings: ClientSettings) -> Receipt:
    """Let a client answer each kind of request once, and return the fields of its answers.

    Args:
        experiment: The server's experiment.
        settings: The client's settings; of its state folder, which is not changed, the secret of
            the split and the ledger are used.
    """
    names = [settings.name, *(_OTHER_CLIENTS if experiment.secure_aggregation else ())]
    with tempfile.TemporaryDirectory(prefix="mpfedcl-receipt-") as folder:
        clients = [
            NetworkClient(replace(settings, name=name, state=Path(folder) / str(number)))
            for number, name in enumerate(names)
        ]
        (Path(folder) / "0").mkdir()
        for name in (SECRET_FILE, LEDGER_FILE):
            if (known := settings.state / name).is_file():
                shutil.copy2(known, Path(folder) / "0" / name)
        spent = ClientLedger(Path(folder) / "0", settings.policy).summary()
        transport = _Rehearsal(names, clients)
        registry = ClientRegistry(experiment, transport, Status(None))
        registry.find_connected()
        for reason in registry.refused.values():
            raise InvalidInput(f"data must be accepted by a server: {reason}.")
        if not experiment.dataset.classes:
            classes = registry.members[settings.name].classes
            experiment = experiment.replace(dataset__classes=classes)
        # The clients answer one after the other, in their own time.
        experiment = fix_noise(resolve(experiment)).replace(
            min_clients=1, network__round_timeout=7 * 86_400
        )
        registry.use_experiment(experiment)
        assert clients[0].loaded is not None
        own, data, model = clients[0].loaded
        assembly = assemble(
            experiment, model, num_classes=data.num_classes, input_size=data.input_size
        )
        engine = NetworkEngine(assembly, transport, registry, "0" * 32, Status(None))
        engine.absent_clients()
        broadcast, method = RoundLoop(assembly, engine).broadcast(), assembly.method
        if isinstance(method, SharesPrototypes) and not method.shares_in(broadcast.round):
            # In the last round it shares them.
            broadcast = replace(broadcast, round=experiment.rounds)
        if isinstance(method, Asynchronous):
            broadcast = replace(broadcast, version=0, dispatch=broadcast.round)
        deque(engine.train(broadcast, names, keep=[]), maxlen=0)
        closing = replace(broadcast, round=broadcast.round + 1)
        engine.keep(names, lambda: closing)
        engine.evaluate_last_round(closing)
    counts = data.label_counts()[0]
    kept = numpy.where(counts >= settings.policy.data.min_class_count, counts, 0)
    test = len(data.test_labels)
    fields = [
        field
        for kind, message in transport.answers.items()
        for field in _fields(kind, message, kept, test, _Costs.of(own, settings.policy))
    ]
    privacy, plan = own.privacy, plan_releases(own)
    delta = privacy.delta if plan is None else settings.policy.budget.max_delta
    epsilon = None
    if privacy.epsilon is not None:
        epsilon = _promised(privacy.epsilon, delta) if plan is None else plan.epsilon(delta)
    return Receipt(
        fields,
        own.method,
        int(counts.sum()),
        epsilon,
        delta,
        privacy.unit_for(trains=method.trains),
        "sum" if own.secure_aggregation else privacy.model,
        spent,
        own.secure.honest_clients,
    )


def _promised(epsilon: float, delta: float) -> float:
    """Return the epsilon that the accountant computes for the noise of a budget."""
    return min(epsilon, spent_epsilon({gaussian_multiplier(epsilon, delta): 1}, delta))


@dataclass(frozen=True)
class _Costs:
    """What the client's ledger charges in a run: for its noisy updates, and for its answers."""

    prefix: str
    """The arrays of a noisy update begin with it."""
    updates: float | None
    answers: float | None

    @classmethod
    def of(cls, experiment: Experiment, policy: ClientPolicy) -> "_Costs":
        plan = plan_releases(experiment)
        is_noisy = answer_kind(policy.evaluation, experiment) == "noisy"
        return cls(
            "masked" if experiment.secure_aggregation else "summed/",
            None if plan is None else plan.epsilon(policy.budget.max_delta),
            policy.evaluation.epsilon if is_noisy else None,
        )


class _Rehearsal:
    """A transport to clients in this process; it keeps the answers of the first one."""

    def __init__(self, names: Sequence[str], clients: Sequence[NetworkClient]) -> None:
        self.answers: dict[Kind, Message] = {}
        self._clients = dict(enumerate(clients))
        self._names = dict(enumerate(names))
        self._replies: dict[str, Reply] = {}

    def connected_nodes(self) -> Mapping[int, str]:
        """Return the clients."""
        return self._names

    def send(
        self, kind: Kind, messages: Mapping[int, Message], timeout: float, *, seconds: float
    ) -> dict[int, str]:
        """Let each client answer at once."""
        for node, message in messages.items():
            answer = self._clients[node].answer(kind, message)
            self._replies[str(node)] = Reply(str(node), answer)
            if node == 0:
                before = self.answers.get(kind, Message({}))
                values, arrays = before.values | answer.values, before.arrays | answer.arrays
                self.answers[kind] = Message(values, arrays)
        return {node: str(node) for node in messages}

    def receive(self, limits: Mapping[str, AnswerLimit], seconds: float) -> list[Reply]:
        """Return the answers, each once."""
        return [self._replies.pop(each) for each in limits if each in self._replies]


def _fields(
    kind: Kind, message: Message, counts: Counts, test: int, costs: _Costs
) -> Iterator[Field]:
    """Yield the fields of a message; `counts` are the reported samples by class."""
    for name, value in message.values.items():
        size = len(json.dumps(value))
        numbers = len(value) if isinstance(value, list) else 1
        least = _fewest_in_value(name, value, counts, test)
        yield Field(kind, name, numbers, size, least, costs.answers if name == "late" else None)
    for name, array in message.arrays.items():
        yield Field(
            kind,
            name,
            int(array.size),
            int(array.nbytes),
            _fewest_in_array(name, message.arrays, counts),
            costs.updates if name.startswith(costs.prefix) else None,
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
        has_number = any(each is not None for each in value["table"]["local_test"].values())
        return 1 if value.get("confusion") else test if has_number else None
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
