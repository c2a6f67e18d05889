"""The executors and Flower's own server: real requests, real keys, and an app that nobody opens."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy
import pytest
import tomli_w
from flwr.app import Error, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_client import FleetHttpClient
from superlinks import RunningServer, running_server

from mpfedcl.errors import InvalidInput
from mpfedcl.network.flower import client_executor, fleet
from mpfedcl.network.flower.access import ShowSecret
from mpfedcl.network.flower.apps import answer
from mpfedcl.network.flower.client_executor import take_part
from mpfedcl.network.flower.control import register_clients, stop_run, submit
from mpfedcl.network.flower.fleet import (
    FleetNode,
    NotLetInError,
    NotTakenError,
    Request,
    read_request,
    write_request,
)
from mpfedcl.network.flower.records import from_records, to_records
from mpfedcl.network.flower.server_executor import _Grid, _open, _wait_for_task
from mpfedcl.network.message import Kind, Message, MessageError
from mpfedcl.network.setup.folders import ClientFolder
from mpfedcl.network.setup.keys import make_node_key
from mpfedcl.network.transport import AnswerLimit

SUPERLINK_NODE = 1


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("server") / "lab"
    with running_server(root, "a", "b", "c") as server:
        register_clients(server.folder)
        yield server


Connect = Callable[[str], FleetNode]


@pytest.fixture
def connect(server: RunningServer) -> Iterator[Connect]:
    """Connects to the server with the key of a client; without a name, with an unknown one."""
    with contextlib.ExitStack() as stack:

        def connect(name: str) -> FleetNode:
            key = ClientFolder.open(server.folder.root, name).key if name else None
            node = FleetNode(server.address, key, None)
            stack.callback(node.close)
            return node

        yield connect


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
    deadline = time.monotonic() + 30
    while not (found := list(grid.pull_messages([identity]))):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found[0]


def echo(kind: Kind, message: Message) -> Message:
    return Message({"kind": kind, **message.values}, message.arrays)


def reply_to(node: FleetNode, request: Request) -> None:
    node.reply(answer(request.header, lambda: node.open(request), echo))


def test_only_keys_that_were_let_in_and_each_once(server: RunningServer, connect: Connect) -> None:
    stranger = connect("")
    with pytest.raises(NotLetInError) as refused:
        stranger.enter(None)
    assert not refused.value.is_unsigned
    first, twin = connect("a"), connect("a")
    number = first.enter(None)
    with pytest.raises(NotLetInError):
        twin.enter(None)
    assert twin.is_known_as(number)
    assert not stranger.is_known_as(number)
    # Nobody gets another's place or messages by its number.
    with pytest.raises(NotLetInError):
        stranger.enter(number)
    stranger.number = number
    with pytest.raises(NotLetInError):
        stranger.receive()
    # One whose process was killed goes on at once, without waiting for the server to notice.
    assert twin.enter(number) == number
    twin.leave()
    first.leave()
    assert first.enter(None) == number
    first.leave()
    assert register_clients(server.folder) == []


def test_a_message_there_and_back_and_nobody_asks_for_the_app(
    server: RunningServer, connect: Connect
) -> None:
    node = connect("a")
    number = node.enter(None)
    server.asked.clear()
    with run_of(server) as grid:
        assert [(each.node_id, each.name) for each in grid.get_nodes()] == [(number, "a")]
        assert node.receive() is None
        identity = send(grid, number)
        request = node.receive()
        assert request is not None
        reply_to(node, request)
        reply = pull(grid, identity)
    found = from_records(reply.content)
    assert found.values == {"kind": "round", "x": 1}
    assert numpy.array_equal(found.arrays["averaged/w"], numpy.arange(6.0))
    # The run is over.
    with pytest.raises(NotTakenError):
        node.reply(answer(request.header, lambda: Message({}), echo))
    # Its objects have been fetched, and are gone.
    with pytest.raises(MessageError, match="it did not get the whole request"):
        node.open(request)
    node.leave()
    assert {"/v1/fleet/pull-object", "/v1/fleet/push-object"} < set(server.asked)
    assert not [path for path in server.asked if "fab" in path]


def test_a_request_of_a_server_that_is_too_large_is_not_opened(
    server: RunningServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = connect("a")
    number = node.enter(None)
    with run_of(server) as grid:
        # A thousandth of what honest ones may have, and ten times that.
        limit = AnswerLimit(num_arrays=10, array_bytes=50_000, text_bytes=10_000)
        monkeypatch.setattr(fleet, "LIMIT", limit)
        identity = send(grid, number, size=100_000)
        request = node.receive()
        assert request is not None
        reply_to(node, request)
        assert pull(grid, identity).error.reason == "the request is too large"
        identity = send(grid, number)
        request = node.receive()
        assert request is not None
        reply_to(node, request)
        assert not pull(grid, identity).has_error()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (InvalidInput("one sentence."), "one sentence."),
        (MessageError("round is None"), "round is None"),
        (OSError("/secret/path is full"), "it failed with OSError"),
        (MemoryError(), "it failed with MemoryError"),
    ],
)
def test_failures_come_as_sentences(
    error: Exception, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    TaskIdentity.node_id = TaskIdentity.run_id = TaskIdentity.task_id = 1

    def fail(kind: Kind, message: Message) -> Message:
        raise error

    reply = answer(FlowerMessage(RecordDict(), 1, "train"), lambda: Message({}), fail)
    assert reply.error.reason == said
    assert ("secret" in capsys.readouterr().err) == isinstance(error, OSError)
    reply = answer(FlowerMessage(RecordDict(), 1, "train.other"), lambda: Message({}), echo)
    assert reply.error.reason == "it has no answer to 'train.other'"


# A client's process, here as a thread


class Ended(BaseException):
    """Ends a client of a test."""


def begin(
    server: RunningServer, name: str, handle: Callable[[Kind, Message], Message], said: list[str]
) -> threading.Thread:
    folder = ClientFolder.open(server.folder.root, name)
    folder.settings.write_text(tomli_w.dumps({"server": server.address}))

    def work() -> None:
        with contextlib.suppress(Ended):
            take_part(folder, handle, said.append)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.fixture
def plain_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, but no TLS, as the server of these tests has it."""
    monkeypatch.setattr(
        client_executor, "FleetNode", lambda address, key, **_: FleetNode(address, key, None)
    )


