"""A transport over Flower's grid."""

import contextlib
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from flwr.app import Message as FlowerMessage
from flwr.proto.error_pb2 import Error as FlowerError
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.superlink.grid import HttpGrid

from mpfedcl.network.flower.answers import NotYetError, open_answer
from mpfedcl.network.flower.background import call, is_done
from mpfedcl.network.flower.object_store import Announced, ObjectStore
from mpfedcl.network.flower.records import to_records
from mpfedcl.network.message import Kind, Message, MessageError
from mpfedcl.network.transport import AnswerLimit, Reply

_MESSAGE_TYPES: dict[Kind, str] = {
    "hello": "query",
    "secure": "query.secure",
    "round": "train",
    "close": "evaluate",
}
_LONGEST_REASON = 500
_GONE = {3: "its message was lost", 4: "its answer was lost", 5: "it went away"}
"""Flower's error codes for what is nobody's fault; the SuperLink itself sends these."""
_LATE_SECONDS = 5.0
"""Seconds that a message outlives our waiting: then we report a late reply, and not Flower."""
_NODES_SECONDS = 30.0
"""Seconds after which a server that does not say who is connected counts as having nobody."""
OPEN_SECONDS = 1.0
"""Seconds after which an answer is fetched in the background, and the others meanwhile."""


@dataclass
class _Arrival:
    """An answer that the server has announced, and that has not been read."""

    root: str
    missing: str | None = None
    """A part of it that had not come: nothing else is fetched before that one is there."""
    opening: "Future[Reply | None] | None" = None


class FlowerTransport:
    """Carries messages over Flower's grid, polling for replies as often as it is asked.

    Flower's own way to pull a reply waits for minutes within one call for the rest of one whose
    client was killed while sending it, and it opens whatever has come. So replies are fetched here.
    """

    def __init__(self, grid: HttpGrid) -> None:
        self._grid = grid
        self._store = ObjectStore(grid)
        self._arrivals: dict[str, _Arrival] = {}
        """By the message that they answer."""
        self._looking: Future[list[Announced]] | None = None

    def connected_nodes(self) -> Mapping[int, str]:
        """Return the nodes that are online, with the names they are registered under."""
        listing = call(lambda: {each.node_id: each.name for each in self._grid.get_nodes()})
        return listing.result() if is_done(listing, _NODES_SECONDS) else {}

    def send(
        self, kind: Kind, messages: Mapping[int, Message], timeout: float, *, seconds: float
    ) -> dict[int, str]:
        """Push one message to each node."""
        end = time.monotonic() + seconds
        sent: dict[int, str] = {}

        def push() -> None:
            for node, message in messages.items():
                records, lasts = to_records(message), timeout + _LATE_SECONDS
                pushed = FlowerMessage(records, node, _MESSAGE_TYPES[kind], ttl=lasts)
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
        """Fetch and read the replies that have come; at most one is held here at a time."""
        end = time.monotonic() + seconds
        self._forget_others(limits)
        known = list(self._arrivals)
        # Of those that are known to be there first: each look costs by how many are waited for.
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
        """Return the first of these answers that can be read now."""
        for request_id in request_ids:
            if time.monotonic() > end:
                break
            arrival = self._arrivals[request_id]
            work = partial(self._open, request_id, arrival, limits[request_id])
            opening = arrival.opening or call(work)
            # One that hangs is looked at again, and not waited for, each time.
            patience = 0.0 if arrival.opening else min(OPEN_SECONDS, end - time.monotonic())
            arrival.opening = opening
            if is_done(opening, patience):
                arrival.opening = None
                if reply := opening.result():
                    del self._arrivals[request_id]
                    return reply
        return None

    def _look(self, limits: Mapping[str, AnswerLimit], end: float) -> list[Reply]:
        """Note whose answers have come; return those that are nothing but an error."""
        wanted = [each for each in limits if each not in self._arrivals]
        if self._looking is None and wanted:
            self._looking = call(lambda: self._store.announced(wanted))
        if self._looking is None or not is_done(self._looking, end - time.monotonic()):
            return []
        announced, self._looking = self._looking.result(), None
        failures = []
        for each in announced:
            if each.request_id not in limits:
                # Asked for before, and nobody waits for it any more.
                self._discard(each.root)
            elif each.error is not None:
                failures.append(_describe(each.request_id, each.error))
                self._discard(each.root)
            else:
                self._arrivals.setdefault(each.request_id, _Arrival(each.root))
        return failures

    def _open(self, request_id: str, arrival: _Arrival, limit: AnswerLimit) -> Reply | None:
        """Read one client's answer; None where a part of it is still on its way."""
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
        # Whatever one client sends, and however it is stored, costs that client alone.
        except Exception as error:
            reply = _unreadable(request_id, f" ({type(error).__name__})")
        self._discard(arrival.root)
        return reply

    def _forget_others(self, limits: Mapping[str, AnswerLimit]) -> None:
        """Forget answers that nobody waits for any more: they came too late."""
        for request_id in self._arrivals.keys() - limits.keys():
            self._discard(self._arrivals.pop(request_id).root)

    def _discard(self, root: str) -> None:
        """Let the server forget what it has stored of an answer."""

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
    """Return a stranger's words as they may stand in a record or on a terminal."""
    line = " ".join(text[: 4 * _LONGEST_REASON].split())
    return "".join(sign for sign in line if sign.isprintable())[:_LONGEST_REASON]
