"""Memory bombs and partial answers over Flower's own server, sent with real keys."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy
import pytest
from conversations import LIMIT
from flwr.app import Message as FlowerMessage
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
)
from flwr.supercore.task_identity import TaskIdentity
from loopback import Objects
from superlinks import SUPERLINK_NODE, run_of, running_server, wait_for_calls
from test_flower_transport import PIECES, TABLE, with_array

from mpfedcl.network.flower.client import SuperNode
from mpfedcl.network.flower.control import register_clients
from mpfedcl.network.flower.records import to_records
from mpfedcl.network.flower.server import _Grid
from mpfedcl.network.flower.transport import FlowerTransport
from mpfedcl.network.setup.folders import ClientFolder
from mpfedcl.network.transport import Message, Reply

pytestmark = pytest.mark.whole

NAMES = ("honest", "bomber", "killed")


@pytest.fixture
def grid(tmp_path: Path) -> Iterator[tuple[_Grid, dict[str, SuperNode]]]:
    """A run on a real server, and three clients that are connected to it."""
    with running_server(tmp_path / "lab", *NAMES) as server, ExitStack() as stack:
        register_clients(server.folder)
        nodes = {}
        for name in NAMES:
            key = ClientFolder.open(server.folder.root, name).key
            nodes[name] = SuperNode(server.address, key, server.folder.authority)
            stack.callback(nodes[name].close)
            nodes[name].enter(None)
        grid = stack.enter_context(run_of(server))
        # The clients of this test are in the same process and have already identified it.
        TaskIdentity.node_id, TaskIdentity.run_id = SUPERLINK_NODE, grid.run.run_id
        stack.callback(wait_for_calls)
        yield grid, nodes


def receive(node: SuperNode) -> FlowerMessage:
    end = time.monotonic() + 120
    while (request := node.receive()) is None:
        assert time.monotonic() < end
        time.sleep(0.05)
    node.open(request)
    return request


def answer(request: FlowerMessage, who: str) -> FlowerMessage:
    content = to_records(Message({"who": who}, {"w": numpy.arange(3.0) + sum(who.encode())}))
    reply = FlowerMessage(content, reply_to=request)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    return reply


def announce(node: SuperNode, reply: FlowerMessage, tree: ObjectTree) -> str:
    """Announce an answer to the server; return the function that sends its objects."""
    reply.metadata.__dict__["_message_id"] = tree.object_id
    taken = node._client.PushMessages(
        PushMessagesRequest(
            node=Node(node_id=node.number),
            messages_list=[message_to_proto(remove_content_from_message(reply))],
            message_object_trees=[tree],
        )
    )
    return str(taken.session_id)


def push(node: SuperNode, reply: FlowerMessage, session: str, objects: Objects) -> None:
    for name, content in objects.items():
        request = PushObjectRequest(
            node=Node(node_id=node.number),
            run_id=reply.metadata.run_id,
            session_id=session,
            object_id=name,
            object_content=content,
        )
        assert node._client.PushObject(request).stored


def plant(root: str, objects: Objects) -> ObjectTree:
    """Return the tree of all objects that a client announces."""
    children = [ObjectTree(object_id=name) for name in objects if name != root]
    return ObjectTree(object_id=root, children=children)


def test_memory_bomb_and_partial_answer_affect_only_their_clients(
    grid: tuple[_Grid, dict[str, SuperNode]],
) -> None:
    running, nodes = grid
    transport = FlowerTransport(running)
    numbers = {node.number: name for name, node in nodes.items()}
    assert dict(transport.connected_nodes()) == numbers
    messages = dict.fromkeys(numbers, Message({}))
    ids = transport.send("round", messages, 60, seconds=20)
    requests = {name: receive(node) for name, node in nodes.items()}

    nodes["honest"].reply(answer(requests["honest"], "honest"))
    bomb = answer(requests["bomber"], "bomber")
    objects = with_array(**TABLE, pieces=PIECES)(bomb)
    # The server checks that each object matches its name.
    forged = objects.pop(bomb.metadata.message_id)
    root = get_object_id(forged)
    objects[root] = forged
    session = announce(nodes["bomber"], bomb, plant(root, objects))
    push(nodes["bomber"], bomb, session, objects)
    half = answer(requests["killed"], "killed")
    held = {name: each.deflate() for name, each in get_all_nested_objects(half).items()}
    session = announce(nodes["killed"], half, get_object_tree(half))

    waiting = {identity: numbers[node] for node, identity in ids.items()}
    heard: dict[str, Reply] = {}
    end = time.monotonic() + 120
    while not heard.keys() >= {"honest", "bomber"}:
        assert time.monotonic() < end, heard
        limits = {each: LIMIT for each, name in waiting.items() if name not in heard}
        heard |= {waiting[each.request_id]: each for each in transport.receive(limits, 3.0)}
    limits = {each: LIMIT for each, name in waiting.items() if name not in heard}
    assert transport.receive(limits, 1.0) == []
    assert heard.keys() == {"honest", "bomber"}
    assert heard["honest"].message is not None
    assert numpy.array_equal(heard["honest"].message.arrays["w"], numpy.arange(3) + sum(b"honest"))
    assert "it is too large: its arrays have more than" in heard["bomber"].reason
    # The client was not killed after all.
    push(nodes["killed"], half, session, held)
    last = next(identity for identity, name in waiting.items() if name == "killed")
    (reply,) = transport.receive({last: LIMIT}, 60.0)
    assert reply.message is not None
    assert reply.message.values == {"who": "killed"}
