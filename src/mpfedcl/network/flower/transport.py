"""A transport over Flower's grid.

Flower's own pull waits for minutes if a client was killed while sending, and it unpacks replies of
any size. This module fetches replies object by object, with size limits, in threads that a deadline
can abandon.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from flwr.app import Message as FlowerMessage
from flwr.common.constant import ErrorCode
from flwr.proto.error_pb2 import Error as FlowerError
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.superlink.grid import HttpGrid

from mpfedcl.network.flower.records import (
    MESSAGE_TYPES,
    NotYetError,
    open_answer,
    read_object,
    to_records,
)
from mpfedcl.network.transport import AnswerLimit, Kind, Message, MessageError, Reply

_LONGEST_REASON = 500
_REVOKED = "its key was revoked"
_GONE = {
    ErrorCode.MESSAGE_UNAVAILABLE: "its message was lost",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "its answer was lost",
    ErrorCode.NODE_UNAVAILABLE: "it went away",
}
"""Flower's error codes for lost messages and clients; the SuperLink sends these."""
_LATE_SECONDS = 5.0
"""Additional lifetime of a message in Flower, so that our deadline passes first."""
_NODES_SECONDS = 30.0
"""Time limit for the list of connected nodes."""
OPEN_SECONDS = 1.0
"""Seconds after which the fetch of an answer continues in the background."""
THREAD_NAME = "mpfedcl call"

_Result = TypeVar("_Result")


@dataclass
class _Arrival:
    """An announced answer that has not been read; its objects may not have arrived yet."""

    root: str
    """Id of the root object."""
    error: FlowerError | None = None
    missing: str | None = None
    """An object that had not arrived; nothing else is fetched before it is available."""
    opening: "Future[Reply | None] | None" = None


