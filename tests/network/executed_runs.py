"""Runs that are begun as the server's executor does it, and messages in them."""

import contextlib
import time
from collections.abc import Iterator

import numpy
from flwr.app import Message as FlowerMessage
from flwr.proto.runtime_pb2 import PullTaskInputRequest
from flwr.supercore.task_identity import TaskIdentity
from superlinks import RunningServer

from mpfedcl.network.flower.client import answer
from mpfedcl.network.flower.control import stop_run, submit
from mpfedcl.network.flower.fleet import FleetNode, Request
from mpfedcl.network.flower.records import to_records
from mpfedcl.network.flower.server import _Grid, _open, _wait_for_task
from mpfedcl.network.transport import Kind, Message

SUPERLINK_NODE = 1


@contextlib.contextmanager
def run_of(server: RunningServer) -> Iterator[_Grid]:
    """Begin a run, as the server's executor does."""
    number = submit(server.folder, {"settings": "rounds=1"})
    grid = _Grid(server.folder, _wait_for_task(server.folder))
    task = grid._runtime_client.PullTaskInput(PullTaskInputRequest())
    run = _open(task)
    assert run.run_id == number
    assert run.override_config == {"settings": "rounds=1"}
    grid.set_run(run)
    try:
        yield grid
    finally:
        stop_run(server.folder, number)
        grid.close()


def send(grid: _Grid, node: int, kind: str = "train", size: int = 6) -> str:
    # The clients of a test are in the same process, and have said who they are.
    TaskIdentity.node_id, TaskIdentity.run_id = SUPERLINK_NODE, grid.run.run_id
    content = to_records(Message({"x": 1}, {"averaged/w": numpy.arange(float(size))}))
    [identity] = grid.push_messages([FlowerMessage(content, node, kind, ttl=60)])
    return identity


def pull(grid: _Grid, identity: str) -> FlowerMessage:
    deadline = time.monotonic() + 120
    while not (found := list(grid.pull_messages([identity]))):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found[0]


def echo(kind: Kind, message: Message) -> Message:
    return Message({"kind": kind, **message.values}, message.arrays)


def reply_to(node: FleetNode, request: Request) -> None:
    node.reply(answer(request.header, lambda: node.open(request), echo))
