"""The executors of client and server, with a real SuperLink."""

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy
import pytest
from flwr.app import Error, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers
from flwr.supernode.fleet_http_client import FleetHttpClient
from sqlalchemy.exc import OperationalError
from superlinks import (
    Connect,
    RunningServer,
    connect_fixture,  # noqa: F401  -- a fixture
    echo,
    lab_fixture,  # noqa: F401  -- a fixture
    pull,
    reply_to,
    run_of,
    running_server,
    send,
)

from mpfedcl.core.errors import InvalidInput
from mpfedcl.network.flower import client as flower_client
from mpfedcl.network.flower.client import (
    RefusedError,
    RejectedError,
    answer,
    take_part,
)
from mpfedcl.network.flower.control import ShowSecret, register_clients, submit
from mpfedcl.network.flower.records import to_records
from mpfedcl.network.flower.server import _open
from mpfedcl.network.setup.folders import ClientFolder
from mpfedcl.network.setup.keys import make_node_key
from mpfedcl.network.transport import AnswerLimit, Kind, Message, MessageError
from opened_records import from_records

pytestmark = pytest.mark.whole


class Ended(BaseException):
    """Ends a client of a test."""


def begin(
    lab: RunningServer, name: str, handle: Callable[[Kind, Message], Message], said: list[str]
) -> threading.Thread:
    folder = ClientFolder.open(lab.folder.root, name)

    def work() -> None:
        with contextlib.suppress(Ended):
            take_part(folder, lab.address, handle, said.append)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def wait_for(said: list[str], words: str) -> str:
    deadline = time.monotonic() + 120
    while not (found := [each for each in said if words in each]):
        assert time.monotonic() < deadline, said
        time.sleep(0.02)
    return found[0]


def test_request_of_a_killed_process_is_answered_with_error(
    lab: RunningServer, connect: Connect
) -> None:
    said: list[str] = []
    folder = ClientFolder.open(lab.folder.root, "b")
    place = flower_client._Place(folder)
    killed = connect("b")
    place.enter(killed.enter(None))
    number = killed.number
    with run_of(lab) as grid:
        identity = send(grid, number)
        request = killed.receive()
        assert request is not None
        place.begin(request)
        # A new process after a kill without disconnecting.
        killed._stop_heartbeat()
        killed.number = 0

        def work(kind: Kind, message: Message) -> Message:
            if kind == "close":
                raise Ended
            return echo(kind, message)

        thread = begin(lab, "b", work, said)
        reply = pull(grid, identity)
        assert reply.error.reason == "its process was killed during this work"
        wait_for(said, "b is connected to")
        assert place.unfinished() is None
        # It works on.
        assert from_records(pull(grid, send(grid, number)).content).values["kind"] == "round"
        send(grid, number, "evaluate")
        thread.join(30)
    assert place.lost_node() is None
    assert not [each for each in said if "refuses" in each]


def test_refused_client_gets_the_reason_and_retries(
    lab: RunningServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flower_client, "_ASK_SECONDS", 0.05)

    def end(kind: Kind, message: Message) -> Message:
        raise Ended

    first, said = connect("c"), list[str]()
    number = first.enter(None)
    thread = begin(lab, "c", end, said)
    assert "does not know the client's key" in wait_for(said, "The server refuses c")
    first.leave()
    wait_for(said, "c is connected to")
    with run_of(lab) as grid:
        send(grid, number)
        thread.join(30)
    # It has been in, and another has taken its place.
    first.enter(None)
    said.clear()
    thread = begin(lab, "c", end, said)
    assert "killed less than a minute ago" in wait_for(said, "refuses c")
    first.leave()
    wait_for(said, "c is connected to")
    with run_of(lab) as grid:
        send(grid, number)
        thread.join(30)
    assert len(said) == 2


