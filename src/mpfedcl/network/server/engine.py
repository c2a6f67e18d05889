"""Engine for clients on their own machines: one message per client and round."""

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file

from mpfedcl.core.errors import RunCutShort
from mpfedcl.core.tensors import Tensors, pack_tensors, take_group
from mpfedcl.methods import SharesPrototypes
from mpfedcl.methods.messages import Broadcast, Failure, StackMember, Total, Update
from mpfedcl.network.packing import (
    ReportedEvaluation,
    gather_evaluations,
    pack_broadcast,
    pack_experiment,
    pack_part,
    unpack_evaluation,
    unpack_part_update,
    unpack_update,
)
from mpfedcl.network.server.registry import POLL_SECONDS, ClientRegistry, SilentClients
from mpfedcl.network.server.status import Status
from mpfedcl.network.transport import (
    FORMAT,
    MOST_BYTES,
    AnswerLimit,
    Kind,
    Message,
    MessageError,
    Reply,
    Transport,
)
from mpfedcl.privacy.secure_aggregation import NothingOpened, ProtocolError, describe_lost_round
from mpfedcl.privacy.secure_aggregation.layout import SumLayout
from mpfedcl.privacy.secure_aggregation.protocol import (
    Advert,
    Revealed,
    Session,
    SumServer,
    find_odd,
    read_bytes,
)
from mpfedcl.rounds.assembly import Assembly
from mpfedcl.rounds.engine import Engine, Members
from mpfedcl.rounds.evaluation import RoundEvaluation

SPILL_BYTES = 2**20
"""Smallest update that is spilled to disk."""
_SETTLED = "settled/"
_SPARE = 3
"""Factor on the expected size: masked values take eight bytes instead of a parameter's four."""
_ALLOWANCE = 2**24
"""Bytes for headers and small arrays."""
_EXTRA_ARRAYS = 64
_TEXT, _LONGEST_TEXT = 2**22, 2**26
_COUNT_BYTES = 16
"""Per entry of a confusion matrix."""
_LABEL_AND_COUNT = 16
"""Bytes of a prototype without its vector."""
_LIGHT_SHARE, _HEAVY_SHARE = 1 / 8, 1 / 2
"""Fractions of a round's time: each of the four stages without training, and the training."""
_STAGE_BYTES = 2**16
_PER_CLIENT = 2048
"""Bytes of text per client in an answer: a name and a sealed share."""

_Content = TypeVar("_Content")
_Take = Callable[[str, Message], None]