def wait_for(said: list[str], words: str) -> str:
    deadline = time.monotonic() + 30
    while not (found := [each for each in said if words in each]):
        assert time.monotonic() < deadline, said
        time.sleep(0.02)
    return found[0]


@pytest.mark.usefixtures("plain_connections")
def test_what_a_killed_process_was_working_on_is_not_waited_for(
    server: RunningServer, connect: Connect
) -> None:
    said: list[str] = []
    folder = ClientFolder.open(server.folder.root, "b")
    place = client_executor._Place(folder)
    killed = connect("b")
    place.enter(killed.enter(None))
    number = killed.number
    with run_of(server) as grid:
        identity = send(grid, number)
        request = killed.receive()
        assert request is not None
        place.begin(request.header)
        # No word of farewell, and a new process.
        killed._stop_heartbeat()
        killed.number = 0

        def work(kind: Kind, message: Message) -> Message:
            if kind == "close":
                raise Ended
            return echo(kind, message)

        thread = begin(server, "b", work, said)
        reply = pull(grid, identity)
        assert reply.error.reason == "its process was killed at this work"
        wait_for(said, "b takes part at")
        assert place.unfinished() is None
        # It works on.
        assert from_records(pull(grid, send(grid, number)).content).values["kind"] == "round"
        send(grid, number, "evaluate")
        thread.join(30)
    assert place.lost_node() is None
    assert place.known_node() == number
    assert not [each for each in said if "does not let" in each]


@pytest.mark.usefixtures("plain_connections")
def test_why_a_client_is_not_let_in_and_when_it_is(
    server: RunningServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_executor, "_ASK_SECONDS", 0.05)

    def end(kind: Kind, message: Message) -> Message:
        raise Ended

    first, said = connect("c"), list[str]()
    number = first.enter(None)
    thread = begin(server, "c", end, said)
    # It was never in: nothing is said of a client that was killed.
    why = wait_for(said, "The server does not let c in yet")
    assert "does not know the client's key so far" in why
    assert "killed" not in why
    first.leave()
    wait_for(said, "c takes part at")
    with run_of(server) as grid:
        send(grid, number)
        thread.join(30)
    # It has been in, and another has taken its place.
    first.enter(None)
    said.clear()
    thread = begin(server, "c", end, said)
    assert "or one was killed less than a minute ago" in wait_for(said, "does not let c in yet")
    first.leave()
    wait_for(said, "c takes part at")
    with run_of(server) as grid:
        send(grid, number)
        thread.join(30)
    assert len(said) == 2


