"""The executors and Flower's own server: real requests, real keys, and an app that nobody opens."""

from pathlib import Path

import httpx
import numpy
import pytest
from executed_runs import echo, pull, reply_to, run_of, send
from flwr.app import Error, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers
from lab_fixtures import Connect, connect_fixture, lab_fixture  # noqa: F401  -- fixtures
from sqlalchemy.exc import OperationalError
from superlinks import RunningServer, running_server

from mpfedcl.core.errors import InvalidInput
from mpfedcl.network.flower import fleet
from mpfedcl.network.flower.access import ShowSecret
from mpfedcl.network.flower.apps import answer
from mpfedcl.network.flower.control import register_clients, submit
from mpfedcl.network.flower.fleet import NotLetInError, NotTakenError, read_request, write_request
from mpfedcl.network.flower.records import from_records, to_records
from mpfedcl.network.flower.server_executor import _open
from mpfedcl.network.message import Kind, Message, MessageError
from mpfedcl.network.transport import AnswerLimit

pytestmark = pytest.mark.whole


def test_only_keys_that_were_let_in_and_each_once(lab: RunningServer, connect: Connect) -> None:
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
    assert register_clients(lab.folder) == []


def test_a_message_there_and_back_and_nobody_asks_for_the_app(
    lab: RunningServer, connect: Connect
) -> None:
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
    with pytest.raises(NotTakenError):
        node.reply(answer(request.header, lambda: Message({}), echo))
    # Its objects have been fetched, and are gone.
    with pytest.raises(MessageError, match="it did not get the whole request"):
        node.open(request)
    node.leave()
    assert {"/v1/fleet/pull-object", "/v1/fleet/push-object"} < set(lab.asked)
    assert not [path for path in lab.asked if "fab" in path]


def test_a_request_of_a_server_that_is_too_large_is_not_opened(
    lab: RunningServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = connect("a")
    number = node.enter(None)
    with run_of(lab) as grid:
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


# The server's executor


def test_the_app_that_came_with_a_run_is_not_looked_at(lab: RunningServer) -> None:
    with run_of(lab):
        pass
    with pytest.raises(
        InvalidInput, match="the run's app is 'evil/app'; this server runs only mpfedcl's"
    ):
        _open(_task("evil/app"))
    assert _open(_task("mpfedcl/mpfedcl")).fab_id == "mpfedcl/mpfedcl"


def _task(app: str):  # type: ignore[no-untyped-def]
    from flwr.proto.run_pb2 import Run
    from flwr.proto.runtime_pb2 import PullTaskInputResponse

    return PullTaskInputResponse(run=Run(run_id=1, fab_id=app, fab_version="1"), task_id=1)


def test_without_the_secret_there_is_no_task_and_no_run(lab: RunningServer) -> None:
    wanted = AcquireTaskRequest(supported_task_types=["flwr-serverapp"])
    for interceptors in ([], [ShowSecret("x" * 43)]):
        with (
            RuntimeHttpClient.from_server_address(lab.address, True, None, interceptors) as client,
            pytest.raises(httpx.HTTPStatusError) as refused,
        ):
            client.AcquireTask(wanted)
        assert refused.value.response.status_code == 401
    kept = lab.folder.secret.read_text()
    reasons = {
        "x" * 43: "does not accept the secret in",
        "": "holds 0 characters; a secret must have 32 or more",
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
        with pytest.raises(InvalidInput, match="does not exist; the server must be started once"):
            submit(lab.folder, {})
    finally:
        lab.folder.secret.write_text(kept)


def test_a_busy_database_is_asked_again(
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


def test_no_server(lab: RunningServer, tmp_path: Path) -> None:
    with running_server(tmp_path / "lab", "a") as gone:
        pass
    with pytest.raises(InvalidInput, match=r"does not answer at .* it must be running"):
        submit(gone.folder, {})
