"""A transport over Flower's grid."""

import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait
from typing import Any

from flwr.app import Message as FlowerMessage
from flwr.serverapp import Grid

from mpfedcl.network.flower.records import from_records, to_records
from mpfedcl.network.message import Kind, Message, MessageError
from mpfedcl.network.transport import Reply

_MESSAGE_TYPES: dict[Kind, str] = {"hello": "query", "round": "train", "close": "evaluate"}
_LONGEST_REASON = 500
_GONE = {3: "its message was lost", 4: "its answer was lost", 5: "it went away"}
"""Flower's error codes for what is nobody's fault; the SuperLink itself sends these."""
_LATE_SECONDS = 5.0
"""Seconds that a message outlives our waiting: then we report a late reply, and not Flower."""
PULL_SECONDS = 5.0
"""After which a pull is left to finish in the background."""
_MOST_SLOW_PULLS = 100


class FlowerTransport:
    """Carries messages over Flower's grid, polling for replies as often as it is asked."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._slow_pulls: dict[str, Future[list[FlowerMessage]]] = {}

    def connected_nodes(self) -> Mapping[int, str]:
        """Return the nodes that are online, with the names they are registered under."""
        return {node.node_id: node.name for node in self._grid.get_nodes()}

    def send(self, kind: Kind, messages: Mapping[int, Message], timeout: float) -> dict[int, str]:
        """Push one message to each node."""
        sent = {}
        seconds = timeout + _LATE_SECONDS
        for node, message in messages.items():
            pushed = FlowerMessage(to_records(message), node, _MESSAGE_TYPES[kind], ttl=seconds)
            identities: list[Any] = list(self._grid.push_messages([pushed]))
            if identities and identities[0]:
                sent[node] = str(identities[0])
        return sent

    def receive(self, request_ids: Iterable[str]) -> list[Reply]:
        """Pull the replies that have come.

        Flower waits for minutes within one pull for the rest of a reply whose client was killed
        while sending it. So each is pulled by itself, and one that takes long in the background.
        """
        replies: list[Reply] = []
        for request_id in request_ids:
            slow = self._slow_pulls.pop(request_id, None)
            pull = slow or self._start_pull(request_id)
            wait([pull], 0 if slow else PULL_SECONDS)
            if pull.done():
                replies += map(_read, pull.result())
            else:
                self._slow_pulls[request_id] = pull
        # Of rounds long over: nobody asks for them any more.
        for oldest in list(self._slow_pulls)[:-_MOST_SLOW_PULLS]:
            del self._slow_pulls[oldest]
        return replies

    def _start_pull(self, request_id: str) -> "Future[list[FlowerMessage]]":
        future: Future[list[FlowerMessage]] = Future()

        def pull() -> None:
            try:
                future.set_result(list(self._grid.pull_messages([request_id])))
            except BaseException as error:
                future.set_exception(error)

        # An executor would be waited for when this process ends.
        threading.Thread(target=pull, daemon=True).start()
        return future


def _read(reply: FlowerMessage) -> Reply:
    request_id = reply.metadata.reply_to_message_id
    if reply.has_error():
        code, reason = reply.error.code, _on_one_line(reply.error.reason or "")
        if code in _GONE:
            return Reply(request_id, failure="gone", reason=_GONE[code])
        return Reply(request_id, failure="failed", reason=reason or f"Flower's error {code}")
    try:
        return Reply(request_id, from_records(reply.content))
    except MessageError as error:
        reason = f"its answer cannot be read: {error}"
        return Reply(request_id, failure="unreadable", reason=reason)


def _on_one_line(text: str) -> str:
    """Return a stranger's words as they may stand in a record or on a terminal."""
    line = " ".join(text[: 4 * _LONGEST_REASON].split())
    return "".join(sign for sign in line if sign.isprintable())[:_LONGEST_REASON]