@pytest.mark.usefixtures("plain_connections")
def test_a_client_that_may_never_come_in_gives_up(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(client_executor, "_ASK_SECONDS", 0.05)
    monkeypatch.setattr(client_executor, "_REFUSED_SECONDS", 0.2)
    folder = ClientFolder(tmp_path, "stranger", server.address)
    folder.settings.write_text("")
    source = ClientFolder.open(server.folder.root, "c")
    make_node_key(folder.key, tmp_path / "node.pub")
    folder.authority.write_bytes(source.authority.read_bytes())
    with pytest.raises(InvalidInput, match="does not let stranger in: it does not know"):
        take_part(folder, echo, lambda _: None)


def test_a_copied_folder_does_not_push_the_client_out(tmp_path: Path) -> None:
    folder = ClientFolder(tmp_path / "here", "a", "x:1")
    copy = ClientFolder(tmp_path / "copy", "a", "x:1")
    for each in (folder, copy):
        each.flower_home.mkdir(parents=True)
    place = client_executor._Place(folder)
    assert (place.known_node(), place.lost_node()) == (None, None)
    place.enter(7)
    assert (place.known_node(), place.lost_node()) == (7, 7)
    (copy.flower_home / "node.json").write_bytes((folder.flower_home / "node.json").read_bytes())
    assert client_executor._Place(copy).lost_node() is None
    place.leave()
    assert (place.known_node(), place.lost_node()) == (7, None)
    for damaged in (b"", b"[]", b"null", b'{"node": "x"}', b"\xff"):
        (folder.flower_home / "node.json").write_bytes(damaged)
        assert (place.known_node(), place.lost_node()) == (None, None)
        (folder.flower_home / "request").write_bytes(damaged)
        assert place.unfinished() is None


def test_a_request_is_written_down_without_its_content() -> None:
    TaskIdentity.node_id = TaskIdentity.run_id = TaskIdentity.task_id = 1
    content = to_records(Message({}, {"averaged/w": numpy.zeros(10_000)}))
    request = FlowerMessage(content, 5, "train", ttl=60)
    request.metadata.__dict__["_message_id"] = "m"
    written = write_request(request)
    assert len(written) < 1000
    found = read_request(written)
    assert (found.metadata.message_id, found.metadata.dst_node_id) == ("m", 5)
    error = FlowerMessage(Error(400, "x"), reply_to=found)
    assert error.metadata.reply_to_message_id == "m"


@pytest.mark.usefixtures("plain_connections")
@pytest.mark.parametrize(("seconds", "wait"), [(0.0, 0.5), (0.3, 3.0)])
def test_a_slow_server_is_asked_less_often(
    seconds: float, wait: float, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ClientFolder.open(server.folder.root, "c")
    folder.settings.write_text(tomli_w.dumps({"server": server.address}))
    pull, waits = FleetHttpClient.PullMessages, list[float]()

    def pull_slowly(client: FleetHttpClient, request: PullMessagesRequest) -> PullMessagesResponse:
        time.sleep(seconds)
        return pull(client, request)

    def note(wait: float) -> None:
        waits.append(wait)
        raise Ended

    monkeypatch.setattr(FleetHttpClient, "PullMessages", pull_slowly)
    clock = SimpleNamespace(sleep=note, monotonic=time.monotonic)
    monkeypatch.setattr(client_executor, "time", clock)
    with pytest.raises(Ended):
        take_part(folder, lambda _kind, message: message, print)
    # A busy machine is slow by itself.
    assert wait <= waits[0] <= wait + 10


# The server's executor


def test_the_app_that_came_with_a_run_is_not_looked_at(server: RunningServer) -> None:
    with run_of(server):
        pass
    with pytest.raises(
        InvalidInput, match="the run's app is 'evil/app'; this server runs mpfedcl's"
    ):
        _open(_task("evil/app"))
    assert _open(_task("mpfedcl/mpfedcl")).fab_id == "mpfedcl/mpfedcl"


def _task(app: str):  # type: ignore[no-untyped-def]
    from flwr.proto.run_pb2 import Run
    from flwr.proto.runtime_pb2 import PullTaskInputResponse

    return PullTaskInputResponse(run=Run(run_id=1, fab_id=app, fab_version="1"), task_id=1)


def test_without_the_secret_there_is_no_task_and_no_run(server: RunningServer) -> None:
    wanted = AcquireTaskRequest(supported_task_types=["flwr-serverapp"])
    for interceptors in ([], [ShowSecret("x" * 43)]):
        with (
            RuntimeHttpClient.from_server_address(
                server.address, True, None, interceptors
            ) as client,
            pytest.raises(httpx.HTTPStatusError) as refused,
        ):
            client.AcquireTask(wanted)
        assert refused.value.response.status_code == 401
    kept = server.folder.secret.read_text()
    reasons = {
        "x" * 43: "does not take the secret in",
        "": "holds 0 characters; a secret must have 32 or more",
        "ä" * 43: "cannot be read",
    }
    try:
        for secret, reason in reasons.items():
            server.folder.secret.write_text(secret)
            for call in (
                lambda: submit(server.folder, {}),
                lambda: register_clients(server.folder),
            ):
                with pytest.raises(InvalidInput, match=reason):
                    call()
        server.folder.secret.unlink()
        with pytest.raises(InvalidInput, match="does not exist; the server must be started once"):
            submit(server.folder, {})
    finally:
        server.folder.secret.write_text(kept)


def test_no_server(server: RunningServer, tmp_path: Path) -> None:
    with running_server(tmp_path / "lab", "a") as gone:
        pass
    with pytest.raises(InvalidInput, match=r"does not answer at .* it must be running"):
        submit(gone.folder, {})
