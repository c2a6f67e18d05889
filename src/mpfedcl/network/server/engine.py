"""The engine whose clients are on machines of their own: one message per client and round."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from mpfedcl.core.errors import RunCutShort
from mpfedcl.core.tensors import Tensors, digest, pack_tensors
from mpfedcl.methods.messages import Broadcast, Failure, Total, Update
from mpfedcl.network.evaluation import ClientEvaluation, gather_evaluations, unpack_evaluation
from mpfedcl.network.message import FORMAT, Kind, Message, MessageError
from mpfedcl.network.packing import pack_broadcast, pack_experiment, unpack_update
from mpfedcl.network.part_messages import count_left_out, pack_part, unpack_part_update
from mpfedcl.network.server.answer_limits import limit_answer
from mpfedcl.network.server.client_registry import POLL_SECONDS, ClientRegistry
from mpfedcl.network.server.secure_round import SecureRound
from mpfedcl.network.server.silence import SilentClients
from mpfedcl.network.server.status import Status
from mpfedcl.network.server.waiting_updates import keep_in_file
from mpfedcl.network.transport import AnswerLimit, Reply, Transport
from mpfedcl.privacy.secure_aggregation import NothingOpened, describe_lost_round
from mpfedcl.privacy.secure_aggregation.roster import Session
from mpfedcl.rounds.assembly import Assembly
from mpfedcl.rounds.engine import Engine
from mpfedcl.rounds.evaluation import RoundEvaluation
from mpfedcl.rounds.processors import ProcessorChain
from mpfedcl.rounds.sum_layout import SumLayout

_Content = TypeVar("_Content")
_SETTLED = "settled/"
_SUMS = "sums/"


class NetworkEngine(Engine):
    """Trains clients by messages; each keeps its data and its state on its own machine."""

    _is_new_round = True
    """Whether who is connected is asked for the first time in a round."""

    def __init__(
        self,
        assembly: Assembly,
        transport: Transport,
        registry: ClientRegistry,
        run: str,
        status: Status,
        folder: Path | None = None,
    ) -> None:
        self.previous_predictors: RoundEvaluation | None = None
        """What the accepted clients read of the round before."""
        self.read_versions: tuple[int, int] | None = None
        """Asynchronous methods: the first and the last version that they have read."""
        self._assembly = assembly
        self._experiment = experiment = assembly.experiment
        self._num_classes = assembly.method.num_classes
        self._transport = transport
        self._registry = registry
        self._run = run
        self._device = assembly.device
        self._clock = assembly.clock
        self._status, self._folder = status, folder
        self._document = pack_experiment(experiment)
        self._connected: dict[str, int] = {}
        """Nodes by client, as of the beginning of the round."""
        self._resting: dict[str, str] = {}
        """Why connected clients are left out of it."""
        self.sizes: dict[str, int] = dict(registry.sizes)
        """Training samples by client name; one mapping, which grows as clients come."""
        self.label_counts: dict[str, list[int]] = registry.label_counts
        """The same by class."""
        self._accepted: dict[str, int] = {}
        """The last round in which each client's update was accepted."""
        self._sent_sums: dict[str, str] = {}
        self.sums_digests: dict[str, str] = {}
        """The SHA-256 of the sums of each accepted client: who leaves must send them again."""
        self._silent = SilentClients()
        registry.introduced.clear()
        self._identities: dict[str, bytes] = {}
        """The keys by which clients have signed what they show for secure aggregation."""
        self._round = 0
        self._broadcast: Broadcast | None = None
        self._bytes_to_read = 0
        """Of the rest of the model, which clients that train a part are sent to read the last
        round; the round's own bytes are without it."""
        self._missing: dict[str, str] = {}
        self._warnings: list[str] = []
        self._replied: set[str] = set()
        self._late: dict[str, ClientEvaluation] = {}
        """What clients read of the round before, by client; it counts if they are accepted."""

    def absent_clients(self) -> Collection[str]:
        """Find who is connected; a client that has introduced itself since now takes part."""
        here = self._registry.find_connected(is_new_round=self._is_new_round)
        before, self._connected = self._connected, here
        came_back = self._connected.keys() - before.keys() if before else set()
        self._silent.note_answers(came_back | self._registry.introduced)
        self._registry.introduced.clear()
        self.sizes.clear()
        self.sizes.update(self._registry.sizes)
        self.label_counts.clear()
        self.label_counts.update(self._registry.label_counts)
        self._resting = self._find_resting()
        return self.sizes.keys() - (self._connected.keys() - self._resting.keys())

    def _find_resting(self) -> dict[str, str]:
        """Return the connected clients that are left out now; nobody is if too few would remain."""
        silent = self._silent.resting(self._round + 1)
        resting = {name: why for name, why in silent.items() if name in self._connected}
        is_enough = len(self._connected) - len(resting) >= self._experiment.min_clients
        return resting if is_enough else {}

    def train(
        self, broadcast: Broadcast, names: Sequence[str], *, keep: Collection[str]
    ) -> Iterator[Update | Failure | Total]:
        """Send the broadcast and yield updates, until enough clients have answered or time is up.

        The same message asks clients to evaluate the round before, if it is to be evaluated.
        """
        self._round, self._replied, self._late = broadcast.round, set(), {}
        self._warnings, self._broadcast = [], broadcast
        reads = broadcast.round > 1 and self._experiment.evaluates(broadcast.round - 1)
        self._bytes_to_read = count_left_out(broadcast, names) if reads else 0
        self._note_absent()
        if self._experiment.secure_aggregation:
            yield from self._add_up_securely(broadcast, names, reads=reads)
            return
        messages = self._compose("round", broadcast, names, reads=reads)
        for update in self._exchange("round", messages, self._read_update):
            self._replied.add(update.client)
            yield update

    def _add_up_securely(
        self, broadcast: Broadcast, names: Sequence[str], *, reads: bool
    ) -> Iterator[Failure | Total]:
        """Let the named clients add up their updates; where too few are left nothing is opened."""
        session = Session(self._run, broadcast.round, self._experiment.secure.threshold)
        common = {"format": FORMAT, "experiment": self._document}
        layout = SumLayout(self._assembly)
        secure = SecureRound(self._exchange, session, layout, common, self._identities)
        messages = self._compose("round", broadcast, names, reads=reads)

        def note(name: str, message: Message) -> None:
            if "late" in message.values:
                self._late |= self._read_late(name, message)

        try:
            total = secure.run(names, messages.__getitem__, note)
        except NothingOpened as error:
            told = describe_lost_round(broadcast.round, error)
            if broadcast.round == self._experiment.rounds:
                raise RunCutShort(told) from None
            self._warnings = [told]
            total = None
        self._replied.update(each.client for each in secure.failures)
        yield from secure.failures
        if total is not None:
            yield total

    def read_last_round(
        self, broadcast: Broadcast
    ) -> tuple[RoundEvaluation | None, dict[str, Any]]:
        """Let all connected clients read the last round; return also who said nothing sound."""
        self.absent_clients()
        late: dict[str, ClientEvaluation] = {}
        rejected: dict[str, str] = {}
        names = sorted(self._connected.keys() - self._resting.keys())
        self._note_absent()
        messages = self._compose("close", broadcast, names, reads=True)
        for each in self._exchange("close", messages, self._read_late):
            if isinstance(each, Failure):
                rejected[each.client] = each.reason
            else:
                late |= each
        told = {"rejected": dict(sorted(rejected.items()))} if rejected else {}
        return gather_evaluations(late), {**self.remarks(), **told}

    def remarks(self) -> dict[str, Any]:
        """Return why clients are missing, and who may not take part."""
        reasons = {"missing": self._missing, "refused": self._registry.refused}
        told: dict[str, Any] = {
            n: dict(sorted(each.items())) for n, each in reasons.items() if each
        }
        if self._bytes_to_read:
            told["bytes_to_read"] = self._bytes_to_read
        return {**told, **({"warnings": self._warnings} if self._warnings else {})}

    def keep_accepted(self, accepted: Sequence[str], following: Callable[[], Broadcast]) -> None:
        """Note whose update was accepted; each client is told with its next message."""
        counted = {name: self._late[name] for name in accepted if name in self._late}
        self.previous_predictors = gather_evaluations(counted)
        self._accepted |= dict.fromkeys(accepted, self._round)
        sums = {name: self._sent_sums[name] for name in accepted if name in self._sent_sums}
        self.sums_digests |= sums
        # Perhaps its images are others than when it introduced itself.
        self._registry.ask_for_introduction(self._replied - set(accepted))

    def state(self) -> Tensors:
        """Return the last round in which each client's update was accepted, and who is silent."""
        accepted = {f"{_SETTLED}{name}": torch.tensor(r) for name, r in self._accepted.items()}
        sums = {
            f"{_SUMS}{name}": torch.tensor(list(bytes.fromhex(each)), dtype=torch.uint8)
            for name, each in self.sums_digests.items()
        }
        return {**accepted, **sums, **self._silent.state()}

    def restore(self, state: Tensors, record: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self._accepted = {
            name.removeprefix(_SETTLED): int(number)
            for name, number in state.items()
            if name.startswith(_SETTLED)
        }
        self.sums_digests = {
            name.removeprefix(_SUMS): bytes(each.tolist()).hex()
            for name, each in state.items()
            if name.startswith(_SUMS)
        }
        self._silent.restore(state)
        self._round = int(record["round"])

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
        """Send each named client its message and yield the content of replies as they come.

        `limit` bounds each answer, `share` the time: that part of a round's.
        """
        settings = self._experiment.network
        seconds = share * settings.round_timeout
        end = time.monotonic() + seconds
        clients = {self._connected[name]: name for name in messages}
        with self._clock.phase("broadcast"):
            asked = {node: messages[name] for node, name in clients.items()}
            sent = self._transport.send(kind, asked, seconds, seconds=seconds)
        waiting = {request_id: clients[node] for node, request_id in sent.items()}
        limits = {each: limit or self._limit_answer(name) for each, name in waiting.items()}
        unsent = clients.keys() - sent.keys()
        self._missing |= {clients[node]: "the message could not be sent" for node in unsent}
        # The closing evaluation waits for every client that is connected.
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

    def _limit_answer(self, name: str) -> AnswerLimit:
        return limit_answer(self._assembly, self.sizes[name])

    def _compose(
        self, kind: Kind, broadcast: Broadcast, names: Sequence[str], *, reads: bool
    ) -> dict[str, Message]:
        """Return the message to each named client."""
        packed = pack_broadcast(broadcast)
        values = {
            **packed.values,
            "format": FORMAT,
            "run": self._run,
            "experiment": self._document,
            "read": reads,
            "confuse": kind == "close",
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
        # Under a privacy budget not even their hash is kept, and nobody leaves.
        if update.summed and not self._experiment.privacy.has_budget:
            self._sent_sums[name] = digest_sums(self._unpack_sums(update))
        if "late" in message.values:
            self._late |= self._read_late(name, message)
        assert self._broadcast is not None
        whole = unpack_part_update(update.to(self._device), self._broadcast)
        return keep_in_file(whole, self._folder)

    def _unpack_sums(self, update: Update) -> Mapping[str, torch.Tensor]:
        """Return sums as they are added up; what cannot be unpacked is rejected later."""
        assert self._broadcast is not None
        try:
            return ProcessorChain(self._experiment).unpack(update, self._broadcast).summed
        except Exception:  # what a stranger sends may fail in any way
            return {}

    def _read_late(self, name: str, message: Message) -> dict[str, ClientEvaluation]:
        return {name: unpack_evaluation(message.value("late", dict), self._num_classes)}

    def _write_status(
        self, kind: Kind, number: int, waiting: Mapping[str, str], answered: int
    ) -> None:
        what = "closing evaluation" if kind == "close" else "training"
        details = {"round": number, "rounds": self._experiment.rounds, "answered": answered}
        self._status.write(
            what, **details, waiting=sorted(waiting.values()), missing=sorted(self._missing)
        )


def digest_sums(sums: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of a client's sums, to the bit."""
    return digest(pack_tensors({name: sums[name] for name in sorted(sums)}))


def read_reply(
    name: str, reply: Reply, read: Callable[[str, Message], _Content]
) -> _Content | Failure:
    """Return what a client has sent, or why it cannot be read."""
    if reply.message is None:
        return Failure(name, reply.reason)
    try:
        return read(name, reply.message)
    except MessageError as error:
        return Failure(name, f"its answer cannot be read: {error}")
    # Whatever one client sends costs that client alone.
    except Exception as error:
        return Failure(name, f"its answer cannot be read ({type(error).__name__})")
