"""The engine of asynchronous methods over a network: each client is asked by itself.

A message carries the version of the model and the number of the sending, and its answer repeats
both. At most one is under way to a client.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mpfedcl.core.tensors import Tensors
from mpfedcl.methods.messages import Broadcast, Failure, Update
from mpfedcl.network.evaluation import ClientEvaluation, gather_evaluations
from mpfedcl.network.message import Kind, Message, MessageError
from mpfedcl.network.packing import unpack_update
from mpfedcl.network.server.client_registry import POLL_SECONDS
from mpfedcl.network.server.engine import NetworkEngine, read_reply
from mpfedcl.network.transport import AnswerLimit, Reply
from mpfedcl.rounds.evaluation import RoundEvaluation

_RECEIVE_SECONDS = 30.0
"""That fetching an answer may take before others are looked at."""
_DELAY = "delay/"


@dataclass(frozen=True)
class _Open:
    """A message that was sent to a client and waits for its answer."""

    client: str
    node: int
    sent: Broadcast
    end: float
    limit: AnswerLimit


class ArrivalEngine(NetworkEngine):
    """Sends clients out one by one, each with the model of its moment; they come when they come."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._open: dict[str, _Open] = {}
        """By message id."""
        self._unsent: set[str] = set()
        self._answers: dict[str, tuple[Broadcast, Update | Failure]] = {}
        """What has come and is not settled, with what it answers."""
        self._delays: dict[str, float] = {}
        """Seconds that each client's last accepted answer was under way."""
        self._read: dict[str, tuple[int, ClientEvaluation]] = {}
        """What accepted clients have read in the time of this record, and of which version."""
        self._num_answered = 0

    def begin_record(self, *, keep_models: bool) -> None:
        """Forget what was read for the record before, and who was missing in it."""
        self._read, self._late, self._warnings, self._num_answered = {}, {}, [], 0
        self._missing, self._is_new_round = {}, True

    def absent_clients(self) -> Collection[str]:
        """Find who is connected, as often as there is a place for somebody."""
        absent = super().absent_clients()
        self._is_new_round = False
        return absent

    def dispatch(self, broadcasts: Mapping[str, Broadcast]) -> None:
        """Send each client its message; the answer is worth something for a round's time."""
        seconds = self._experiment.network.round_timeout
        messages: dict[int, Message] = {}
        asked: dict[int, tuple[str, Broadcast]] = {}
        for name, broadcast in broadcasts.items():
            # What is read with it is told with the record under way, or with the one before.
            self._round = broadcast.round - 1
            records = [number for number in (self._round, broadcast.round) if number]
            reads = bool(broadcast.version) and any(map(self._experiment.evaluates, records))
            node = self._connected[name]
            messages[node] = self._compose("round", broadcast, [name], reads=reads)[name]
            asked[node] = name, broadcast
        sent = self._transport.send("round", messages, seconds, seconds=seconds)
        end = time.monotonic() + seconds
        for node, request_id in sent.items():
            name, broadcast = asked[node]
            self._open[request_id] = _Open(name, node, broadcast, end, self._limit_answer(name))
        self._unsent |= {asked[node][0] for node in asked.keys() - sent.keys()}

    def arrivals(self, seconds: float) -> dict[str, bool]:
        """Return who is back, and if empty-handed, after at most so many seconds."""
        end = time.monotonic() + seconds
        while True:
            with self._clock.phase("train"):
                found = self._look()
                waiting = {each: asked.client for each, asked in self._open.items()}
                self._write_status("round", self._round + 1, waiting, self._num_answered)
                left = end - time.monotonic()
                if found or left <= 0:
                    return found
                time.sleep(min(POLL_SECONDS, left))

    def answer(self, client: str) -> Update | Failure:
        """Return what a client has sent that is back."""
        return self._answers[client][1]

    def settle(self, client: str, *, seconds: float | None) -> None:
        """Note whose answer counts; the client is told with its next message."""
        sent, _ = self._answers.pop(client)
        late = self._late.pop(client, None)
        if seconds is None:
            # Perhaps its images are others than when it introduced itself.
            self._registry.ask_for_introduction([client])
            return
        self._num_answered += 1
        assert sent.dispatch is not None
        assert sent.version is not None
        self._accepted[client], self._delays[client] = sent.dispatch, seconds
        if late is not None:
            self._read[client] = sent.version, late

    def keep_accepted(self, accepted: Sequence[str], following: Callable[[], Broadcast]) -> None:
        """Close a record: what was read in its time is told with the one before."""
        self._round = following().round - 1
        self.previous_predictors = gather_evaluations(
            {n: each for n, (_, each) in self._read.items()}
        )
        versions = [version for version, _ in self._read.values()]
        self.read_versions = (min(versions), max(versions)) if versions else None

    def read_last_round(
        self, broadcast: Broadcast
    ) -> tuple[RoundEvaluation | None, dict[str, Any]]:
        """Let all connected clients read the last model; nobody waits for others any more."""
        self._open, self.read_versions = {}, None
        return super().read_last_round(broadcast)

    def remarks(self) -> dict[str, Any]:
        """Return why clients are missing, and who may not take part."""
        away = self.sizes.keys() - self._connected.keys()
        self._missing |= {**dict.fromkeys(away, "not connected"), **self._resting}
        return super().remarks()

    def state(self) -> Tensors:
        """Return the last dispatch of each client that counted, its seconds, and who is silent."""
        delays = {
            f"{_DELAY}{name}": torch.tensor(seconds, dtype=torch.float64)
            for name, seconds in self._delays.items()
        }
        return {**super().state(), **delays}

    def restore(self, state: Tensors, record: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        super().restore(state, record)
        self._delays = {
            name.removeprefix(_DELAY): float(seconds)
            for name, seconds in state.items()
            if name.startswith(_DELAY)
        }

    def _compose(
        self, kind: Kind, broadcast: Broadcast, names: Sequence[str], *, reads: bool
    ) -> dict[str, Message]:
        composed = super()._compose(kind, broadcast, names, reads=reads)
        return {
            name: Message({**each.values, "delay": self._delays.get(name, 0.0)}, each.arrays)
            for name, each in composed.items()
        }

    def _look(self) -> dict[str, bool]:
        """Take what has come, and give up what will not come any more."""
        found = dict.fromkeys(self._unsent, True)
        self._missing |= dict.fromkeys(self._unsent, "the message could not be sent")
        self._unsent = set()
        if self._open:
            limits = {each: asked.limit for each, asked in self._open.items()}
            for reply in self._transport.receive(limits, _RECEIVE_SECONDS):
                if (asked := self._open.pop(reply.request_id, None)) is not None:
                    found[asked.client] = self._take(asked, reply)
        now = time.monotonic()
        for request_id, asked in list(self._open.items()):
            moved = self._connected.get(asked.client, asked.node) != asked.node
            if now < asked.end and not moved:
                continue
            del self._open[request_id]
            found[asked.client] = True
            if moved:
                self._missing[asked.client] = "it came back, and is sent the newest model"
                continue
            seconds = self._experiment.network.round_timeout
            self._missing[asked.client] = f"no answer within {seconds:g} s"
            self._silent.note_silence([asked.client], self._round + 1)
        return found

    def _take(self, asked: _Open, reply: Reply) -> bool:
        """Keep what a client has sent; return whether it was lost."""
        name = asked.client
        self._silent.note_answers([name])
        if reply.failure == "gone":
            self._missing[name] = reply.reason
            return True

        def read(_: str, message: Message) -> Update:
            return self._read_answer(asked, message)

        self._answers[name] = asked.sent, read_reply(name, reply, read)
        return False

    def _read_answer(self, asked: _Open, message: Message) -> Update:
        for field, wanted in (("dispatch", asked.sent.dispatch), ("version", asked.sent.version)):
            if (found := message.value(field, int)) != wanted:
                raise MessageError(f"{field} is {found}; this client was asked for {wanted}")
        update = unpack_update(asked.client, message)
        if "late" in message.values:
            self._late |= self._read_late(asked.client, message)
        return update.to(self._device)
