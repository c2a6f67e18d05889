"""The engine of asynchronous methods over a network, which dispatches single clients.

A message carries the version of the model and a dispatch number, and its answer repeats both. A
client has at most one message in flight.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mpfedcl.core.tensors import Tensors, take_group
from mpfedcl.methods.messages import Broadcast, Failure, Update
from mpfedcl.network.packing import ReportedEvaluation, gather_evaluations, unpack_update
from mpfedcl.network.server.engine import NetworkEngine, limit_answer, read_reply
from mpfedcl.network.server.registry import POLL_SECONDS
from mpfedcl.network.transport import AnswerLimit, Kind, Message, MessageError, Reply
from mpfedcl.rounds.engine import RemoteArrivalEngine
from mpfedcl.rounds.evaluation import RoundEvaluation

_RECEIVE_SECONDS = 30.0
"""Time limit for fetching an answer."""
_DELAY = "delay/"


@dataclass(frozen=True)
class _Open:
    """A message in flight."""

    client: str
    sent: Broadcast
    end: float
    limit: AnswerLimit


class AsynchronousEngine(NetworkEngine, RemoteArrivalEngine):
    """Dispatches each client with the current model and takes answers as they arrive."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._open: dict[str, _Open] = {}
        """By message id."""
        self._unsent: set[str] = set()
        self._answers: dict[str, tuple[Broadcast, Update | Failure]] = {}
        """Arrived answers that are not settled, with the broadcasts that they answer."""
        self._delays: dict[str, float] = {}
        """Seconds between dispatch and arrival of each client's last accepted answer."""
        self._read: dict[str, tuple[int, ReportedEvaluation]] = {}
        """Versions and evaluations from clients accepted during this record."""
        self._num_answered = 0

    def begin_record(self, *, keep_models: bool) -> None:
        """Clear the evaluations and missing clients of the previous record."""
        self._read, self._late, self._warnings, self._num_answered = {}, {}, [], 0
        self._missing, self._is_new_round = {}, True

    def absent_clients(self) -> Collection[str]:
        """Find the connected clients; called whenever a client can be dispatched."""
        absent = super().absent_clients()
        self._is_new_round = False
        return absent

    def dispatch(self, broadcasts: Mapping[str, Broadcast]) -> None:
        """Send each client its message; answers count until `network.round_timeout`."""
        seconds = self._experiment.network.round_timeout
        messages: dict[int, Message] = {}
        asked: dict[int, tuple[str, Broadcast]] = {}
        for name, broadcast in broadcasts.items():
            # Its evaluation belongs to the current or the previous record.
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
            limit = limit_answer(self._assembly, self.sizes[name])
            self._open[request_id] = _Open(name, broadcast, end, limit)
        self._unsent |= {asked[node][0] for node in asked.keys() - sent.keys()}

    def arrivals(self, seconds: float) -> dict[str, bool]:
        """Return the clients that are back within `seconds`, and whether their answer was lost."""
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
        """Return the answer of a client that is back."""
        return self._answers[client][1]

    def settle(self, client: str, *, seconds: float | None) -> None:
        """Record whether an answer was accepted; the client's next message reports it."""
        sent, _ = self._answers.pop(client)
        late = self._late.pop(client, None)
        if seconds is None:
            # Its data may have changed since its introduction.
            self._registry.ask_for_introduction([client])
            return
        self._num_answered += 1
        assert sent.dispatch is not None
        assert sent.version is not None
        self._accepted[client], self._delays[client] = sent.dispatch, seconds
        if late is not None:
            self._read[client] = sent.version, late

    def keep(self, accepted: Sequence[str], following: Callable[[], Broadcast]) -> None:
        """Close a record: its evaluations belong to the previous record."""
        self._round = following().round - 1
        self.previous_evaluation = gather_evaluations(
            {n: each for n, (_, each) in self._read.items()}
        )
        versions = [version for version, _ in self._read.values()]
        self.read_versions = (min(versions), max(versions)) if versions else None

    def evaluate_last_round(
        self, broadcast: Broadcast
    ) -> tuple[RoundEvaluation | None, dict[str, Any]]:
        """Drop all messages in flight and ask connected clients to evaluate the last model."""
        self._open, self.read_versions = {}, None
        return super().evaluate_last_round(broadcast)

    def remarks(self) -> dict[str, Any]:
        """Return the reasons why clients are missing or refused, and warnings."""
        away = self.sizes.keys() - self._connected.keys()
        self._missing |= {**dict.fromkeys(away, "not connected"), **self._resting}
        return super().remarks()

    def state(self) -> Tensors:
        """Return the last accepted dispatch of each client with its delay, and silences."""
        delays = {
            f"{_DELAY}{name}": torch.tensor(seconds, dtype=torch.float64)
            for name, seconds in self._delays.items()
        }
        return {**super().state(), **delays}

    def restore(
        self, state: Tensors, record: Mapping[str, Any], folder: Path | None = None
    ) -> None:
        """Continue from the result of `state`."""
        super().restore(state, record, folder)
        self._delays = {name: float(each) for name, each in take_group(state, _DELAY).items()}

    def _compose(
        self, kind: Kind, broadcast: Broadcast, names: Sequence[str], *, reads: bool
    ) -> dict[str, Message]:
        composed = super()._compose(kind, broadcast, names, reads=reads)
        return {
            name: Message({**each.values, "delay": self._delays.get(name, 0.0)}, each.arrays)
            for name, each in composed.items()
        }

    def _look(self) -> dict[str, bool]:
        """Collect arrived answers, and drop messages whose deadline has passed."""
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
            if now < asked.end:
                continue
            del self._open[request_id]
            found[asked.client] = True
            seconds = self._experiment.network.round_timeout
            self._missing[asked.client] = f"no answer within {seconds:g} s"
            self._silent.note_silence([asked.client], self._round + 1)
        return found

    def _take(self, asked: _Open, reply: Reply) -> bool:
        """Keep a client's answer; return whether it was lost."""
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
        self._note_late(asked.client, message)
        return update.to(self._device)
