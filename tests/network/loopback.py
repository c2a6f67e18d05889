"""Flower's grid within one process: the real apps, and every message serialised as on the wire."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from mpfedcl.network.flower.apps import client_app

Tamper = Callable[[str, FlowerMessage, FlowerMessage], FlowerMessage | list[FlowerMessage] | None]
"""(client, request, reply) -> what the server gets; None: nothing ever comes."""


class LoopbackGrid(Grid):
    """Runs clients as their messages are pulled. Nodes may come and go between rounds."""

    def __init__(self, tamper: Tamper = lambda _client, _request, reply: reply) -> None:
        self.nodes: dict[int, tuple[str, dict[str, Any]]] = {}
        self.requests: list[tuple[str, FlowerMessage]] = []
        self.replies: list[tuple[str, FlowerMessage]] = []
        self._tamper = tamper
        self._waiting: dict[str, FlowerMessage] = {}
        # Flower's own processes are told who they are before an app runs in them.
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1

    def join(self, node: int, registered: str = "", **config: Any) -> None:
        """Let a client come; `registered` is the name of its key."""
        self.nodes[node] = (registered, config)

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def get_nodes(self) -> list[NodeInfo]:
        return [NodeInfo(node_id=node, name=name) for node, (name, _) in self.nodes.items()]

    def push_messages(self, messages: Iterable[FlowerMessage]) -> list[str]:
        identities = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
            wired = _send(message)
            self._waiting[wired.metadata.message_id] = wired
            identities.append(wired.metadata.message_id)
        return identities

    def pull_messages(self, message_ids: Iterable[str]) -> list[FlowerMessage]:
        replies = []
        for identity in message_ids:
            request = self._waiting.pop(identity, None)
            if request is None or request.metadata.dst_node_id not in self.nodes:
                continue
            _, config = self.nodes[request.metadata.dst_node_id]
            name = str(config["name"])
            self.requests.append((name, request))
            context = Context(1, 0, config, RecordDict(), {}, 0)
            said = self._tamper(name, request, client_app(request, context))
            for reply in said if isinstance(said, list) else [said] if said else []:
                wired = _send(reply)
                self.replies.append((name, wired))
                replies.append(wired)
        return replies

    def send_and_receive(
        self, messages: Iterable[FlowerMessage], *, timeout: float | None = None
    ) -> list[FlowerMessage]:
        raise AssertionError("the transport looks for answers by itself")

    def set_run(self, run: Run) -> None:
        raise AssertionError("not needed")

    @property
    def run(self) -> Run:
        raise AssertionError("not needed")

    def create_message(self, *_: Any, **__: Any) -> FlowerMessage:
        raise AssertionError("outdated")


def _send(message: FlowerMessage) -> FlowerMessage:
    """Return a message as it arrives: turned into bytes, and read again from them."""
    objects = {name: each.deflate() for name, each in get_all_nested_objects(message).items()}
    arrived = inflate_object_from_contents(message.object_id, objects)
    assert isinstance(arrived, FlowerMessage)
    arrived.metadata.__dict__["_message_id"] = message.object_id
    return arrived


def join_all(grid: LoopbackGrid, folder: Path, count: int, **config: Any) -> None:
    """Let clients come that hold the parts of the experiment's own partition."""
    for share in range(count):
        name = f"client-{share}"
        node_config: Mapping[str, Any] = {"share": share, "memory": str(folder / name), **config}
        grid.join(share + 1, name, name=name, **node_config)
