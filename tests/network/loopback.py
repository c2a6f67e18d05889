"""Flower's grid within one process: the real apps, and every message serialized as on the wire."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Message as FlowerMessage
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ConfirmMessageReceivedResponse,
    PullObjectRequest,
    PullObjectResponse,
)
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid
from pydantic import TypeAdapter

from mpfedcl.network.client.client import NetworkClient
from mpfedcl.network.client.policy import BUILT_IN
from mpfedcl.network.flower.client import answer
from mpfedcl.network.setup.folders import ClientSettings
from opened_records import from_records
from small_experiments import VirtualTime

Tamper = Callable[[str, FlowerMessage, FlowerMessage], FlowerMessage | list[FlowerMessage] | None]
"""(client, request, reply) -> what the server gets; None: nothing ever comes."""
Objects = dict[str, bytes]
TamperObjects = Callable[[str, FlowerMessage, Objects], Objects]
"""(client, reply, its objects by name) -> the objects that are stored; an empty one never comes."""


class LoopbackGrid(HttpGrid):
    """Runs clients as their messages are pulled. Nodes may come and go between rounds."""

    def __init__(self, tamper: Tamper = lambda _client, _request, reply: reply) -> None:
        super().__init__(token="loopback")
        self.nodes: dict[int, tuple[str, dict[str, Any]]] = {}
        self.requests: list[tuple[str, FlowerMessage]] = []
        self.replies: list[tuple[str, FlowerMessage]] = []
        self.tamper_objects: TamperObjects = lambda _client, _reply, objects: objects
        self.objects: dict[str, Objects] = {}
        """What is stored, by the outermost object that it belongs to."""
        self._tamper = tamper
        self._waiting: dict[str, FlowerMessage] = {}
        # Flower identifies its own processes before an app runs in them.
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1

    def join(self, node: int, **config: Any) -> None:
        """Connect a client; the name of its key is its own."""
        allow = {
            kind: (BUILT_IN, *str(config.pop(kind)).split())
            for kind in ("methods", "models")
            if config.get(kind)
        }
        if allow:
            config["policy"] = {**config.get("policy", {}), "allow": allow}
        self.nodes[node] = (str(config["name"]), config)

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def get_nodes(self) -> list[NodeInfo]:
        return [NodeInfo(node_id=node, name=name) for node, (name, _) in list(self.nodes.items())]

    def push_messages(self, messages: Iterable[FlowerMessage]) -> list[str]:
        identities = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
            wired = _send(message)
            self._waiting[wired.metadata.message_id] = wired
            identities.append(wired.metadata.message_id)
        return identities

    @property
    def _runtime_client(self) -> Any:
        """The calls of Flower's client for what the server has stored."""
        return self

    def PullMessages(  # noqa: N802  -- Flower's name
        self, request: PullAppMessagesRequest
    ) -> PullAppMessagesResponse:
        found = PullAppMessagesResponse()
        for identity in request.message_ids:
            asked = self._waiting.pop(identity, None)
            if asked is None or asked.metadata.dst_node_id not in self.nodes:
                continue
            for reply in self._answer(asked):
                found.messages_list.append(message_to_proto(remove_content_from_message(reply)))
        return found

    def _answer(self, request: FlowerMessage) -> list[FlowerMessage]:
        _, config = self.nodes[request.metadata.dst_node_id]
        name = str(config["name"])
        self.requests.append((name, request))
        # A new client for each message, as after a kill: all that it knows is on disk.
        client = NetworkClient(TypeAdapter(ClientSettings).validate_python(config))
        reply = answer(request, lambda: from_records(request.content), client.answer)
        result = self._tamper(name, request, reply)
        replies = result if isinstance(result, list) else [result] if result else []
        for reply in replies:
            root = reply.metadata.__dict__["_message_id"] = reply.object_id
            self.objects[root] = self.tamper_objects(name, reply, _deflate(reply))
        self.replies += [(name, reply) for reply in replies]
        return replies

    def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:  # noqa: N802
        stored = list(self.objects.values())
        found = [each[request.object_id] for each in stored if request.object_id in each]
        content = max(found, default=b"")
        return PullObjectResponse(
            object_found=bool(found), object_available=content != b"", object_content=content
        )

    def ConfirmMessageReceived(  # noqa: N802
        self, request: ConfirmMessageReceivedRequest
    ) -> ConfirmMessageReceivedResponse:
        self.objects.pop(request.message_object_id, None)
        return ConfirmMessageReceivedResponse()

    def send_and_receive(
        self, messages: Iterable[FlowerMessage], *, timeout: float | None = None
    ) -> list[FlowerMessage]:
        raise AssertionError("the transport looks for answers by itself")

    def set_run(self, run: Run) -> None:
        raise AssertionError("not needed")

    @property
    def run(self) -> Run:
        return Run.create_empty(1)

    def create_message(self, *_: Any, **__: Any) -> FlowerMessage:
        raise AssertionError("outdated")


def _deflate(message: FlowerMessage) -> Objects:
    return {name: each.deflate() for name, each in get_all_nested_objects(message).items()}


def _send(message: FlowerMessage) -> FlowerMessage:
    """Return a message as it arrives: serialized and parsed again."""
    arrived = inflate_object_from_contents(message.object_id, _deflate(message))
    assert isinstance(arrived, FlowerMessage)
    arrived.metadata.__dict__["_message_id"] = message.object_id
    return arrived


def join_all(grid: LoopbackGrid, folder: Path, count: int, **config: Any) -> None:
    """Connect clients that hold the parts of the experiment's partition."""
    for share in range(count):
        name = f"client-{share}"
        node_config: Mapping[str, Any] = {"share": share, "state": str(folder / name), **config}
        grid.join(share + 1, name=name, **node_config)


class PacedGrid(LoopbackGrid):
    """Answers to training requests arrive a number of seconds later, by client."""

    def __init__(
        self,
        clock: VirtualTime,
        seconds: Mapping[str, float],
        tamper: Tamper = lambda _client, _request, reply: reply,
    ) -> None:
        super().__init__(tamper)
        self.sent: list[tuple[float, str]] = []
        """The times at which clients were sent training requests."""
        self._clock, self._seconds = clock, seconds
        self._due: dict[str, float] = {}

    def push_messages(self, messages: Iterable[FlowerMessage]) -> list[str]:
        pushed = list(messages)
        identities = super().push_messages(pushed)
        for identity, message in zip(identities, pushed, strict=True):
            if str(message.metadata.message_type) == "train":
                name = str(self.nodes[message.metadata.dst_node_id][1]["name"])
                self.sent.append((self._clock.now, name))
                self._due[identity] = self._clock.now + self._seconds.get(name, 0.0)
        return identities

    def PullMessages(  # noqa: N802  -- Flower's name
        self, request: PullAppMessagesRequest
    ) -> PullAppMessagesResponse:
        now = self._clock.now
        here = [each for each in request.message_ids if self._due.get(each, now) <= now]
        return super().PullMessages(PullAppMessagesRequest(message_ids=here))