class NetworkEngine(Engine):
    """Trains clients by messages; each client keeps its data and its state on its own machine."""

    _is_new_round = True
    """Whether the next `absent_clients` is the first of a round."""

    def __init__(
        self,
        assembly: Assembly,
        transport: Transport,
        registry: ClientRegistry,
        run: str,
        status: Status,
        folder: Path | None = None,
    ) -> None:
        self.previous_evaluation: RoundEvaluation | None = None
        """The accepted clients' evaluation of the previous round."""
        self.read_versions: tuple[int, int] | None = None
        """Asynchronous methods: the first and the last version in that evaluation."""
        self._sizes: dict[str, int] = dict(registry.sizes)
        self._label_counts: dict[str, list[int]] = registry.label_counts
        self.members = Members(self._sizes, self._label_counts)
        self._assembly, self._experiment = assembly, assembly.experiment
        self._transport, self._registry = transport, registry
        self._run, self._status, self._folder = run, status, folder
        self._device, self._clock = assembly.device, assembly.clock
        self._document = pack_experiment(assembly.experiment)
        self._connected: dict[str, int] = {}
        """Nodes by client, as of the start of the round."""
        self._resting: dict[str, str] = {}
        """Reasons why connected clients are skipped in this round."""
        self._accepted: dict[str, int] = {}
        """The last round in which each client's update was accepted."""
        self._silent = SilentClients()
        registry.introduced.clear()
        self._identities: dict[str, bytes] = {}
        """Public keys of the clients in secure aggregation."""
        self._round = 0
        self._broadcast: Broadcast | None = None
        self._missing: dict[str, str] = {}
        self._warnings: list[str] = []
        self._replied: set[str] = set()
        self._late: dict[str, ReportedEvaluation] = {}
        """Evaluations of the previous round; they count if the client's update is accepted."""

    def absent_clients(self) -> Collection[str]:
        """Find the connected clients; clients introduced since the last round join."""
        before = self._connected
        self._connected = self._registry.find_connected(is_new_round=self._is_new_round)
        came_back = self._connected.keys() - before.keys() if before else set()
        self._silent.note_answers(came_back | self._registry.introduced)
        self._registry.introduced.clear()
        # In place, because the members share these dictionaries.
        self._sizes.clear()
        self._sizes.update(self._registry.sizes)
        self._label_counts.clear()
        self._label_counts.update(self._registry.label_counts)
        silent = self._silent.resting(self._round + 1)
        resting = {name: why for name, why in silent.items() if name in self._connected}
        is_enough = len(self._connected) - len(resting) >= self._experiment.min_clients
        self._resting = resting if is_enough else {}
        return self.sizes.keys() - (self._connected.keys() - self._resting.keys())

    def train(
        self, broadcast: Broadcast, names: Sequence[str], *, keep: Collection[str]
    ) -> Iterator[Update | Failure | Total]:
        """Send the broadcast and yield updates until enough have arrived or the deadline passes.

        The same message asks clients to evaluate the previous round, if it is to be evaluated.
        """
        self._round, self._replied, self._late = broadcast.round, set(), {}
        self._warnings, self._broadcast = [], broadcast
        reads = broadcast.round > 1 and self._experiment.evaluates(broadcast.round - 1)
        self._note_absent()
        messages = self._compose("round", broadcast, names, reads=reads)
        if self._experiment.secure_aggregation:
            yield from self._aggregate_securely(broadcast, messages)
            return
        for update in self._exchange("round", messages, self._read_update):
            self._replied.add(update.client)
            yield update

    def _aggregate_securely(
        self, broadcast: Broadcast, messages: Mapping[str, Message]
    ) -> Iterator[Failure | Total]:
        """Yield the total of the clients' updates, unless too few clients remain to open it."""
        session = Session(self._run, broadcast.round, self._experiment.secure.threshold)
        common = {"format": FORMAT, "experiment": self._document}
        common |= {"run": session.run, "round": session.round}
        secure = SecureRound(self._exchange, common)
        total: Total | None = None
        try:
            layout = SumLayout(self._assembly)
            total = secure.run(session, layout, self._identities, messages, self._note_late)
        except NothingOpened as error:
            warning = describe_lost_round(broadcast.round, error)
            if broadcast.round == self._experiment.rounds:
                raise RunCutShort(warning) from None
            self._warnings = [warning]
        self._replied.update(each.client for each in secure.failures)
        yield from secure.failures
        if total is not None:
            yield total

    def evaluate_last_round(
        self, broadcast: Broadcast
    ) -> tuple[RoundEvaluation | None, dict[str, Any]]:
        """Ask all connected clients to evaluate the last round; also return remarks."""
        self.absent_clients()
        rejected: dict[str, str] = {}
        self._late = {}
        names = sorted(self._connected.keys() - self._resting.keys())
        self._note_absent()
        messages = self._compose("close", broadcast, names, reads=True)
        for each in self._exchange("close", messages, self._take_late):
            if isinstance(each, Failure):
                rejected[each.client] = each.reason
        rejections = {"rejected": dict(sorted(rejected.items()))} if rejected else {}
        return gather_evaluations(self._late), {**self.remarks(), **rejections}

    def remarks(self) -> dict[str, Any]:
        """Return the reasons why clients are missing or refused, and warnings."""
        reasons = {"missing": self._missing, "refused": self._registry.refused}
        remarks: dict[str, Any] = {n: dict(sorted(e.items())) for n, e in reasons.items() if e}
        return remarks | ({"warnings": self._warnings} if self._warnings else {})

    def keep(self, accepted: Sequence[str], following: Callable[[], Broadcast]) -> None:
        """Record the accepted updates; each client's next message reports its own."""
        counted = {name: self._late[name] for name in accepted if name in self._late}
        self.previous_evaluation = gather_evaluations(counted)
        self._accepted |= dict.fromkeys(accepted, self._round)
        # The data of a rejected client may have changed since its introduction.
        self._registry.ask_for_introduction(self._replied - set(accepted))

    def state(self) -> Tensors:
        """Return the last accepted round of each client, and silences."""
        accepted = {f"{_SETTLED}{name}": torch.tensor(r) for name, r in self._accepted.items()}
        return {**accepted, **self._silent.state()}

    def restore(
        self, state: Tensors, record: Mapping[str, Any], folder: Path | None = None
    ) -> None:
        """Continue from the result of `state`."""
        self._accepted = {name: int(each) for name, each in take_group(state, _SETTLED).items()}
        self._silent.restore(state)
        self._round = int(record.get("round", 0))

    def _note_absent(self) -> None:
        away = self.sizes.keys() - self._connected.keys()
        self._missing = {**dict.fromkeys(away, "not connected"), **self._resting}

    def _exchange(
        self,
        kind: Kind,
        messages: Mapping[str, Message],
        read: Callable[[str, Message], _Content],
        *,
        limit: AnswerLimit | None = None,
        share: float = 1.0,
    ) -> Iterator[_Content | Failure]:
        """Send each named client its message and yield the content of replies as they arrive.

        `limit` bounds each answer, `share` is the fraction of `network.round_timeout` to wait.
        """
        settings = self._experiment.network
        seconds = share * settings.round_timeout
        end = time.monotonic() + seconds
        clients = {self._connected[name]: name for name in messages}
        with self._clock.phase("broadcast"):
            asked = {node: messages[name] for node, name in clients.items()}
            sent = self._transport.send(kind, asked, seconds, seconds=seconds)
        waiting = {request_id: clients[node] for node, request_id in sent.items()}
        limits = {
            each: limit or limit_answer(self._assembly, self.sizes[name])
            for each, name in waiting.items()
        }
        unsent = clients.keys() - sent.keys()
        self._missing |= {clients[node]: "the message could not be sent" for node in unsent}
        # The closing evaluation waits for every connected client.
        enough = max(1, round((settings.enough if kind == "round" else 1.0) * len(messages)))
        answered = 0
        while waiting and answered < enough and (left := end - time.monotonic()) > 0:
            with self._clock.phase("train"):
                replies = self._transport.receive({each: limits[each] for each in waiting}, left)
                self._write_status(kind, self._round, waiting, answered)
                if not replies:
                    time.sleep(max(0.0, min(POLL_SECONDS, end - time.monotonic())))
            for reply in replies:
                name = waiting.pop(reply.request_id, None)
                if name is None:
                    continue
                self._silent.note_answers([name])
                if reply.failure == "gone":
                    self._missing[name] = reply.reason
                    continue
                content = read_reply(name, reply, read)
                answered += not isinstance(content, Failure)
                yield content
        if answered >= enough:
            why = "enough others had answered"
        else:
            why = f"no answer within {seconds:g} s"
            self._silent.note_silence(waiting.values(), self._round)
        self._missing |= dict.fromkeys(waiting.values(), why)

    def _compose(
        self, kind: Kind, broadcast: Broadcast, names: Sequence[str], *, reads: bool
    ) -> dict[str, Message]:
        """Return the message for each named client."""
        packed = pack_broadcast(broadcast)
        values = {
            **packed.values,
            "format": FORMAT,
            "run": self._run,
            "experiment": self._document,
            "read": reads,
        }
        return {
            name: Message(
                {**values, "settled": self._accepted.get(name, 0)},
                pack_part(packed.arrays, broadcast, name, is_whole=reads),
            )
            for name in names
        }

    def _read_update(self, name: str, message: Message) -> Update:
        update = unpack_update(name, message)
        self._note_late(name, message)
        assert self._broadcast is not None
        whole = unpack_part_update(update.to(self._device), self._broadcast)
        return spill_to_disk(whole, self._folder)

    def _note_late(self, name: str, message: Message) -> None:
        if "late" in message.values:
            self._take_late(name, message)

    def _take_late(self, name: str, message: Message) -> None:
        late, num_classes = message.value("late", dict), self._assembly.method.num_classes
        self._late[name] = unpack_evaluation(late, num_classes)

    def _write_status(
        self, kind: Kind, number: int, waiting: Mapping[str, str], answered: int
    ) -> None:
        what = "closing evaluation" if kind == "close" else "training"
        details = {"round": number, "rounds": self._experiment.rounds, "answered": answered}
        self._status.write(
            what, **details, waiting=sorted(waiting.values()), missing=sorted(self._missing)
        )