def test_refused_client_gives_up_after_a_while(
    lab: RunningServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(flower_client, "_ASK_SECONDS", 0.05)
    monkeypatch.setattr(flower_client, "_REFUSED_SECONDS", 0.2)
    folder = ClientFolder(tmp_path, "stranger", lab.address)
    source = ClientFolder.open(lab.folder.root, "c")
    make_node_key(folder.key, tmp_path / "node.pub")
    folder.authority.write_bytes(source.authority.read_bytes())
    with pytest.raises(InvalidInput, match="refuses stranger: it does not know"):
        take_part(folder, lab.address, echo, lambda _: None)


def test_copied_client_folder_does_not_replace_the_client(tmp_path: Path) -> None:
    folder = ClientFolder(tmp_path / "here", "a", "x:1")
    copy = ClientFolder(tmp_path / "copy", "a", "x:1")
    for each in (folder, copy):
        each.flower_home.mkdir(parents=True)
    place = flower_client._Place(folder)
    assert place.lost_node() is None
    place.enter(7)
    assert place.lost_node() == 7
    (copy.flower_home / "node.json").write_bytes((folder.flower_home / "node.json").read_bytes())
    assert flower_client._Place(copy).lost_node() is None
    place.leave()
    assert place.lost_node() is None
    for damaged in (b"", b"[]", b"null", b'{"node": "x"}', b"\xff"):
        (folder.flower_home / "node.json").write_bytes(damaged)
        assert place.lost_node() is None
        (folder.flower_home / "request").write_bytes(damaged)
        assert place.unfinished() is None


@pytest.mark.parametrize(("seconds", "wait"), [(0.0, 0.5), (0.3, 3.0)])
def test_slow_server_is_polled_less_often(
    seconds: float, wait: float, lab: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ClientFolder.open(lab.folder.root, "c")
    plainly, waits = FleetHttpClient.PullMessages, list[float]()

    def pull_slowly(client: FleetHttpClient, request: PullMessagesRequest) -> PullMessagesResponse:
        time.sleep(seconds)
        return plainly(client, request)

    def note(wait: float) -> None:
        waits.append(wait)
        raise Ended

    monkeypatch.setattr(FleetHttpClient, "PullMessages", pull_slowly)
    clock = SimpleNamespace(sleep=note, monotonic=time.monotonic)
    monkeypatch.setattr(flower_client, "time", clock)
    with pytest.raises(Ended):
        take_part(folder, lab.address, lambda _kind, message: message, print)
    # A busy machine is slow by itself.
    assert wait <= waits[0] <= wait + 10


def test_only_registered_keys_connect_once_each(lab: RunningServer, connect: Connect) -> None:
    stranger = connect("")
    with pytest.raises(RefusedError, match="does not know the client's key"):
        stranger.enter(None)
    first, twin = connect("a"), connect("a")
    number = first.enter(None)
    with pytest.raises(RefusedError):
        twin.enter(None)
    # A node number does not give access to another client's messages.
    with pytest.raises(RefusedError):
        stranger.enter(number)
    stranger.number = number
    with pytest.raises(RefusedError):
        stranger.receive()
    # One whose process was killed goes on at once, without waiting for the server to notice.
    assert twin.enter(number) == number
    twin.leave()
    first.leave()
    assert first.enter(None) == number
    first.leave()
    assert sorted(each.name for each in register_clients(lab.folder)) == ["a", "b", "c"]
    assert len(register_clients(lab.folder)) == 3


def test_message_round_trip_never_fetches_the_app(lab: RunningServer, connect: Connect) -> None:
    node = connect("a")
    number = node.enter(None)
    lab.asked.clear()
    with run_of(lab) as grid:
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
    with pytest.raises(RejectedError):
        node.reply(answer(request, lambda: Message({}), echo))
    # Its objects have been fetched, and are gone.
    with pytest.raises(MessageError, match=r"did not get the whole|part of it was lost"):
        node.open(request)
    node.leave()
    assert {"/v1/fleet/pull-object", "/v1/fleet/push-object"} < set(lab.asked)
    assert not [path for path in lab.asked if "fab" in path]


def test_too_large_request_is_not_opened(
    lab: RunningServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = connect("a")
    number = node.enter(None)
    with run_of(lab) as grid:
        # A thousandth of what honest ones may have, and ten times that.
        limit = AnswerLimit(num_arrays=10, array_bytes=50_000, text_bytes=10_000)
        monkeypatch.setattr(flower_client, "LIMIT", limit)
        identity = send(grid, number, size=100_000)
        request = node.receive()
        assert request is not None
        reply_to(node, request)
        assert "is too large" in str(pull(grid, identity).error.reason)
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
def test_client_failures_reach_the_server_as_messages(
    error: Exception, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    TaskIdentity.node_id = TaskIdentity.run_id = TaskIdentity.task_id = 1

    def fail(kind: Kind, message: Message) -> Message:
        raise error

    reply = answer(FlowerMessage(RecordDict(), 1, "train"), lambda: Message({}), fail)
    assert reply.error.reason == said
    assert ("secret" in caplog.text) == isinstance(error, OSError)
    reply = answer(FlowerMessage(RecordDict(), 1, "train.other"), lambda: Message({}), echo)
    assert reply.error.reason == "it cannot answer 'train.other'"


def test_stored_request_has_no_content(tmp_path: Path) -> None:
    TaskIdentity.node_id = TaskIdentity.run_id = TaskIdentity.task_id = 1
    content = to_records(Message({}, {"averaged/w": numpy.zeros(10_000)}))
    request = FlowerMessage(content, 5, "train", ttl=60)
    request.metadata.__dict__["_message_id"] = "m"
    folder = ClientFolder(tmp_path, "a", "x:1")
    place = flower_client._Place(folder)
    place.begin(request)
    assert (folder.flower_home / "request").stat().st_size < 1000
    found = place.unfinished()
    assert found is not None
    assert (found.metadata.message_id, found.metadata.dst_node_id) == ("m", 5)
    error = FlowerMessage(Error(400, "x"), reply_to=found)
    assert error.metadata.reply_to_message_id == "m"


# The server's executor


def test_run_with_another_app_is_rejected(lab: RunningServer) -> None:
    with run_of(lab):
        pass
    with pytest.raises(
        InvalidInput, match="the run's app is 'evil/app'; this server runs only mpfedcl's"
    ):
        _open(_task("evil/app"))
    assert _open(_task("mpfedcl/mpfedcl-app")).fab_id == "mpfedcl/mpfedcl-app"


def _task(app: str):  # type: ignore[no-untyped-def]
    from flwr.proto.run_pb2 import Run
    from flwr.proto.runtime_pb2 import PullTaskInputResponse

    return PullTaskInputResponse(run=Run(run_id=1, fab_id=app, fab_version="1"), task_id=1)


def test_secret_is_required_for_tasks_and_runs(lab: RunningServer) -> None:
    wanted = AcquireTaskRequest(supported_task_types=["flwr-serverapp"])
    authority = lab.folder.authority.read_bytes()
    for interceptors in ([], [ShowSecret("x" * 43)]):
        with (
            RuntimeHttpClient.from_server_address(
                lab.address, False, authority, interceptors
            ) as client,
            pytest.raises(httpx.HTTPStatusError) as refused,
        ):
            client.AcquireTask(wanted)
        assert refused.value.response.status_code == 401
    kept = lab.folder.secret.read_text()
    reasons = {
        "x" * 43: "does not accept the secret in",
        "": "has 0 characters; it must have at least 32",
        "ä" * 43: "cannot be read",
    }
    try:
        for secret, reason in reasons.items():
            lab.folder.secret.write_text(secret)
            for call in (
                lambda: submit(lab.folder, {}),
                lambda: register_clients(lab.folder),
            ):
                with pytest.raises(InvalidInput, match=reason):
                    call()
        lab.folder.secret.unlink()
        with pytest.raises(InvalidInput, match="does not exist; the first start"):
            submit(lab.folder, {})
    finally:
        lab.folder.secret.write_text(kept)


def test_requests_are_retried_while_the_database_is_busy(
    lab: RunningServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself Flower answers 500, which loses a client's answer and ends a run."""
    node = connect("a")
    node.enter(None)
    handlers: list[tuple[object, str]] = [
        (fleet_handlers, "push_messages"),
        (fleet_handlers, "push_object"),
        (fleet_handlers, "confirm_message_received"),
        (runtime_handlers, "push_messages"),
        (runtime_handlers, "pull_messages"),
    ]
    failed: list[str] = []

    def fail_once(module: object, name: str) -> None:
        handle = getattr(module, name)

        def locked(*words: object, **options: object) -> object:
            key = f"{module}.{name}"
            if key not in failed:
                failed.append(key)
                raise OperationalError("UPDATE", {}, Exception("database is locked"))
            return handle(*words, **options)

        monkeypatch.setattr(module, name, locked)

    for module, name in handlers:
        fail_once(module, name)
    with run_of(lab) as grid:
        identity = send(grid, node.number)
        request = node.receive()
        assert request is not None
        reply_to(node, request)
        assert from_records(pull(grid, identity).content).values == {"kind": "round", "x": 1}
    assert len(failed) == len(handlers)
    node.leave()


def test_submit_without_a_running_server_is_rejected(lab: RunningServer, tmp_path: Path) -> None:
    with running_server(tmp_path / "lab", "a") as gone:
        pass
    with pytest.raises(InvalidInput, match=r"does not answer at .* it must be running"):
        submit(gone.folder, {})
