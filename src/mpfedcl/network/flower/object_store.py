"""What the server has stored of clients' answers, object by object, by Flower's own calls."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
from flwr.proto.error_pb2 import Error
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.superlink.grid import HttpGrid

from mpfedcl.network.flower.answers import NotYetError
from mpfedcl.network.message import MessageError

_ENVELOPE = 2**12
"""Bytes of a response beside the object in it."""


@dataclass(frozen=True)
class Announced:
    """An answer of which the server knows; its objects need not have come yet."""

    request_id: str
    """The message that it answers; the server has checked that this was sent to its sender."""
    root: str
    """Its outermost object."""
    error: Error | None
    """What it is, where it is nothing else."""


class ObjectStore:
    """The objects of one run's answers, over the connection of Flower's grid."""

    def __init__(self, grid: HttpGrid) -> None:
        self._grid = grid
        self._thread = threading.local()
        connection = getattr(grid._runtime_client, "_client", None)
        if isinstance(connection, httpx.Client):
            # Called when the head of a response has come, and not yet its body.
            hooks = connection.event_hooks
            connection.event_hooks = {**hooks, "response": [*hooks["response"], self._measure]}

    def announced(self, request_ids: Sequence[str]) -> list[Announced]:
        """Return the answers to these messages that have come since; each is returned once."""
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
        """Return an object of at most so many bytes; `NotYetError` where it has not come."""
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
        """Let the server forget an answer with all its objects."""
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
