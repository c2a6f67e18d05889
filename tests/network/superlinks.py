"""Flower's own server in a thread of the test, with our access control and TLS.

Also connections of clients to it, runs, and messages in them.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest
import uvicorn
from flwr.app import Message as FlowerMessage
from flwr.proto.runtime_pb2 import PullTaskInputRequest
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.main import create_app

from mpfedcl.network.flower.client import SuperNode, answer
from mpfedcl.network.flower.control import register_clients, stop_run, submit
from mpfedcl.network.flower.programs import write_connection
from mpfedcl.network.flower.records import to_records
from mpfedcl.network.flower.server import _Grid, _open, _wait_for_task
from mpfedcl.network.flower.superlink import add_guards
from mpfedcl.network.flower.transport import THREAD_NAME
from mpfedcl.network.setup.folders import ClientFolder, ServerFolder, make_federation
from mpfedcl.network.setup.keys import make_node_key
from mpfedcl.network.transport import Kind, Message
from process_federation import free_port

SUPERLINK_NODE = 1
Connect = Callable[[str], SuperNode]
"""(name) -> a connection with the key of that client."""


def wait_for_calls() -> None:
    """Wait for the background work of a transport.

    Flower interrupts a process that sends requests for a finished run: here, the test process.
    """
    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:
            thread.join(10)


class RunningServer:
    """A federation's folder, its server, and the requests that it got."""

    def __init__(self, folder: ServerFolder) -> None:
        self.folder = folder
        self.address = f"127.0.0.1:{folder.port}"
        self.asked: list[str] = []
        """The paths of all requests."""
        self.app = create_app()
        # Only registered keys.
        self.app.state.enable_supernode_auth = True
        add_guards(self.app, folder.read_secret(), folder.server)

    async def __call__(self, scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        self.asked.append(str(scope.get("path")))
        await self.app(scope, receive, send)


@contextlib.contextmanager
def running_server(root: Path, *clients: str) -> Iterator[RunningServer]:
    """Run the server of a new federation."""
    folder = make_federation(root, clients, None, free_port())
    write_connection(folder, "127.0.0.1")
    server = RunningServer(folder)
    config = uvicorn.Config(
        server,
        host="127.0.0.1",
        port=folder.port,
        log_level="error",
        ws="none",
        ssl_certfile=folder.server / "server.pem",
        ssl_keyfile=folder.server / "server.key",
    )
    program = uvicorn.Server(config)
    thread = threading.Thread(target=program.run, daemon=True)
    thread.start()
    try:
        while not program.started:
            assert thread.is_alive()
            time.sleep(0.02)
        yield server
    finally:
        program.should_exit = True
        thread.join(20)


@pytest.fixture(scope="module", name="lab")
def lab_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Flower's server; it knows the keys of three clients."""
    with running_server(tmp_path_factory.mktemp("server") / "lab", "a", "b", "c") as server:
        register_clients(server.folder)
        yield server


@pytest.fixture(name="connect")
def connect_fixture(lab: RunningServer, tmp_path: Path) -> Iterator[Connect]:
    """Connect to the server with the key of a client; without a name, with an unknown one."""
    unknown_key = tmp_path / "unknown.key"
    make_node_key(unknown_key, tmp_path / "unknown.pub")
    with contextlib.ExitStack() as stack:

        def connect(name: str) -> SuperNode:
            key = ClientFolder.open(lab.folder.root, name).key if name else unknown_key
            node = SuperNode(lab.address, key, lab.folder.authority)
            stack.callback(node.close)
            return node

        yield connect


@contextlib.contextmanager
def run_of(server: RunningServer) -> Iterator[_Grid]:
    """Begin a run, as the server's executor does."""
    number = submit(server.folder, {"rounds": "1"})
    grid = _Grid(server.folder, _wait_for_task(server.folder))
    task = grid._runtime_client.PullTaskInput(PullTaskInputRequest())
    run = _open(task)
    assert run.run_id == number
    assert run.override_config == {"rounds": "1"}
    grid.set_run(run)
    try:
        yield grid
    finally:
        stop_run(server.folder, number)
        grid.close()


def send(grid: _Grid, node: int, kind: str = "train", size: int = 6) -> str:
    # The clients of a test are in the same process and have already identified it.
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


def reply_to(node: SuperNode, request: FlowerMessage) -> None:
    node.reply(answer(request, lambda: node.open(request), echo))