def read_reply(
    name: str, reply: Reply, read: Callable[[str, Message], _Content]
) -> _Content | Failure:
    """Return the content of a reply, or a failure with the reason."""
    if reply.message is None:
        return Failure(name, reply.reason)
    try:
        return read(name, reply.message)
    except MessageError as error:
        return Failure(name, f"its answer cannot be read: {error}")
    # A bad message affects only the client that sent it.
    except Exception as error:
        return Failure(name, f"its answer cannot be read ({type(error).__name__})")


def limit_answer(assembly: Assembly, num_samples: int) -> AnswerLimit:
    """Return the size limit of an update from a client with this many samples."""
    method = assembly.method
    tensors = [*assembly.template.values(), *assembly.sums.values()]
    expected = sum(each.nbytes for each in tensors)
    if isinstance(method, SharesPrototypes):
        itemsize = max(each.element_size() for each in assembly.initial.values())
        row = assembly.model.embedding_size * itemsize + _LABEL_AND_COUNT
        most = method.max_prototypes
        rows = num_samples if most is None else min(num_samples, most * method.num_classes)
        expected += rows * row
    return AnswerLimit(
        num_arrays=2 * len(tensors) + _EXTRA_ARRAYS,
        array_bytes=min(MOST_BYTES, _SPARE * expected + _ALLOWANCE),
        text_bytes=min(_LONGEST_TEXT, _TEXT + _COUNT_BYTES * method.num_classes**2),
    )


