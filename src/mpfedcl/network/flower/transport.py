"""A transport over Flower's grid.

Flower's own pull waits for minutes if a client was killed while sending, and it unpacks replies of
any size. This module fetches replies object by object, with size limits, in threads that a deadline
can abandon.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import httpx
from flwr.app import Message as FlowerMessage
from flwr.proto.error_pb2 import Error as FlowerError
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.superlink.grid import HttpGrid

from mpfedcl.network.flower.records import MESSAGE_TYPES, NotYetError, open_answer, to_records
from mpfedcl.network.transport import AnswerLimit, Kind, Message, MessageError, Reply

_LONGEST_REASON = 500
_GONE = {3: "its message was lost", 4: "its answer was lost", 5: "it went away"}
"""Flower's error codes for lost messages and clients; the SuperLink sends these."""
_LATE_SECONDS = 5.0
"""Additional lifetime of a message in Flower, so that our deadline passes first."""
_NODES_SECONDS = 30.0
"""Time limit for the list of connected nodes."""
OPEN_SECONDS = 1.0
"""Seconds after which the fetch of an answer continues in the background."""
THREAD_NAME = "mpfedcl call"
_ENVELOPE = 2**12
"""Bytes of a response in addition to its object."""

_Result = TypeVar("_Result")


@dataclass
class _Arrival:
    """An announced answer that has not been read."""

    root: str
    missing: str | None = None
    """An object that had not arrived; nothing else is fetched before it is available."""
    opening: "Future[Reply | None] | None" = None


class FlowerTransport:
    """Carries messages over Flower's grid, and looks for replies at each `receive`."""

    def __init__(self, grid: HttpGrid) -> None:
        self._grid = grid
        self._store = ObjectStore(grid)
        self._arrivals: dict[str, _Arrival] = {}
        """By message id of the request."""
        self._looking: Future[list[Announced]] | None = None

    def connected_nodes(self) -> Mapping[int, str]:
        """Return the nodes that are online with their registered names."""
        listing = call(lambda: {each.node_id: each.name for each in self._grid.get_nodes()})
        return listing.result() if is_done(listing, _NODES_SECONDS) else {}

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
        return dict(sent)

    def receive(self, limits: Mapping[str, AnswerLimit], seconds: float) -> list[Reply]:
        """Fetch replies; at most one is in memory at a time."""
        end = time.monotonic() + seconds
        self._forget_others(limits)
        known = list(self._arrivals)
        # Announced answers first: a look is expensive with many open messages.
        if reply := self._open_one(known, limits, end):
            return [reply]
        failures = [each for each in self._look(limits, end) if each.request_id in limits]
        new = [each for each in self._arrivals if each not in known]
        if not failures and (reply := self._open_one(new, limits, end)):
            return [reply]
        return failures

    def _open_one(
        self, request_ids: Iterable[str], limits: Mapping[str, AnswerLimit], end: float
    ) -> Reply | None:
        """Return the first of these answers that is complete."""
        for request_id in request_ids:
            if time.monotonic() > end:
                break
            arrival = self._arrivals[request_id]
            work = partial(self._open, request_id, arrival, limits[request_id])
            opening = arrival.opening or call(work)
            # A hanging fetch is not waited for again.
            patience = 0.0 if arrival.opening else min(OPEN_SECONDS, end - time.monotonic())
            arrival.opening = opening
            if is_done(opening, patience):
                arrival.opening = None
                if reply := opening.result():
                    del self._arrivals[request_id]
                    return reply
        return None

    def _look(self, limits: Mapping[str, AnswerLimit], end: float) -> list[Reply]:
        """Note announced answers; return those that are errors."""
        wanted = [each for each in limits if each not in self._arrivals]
        if self._looking is None and wanted:
            self._looking = call(lambda: self._store.announced(wanted))
        if self._looking is None or not is_done(self._looking, end - time.monotonic()):
            return []
        announced, self._looking = self._looking.result(), None
        failures = []
        for each in announced:
            if each.request_id not in limits:
                # Arrived after its deadline.
                self._discard(each.root)
            elif each.error is not None:
                failures.append(_describe(each.request_id, each.error))
                self._discard(each.root)
            else:
                self._arrivals.setdefault(each.request_id, _Arrival(each.root))
        return failures

    def _open(self, request_id: str, arrival: _Arrival, limit: AnswerLimit) -> Reply | None:
        """Read one client's answer; None if a part has not arrived."""
        try:
            if arrival.missing is not None:
                self._store.fetch(arrival.missing, limit.array_bytes)
                arrival.missing = None
            reply = Reply(request_id, open_answer(arrival.root, self._store.fetch, limit))
        except NotYetError as missing:
            arrival.missing = missing.object_id
            return None
        except MessageError as error:
            reply = _unreadable(request_id, f": {error}")
        # A bad answer affects only the client that sent it.
        except Exception as error:
            reply = _unreadable(request_id, f" ({type(error).__name__})")
        self._discard(arrival.root)
        return reply

    def _forget_others(self, limits: Mapping[str, AnswerLimit]) -> None:
        """Discard answers that arrived too late."""
        for request_id in self._arrivals.keys() - limits.keys():
            self._discard(self._arrivals.pop(request_id).root)

    def _discard(self, root: str) -> None:
        """Delete an answer on the server."""

        def discard() -> None:
            with contextlib.suppress(Exception):
                self._store.discard(root)

        call(discard)