class FlowerTransport:
    """Carries messages over Flower's grid, and polls for replies at each `receive`."""

    def __init__(
        self, grid: HttpGrid, admits: Callable[[str, bytes], bool] = lambda _name, _key: True
    ) -> None:
        self._grid = grid
        self._admits = admits
        """Whether a client's key is still valid: (name, key) -> answer."""
        self._keys: dict[int, tuple[str, bytes]] = {}
        """Name and key of each node."""
        self._asked: dict[str, int] = {}
        """The node that each message was sent to."""
        self._arrivals: dict[str, _Arrival] = {}
        """By message id of the request."""
        self._looking: Future[PullAppMessagesResponse] | None = None
        self._ends: dict[str, float] = {}
        """When each message expires; until then its answer is kept."""

    def connected_nodes(self) -> Mapping[int, str]:
        """Return the nodes that are online with their registered names."""
        listing = call(lambda: list(self._grid.get_nodes()))
        if not is_done(listing, _NODES_SECONDS):
            return {}
        found = {each.node_id: (each.name, each.public_key) for each in listing.result()}
        self._keys |= found
        return {node: name for node, (name, key) in found.items() if self._admits(name, key)}

    def send(
        self, kind: Kind, messages: Mapping[int, Message], timeout: float, *, seconds: float
    ) -> dict[int, str]:
        """Send one message to each node."""
        end = time.monotonic() + seconds
        sent: dict[int, str] = {}

        def push() -> None:
            for node, message in messages.items():
                records, lasts = to_records(message), timeout + _LATE_SECONDS
                pushed = FlowerMessage(records, node, MESSAGE_TYPES[kind], ttl=lasts)
                identities: list[Any] = []
                with contextlib.suppress(ObjectPushError):
                    identities = list(self._grid.push_messages([pushed]))
                if time.monotonic() > end:
                    return
                if identities and identities[0]:
                    sent[node] = str(identities[0])

        pushing = call(push)
        if is_done(pushing, seconds):
            pushing.result()
        found = dict(sent)
        self._ends |= dict.fromkeys(found.values(), end - seconds + timeout)
        self._asked |= {request_id: node for node, request_id in found.items()}
        return found

    def receive(self, limits: Mapping[str, AnswerLimit], seconds: float) -> list[Reply]:
        """Fetch replies; at most one answer is in memory at a time."""
        end = time.monotonic() + seconds
        self._forget_expired(limits)
        known = list(self._arrivals)
        # Announced answers first: a poll is expensive with many open messages.
        if not (replies := self._open_some(known, limits, end)):
            self._look(limits, end)
            new = [each for each in self._arrivals if each not in known]
            replies = self._open_some(new, limits, end)
        return [self._check_key(each) for each in replies]

    def _check_key(self, reply: Reply) -> Reply:
        """Return the reply, unless its sender's key was revoked after it was asked."""
        known = self._keys.get(self._asked.pop(reply.request_id, 0))
        if known is None or self._admits(*known):
            return reply
        return Reply(reply.request_id, failure="gone", reason=_REVOKED)

    def _open_some(
        self, request_ids: Sequence[str], limits: Mapping[str, AnswerLimit], end: float
    ) -> list[Reply]:
        """Return the errors among these answers, or else the first complete answer."""
        asked = {each: self._arrivals[each] for each in request_ids if each in limits}
        failures = [_describe(each, e.error) for each, e in asked.items() if e.error is not None]
        for failure in failures:
            self._discard(self._arrivals.pop(failure.request_id).root)
        if failures:
            return failures
        for request_id, arrival in asked.items():
            if time.monotonic() > end:
                break
            # A hanging fetch is not waited for again.
            patience = 0.0 if arrival.opening else min(OPEN_SECONDS, end - time.monotonic())
            if arrival.opening is None:
                work = partial(self._open, request_id, arrival, limits[request_id])
                arrival.opening = call(work)
            opening = arrival.opening
            if is_done(opening, patience):
                arrival.opening = None
                if reply := opening.result():
                    del self._arrivals[request_id]
                    return [reply]
        return []

    def _look(self, limits: Mapping[str, AnswerLimit], end: float) -> None:
        """Record announced answers, each once; the server has checked their senders."""
        wanted = [each for each in limits if each not in self._arrivals]
        if self._looking is None and wanted:
            request = PullAppMessagesRequest(message_ids=wanted)
            self._looking = call(lambda: self._grid._runtime_client.PullMessages(request))
        if self._looking is None or not is_done(self._looking, end - time.monotonic()):
            return
        announced, self._looking = self._looking.result(), None
        for each in announced.messages_list:
            error = each.error if each.HasField("error") else None
            arrival = _Arrival(each.metadata.message_id, error)
            self._arrivals.setdefault(each.metadata.reply_to_message_id, arrival)

    def _open(self, request_id: str, arrival: _Arrival, limit: AnswerLimit) -> Reply | None:
        """Read one client's answer; None if a part has not arrived."""
        try:
            if arrival.missing is not None:
                self.fetch(arrival.missing, limit.array_bytes)
                arrival.missing = None
            reply = Reply(request_id, open_answer(arrival.root, self.fetch, limit))
        except NotYetError as missing:
            arrival.missing = missing.object_id
            return None
        # A bad answer affects only the client that sent it.
        except Exception as error:
            why = f": {error}" if isinstance(error, MessageError) else f" ({type(error).__name__})"
            reason = _on_one_line(f"its answer cannot be read{why}")
            reply = Reply(request_id, failure="unreadable", reason=reason)
        self._discard(arrival.root)
        return reply

    def _forget_expired(self, limits: Mapping[str, AnswerLimit]) -> None:
        """Discard answers that arrived too late; other callers may ask for the rest."""
        now = time.monotonic()
        self._ends = {each: end for each, end in self._ends.items() if end > now or each in limits}
        self._asked = {each: node for each, node in self._asked.items() if each in self._ends}
        for request_id in self._arrivals.keys() - self._ends.keys() - limits.keys():
            self._discard(self._arrivals.pop(request_id).root)

    def fetch(self, object_id: str, most: int) -> bytes:
        """Return an object of at most `most` bytes; raise `NotYetError` if it has not arrived."""
        run_id = self._grid.run.run_id
        request = PullObjectRequest(node=self._grid.node, run_id=run_id, object_id=object_id)
        # Flower's server accepts no larger request than 8 MB, so this fetches no larger object.
        return read_object(self._grid._runtime_client.PullObject(request), object_id, most)

    def _discard(self, root: str) -> None:
        """Delete an answer with all its objects on the server."""
        request = ConfirmMessageReceivedRequest(
            node=self._grid.node, run_id=self._grid.run.run_id, message_object_id=root
        )

        def discard() -> None:
            with contextlib.suppress(Exception):
                self._grid._runtime_client.ConfirmMessageReceived(request)

        call(discard)


def _describe(request_id: str, error: FlowerError) -> Reply:
    if error.code in _GONE:
        return Reply(request_id, failure="gone", reason=_GONE[error.code])
    reason = _on_one_line(error.reason) or f"Flower's error {error.code}"
    return Reply(request_id, failure="failed", reason=reason)


def _on_one_line(text: str) -> str:
    """Return a client's text made safe for records and terminals."""
    line = " ".join(text[: 4 * _LONGEST_REASON].split())
    return "".join(sign for sign in line if sign.isprintable())[:_LONGEST_REASON]


def call(work: Callable[[], _Result]) -> "Future[_Result]":
    """Run work in a daemon thread; it may hang."""
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    # The process would wait for the threads of an executor when it ends.
    threading.Thread(target=run, name=THREAD_NAME, daemon=True).start()
    return future


def is_done(future: "Future[_Result]", seconds: float) -> bool:
    """Wait at most `seconds` for a call; return whether it has ended."""
    wait([future], max(0.0, seconds))
    return future.done()