def spill_to_disk(update: Update, folder: Path | None) -> Update:
    """Return an update whose large tensors are memory-mapped from an unnamed file in `folder`.

    Updates are folded in name order, so any number of them may wait. The file is deleted with the
    tensors.
    """
    tensors = update.averaged
    assert not isinstance(tensors, StackMember)
    if folder is None or tensors is None or any(each.is_cuda for each in tensors.values()):
        return update
    if sum(each.nbytes for each in tensors.values()) < SPILL_BYTES:
        return update
    # If the disk is full, the update stays in memory.
    with contextlib.suppress(OSError), NamedTemporaryFile(dir=folder, prefix=".update-") as file:
        file.write(pack_tensors(tensors))
        file.flush()
        return replace(update, averaged=load_file(file.name))
    return update


class SecureRound:
    """The stages of one secure aggregation; a client that fails at a stage is left out."""

    def __init__(self, exchange: Callable[..., Iterator[Any]], common: Mapping[str, Any]) -> None:
        self.failures: list[Failure] = []
        """Reasons why single clients are not in the total."""
        self._exchange = exchange
        self._common = common
        """Values of every message."""

    def run(
        self,
        session: Session,
        layout: SumLayout,
        identities: dict[str, bytes],
        messages: Mapping[str, Message],
        note: Callable[[str, Message], None],
    ) -> Total:
        """Return the total of the remaining clients; raise `NothingOpened` if they are too few.

        Args:
            session: The run, the round and the threshold.
            layout: The values that clients add up.
            identities: Public keys of the clients seen before in this run; new ones are added.
            messages: The training message for each client; shares are added to it.
            note: Called with each answer to it.
        """
        adverts: dict[str, Advert] = {}

        def take_advert(name: str, message: Message) -> None:
            adverts[name] = Advert.from_values(message.value("advert", dict))

        self._stage("advertise", list(messages), {}, take_advert)
        for name, reason in find_odd(session, adverts, identities).items():
            del adverts[name]
            self.failures.append(Failure(name, reason))
        identities |= {name: each.identity for name, each in adverts.items()}
        server = SumServer(session, layout.size, adverts)

        def take_shares(name: str, message: Message) -> None:
            server.take_shares(name, _read_table(message, "sealed"))

        values = {name: advert.to_values() for name, advert in adverts.items()}
        self._stage("share", server.roster.names, {"adverts": values}, take_shares)

        def take_masked(name: str, message: Message) -> None:
            if "masked" not in message.arrays:
                raise MessageError("its masked values are missing")
            server.take_masked(name, message.arrays["masked"])
            note(name, message)

        with_shares = {}
        for name in server.sharers:
            sealed = {other: each.hex() for other, each in server.shares_for(name).items()}
            message = messages[name]
            with_shares[name] = Message({**message.values, "sealed": sealed}, message.arrays)
        size = 8 * layout.size + _STAGE_BYTES
        limit = AnswerLimit(num_arrays=1, array_bytes=size, text_bytes=_TEXT)
        self._gather("round", with_shares, take_masked, limit, _HEAVY_SHARE)
        survivors = server.survivors

        def take_signature(name: str, message: Message) -> None:
            signature = read_bytes(message.value("signature", str), "signature")
            server.take_signature(name, signature)

        def take_revealed(name: str, message: Message) -> None:
            seeds, keys = _read_table(message, "seeds"), _read_table(message, "keys")
            server.take_revealed(name, Revealed(seeds, keys))

        # A client that fails from here on is still in the total.
        before = len(self.failures)
        self._stage("confirm", survivors, {"survivors": survivors}, take_signature)
        signatures = {name: each.hex() for name, each in server.signatures.items()}
        self._stage("reveal", list(signatures), {"signatures": signatures}, take_revealed)
        del self.failures[before:]
        return layout.total(server.open(), survivors, server.bytes_up)

    def _stage(
        self, stage: str, names: Sequence[str], values: Mapping[str, Any], take: _Take
    ) -> None:
        message = Message({**self._common, "stage": stage, **values})
        text = _STAGE_BYTES + _PER_CLIENT * len(names)
        limit = AnswerLimit(num_arrays=0, array_bytes=_STAGE_BYTES, text_bytes=text)
        self._gather("secure", dict.fromkeys(names, message), take, limit, _LIGHT_SHARE)

    def _gather(
        self,
        kind: Kind,
        messages: Mapping[str, Message],
        take: _Take,
        limit: AnswerLimit,
        share: float,
    ) -> None:
        """Ask clients, take their answers, and record failures."""

        def take_checked(name: str, message: Message) -> None:
            try:
                take(name, message)
            except ProtocolError as error:
                raise MessageError(str(error)) from None

        answers = self._exchange(kind, messages, take_checked, limit=limit, share=share)
        self.failures += [each for each in answers if isinstance(each, Failure)]


def _read_table(message: Message, name: str) -> dict[str, bytes]:
    return {str(key): read_bytes(each, name) for key, each in message.value(name, dict).items()}