def _describe(request_id: str, error: FlowerError) -> Reply:
    if error.code in _GONE:
        return Reply(request_id, failure="gone", reason=_GONE[error.code])
    reason = _on_one_line(error.reason) or f"Flower's error {error.code}"
    return Reply(request_id, failure="failed", reason=reason)


def _unreadable(request_id: str, why: str) -> Reply:
    reason = _on_one_line(f"its answer cannot be read{why}")
    return Reply(request_id, failure="unreadable", reason=reason)


def _on_one_line(text: str) -> str:
    """Return a client's text made safe for records and terminals."""
    line = " ".join(text[: 4 * _LONGEST_REASON].split())
    return "".join(sign for sign in line if sign.isprintable())[:_LONGEST_REASON]


@dataclass(frozen=True)
class Announced:
    """An answer known to the server; its objects may not have arrived yet."""

    request_id: str
    """The message that it answers; the server has checked the sender."""
    root: str
    """Id of the root object."""
    error: FlowerError | None


class ObjectStore:
    """The stored objects of a run's answers, read over the grid's connection."""

    def __init__(self, grid: HttpGrid) -> None:
        self._grid = grid
        self._thread = threading.local()
        connection = getattr(grid._runtime_client, "_client", None)
        if isinstance(connection, httpx.Client):
            # Called after the headers of a response, before its body.
            hooks = connection.event_hooks
            connection.event_hooks = {**hooks, "response": [*hooks["response"], self._measure]}

    def announced(self, request_ids: Sequence[str]) -> list[Announced]:
        """Return new answers to these messages, each once."""
        request = PullAppMessagesRequest(message_ids=request_ids)
        found = self._grid._runtime_client.PullMessages(request)
        return [
            Announced(
                each.metadata.reply_to_message_id,
                each.metadata.message_id,
                each.error if each.HasField("error") else None,
            )
            for each in found.messages_list
        ]

    def fetch(self, object_id: str, most: int) -> bytes:
        """Return an object of at most `most` bytes; raise `NotYetError` if it has not arrived."""
        run_id = self._grid.run.run_id
        request = PullObjectRequest(node=self._grid.node, run_id=run_id, object_id=object_id)
        self._thread.most = most
        try:
            found = self._grid._runtime_client.PullObject(request)
        finally:
            self._thread.most = None
        if not found.object_found:
            raise MessageError("a part of it was lost")
        if not found.object_available:
            raise NotYetError(object_id)
        content: bytes = found.object_content
        _check_size(len(content), most)
        return content

    def discard(self, root: str) -> None:
        """Delete an answer with all its objects on the server."""
        run_id = self._grid.run.run_id
        request = ConfirmMessageReceivedRequest(
            node=self._grid.node, run_id=run_id, message_object_id=root
        )
        self._grid._runtime_client.ConfirmMessageReceived(request)

    def _measure(self, response: httpx.Response) -> None:
        most = getattr(self._thread, "most", None)
        if most is not None and response.is_success:
            _check_size(int(response.headers.get("content-length", 0)), most + _ENVELOPE)


def _check_size(size: int, most: int) -> None:
    if size > most:
        raise MessageError(f"it is too large: a part of it has {size} bytes; at most {most}")


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
