"""The client's executor, here a thread: when it is let in, and what a killed one leaves."""

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomli_w
from executed_runs import echo, pull, run_of, send
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse
from flwr.supernode.fleet_http_client import FleetHttpClient
from lab_fixtures import Connect, connect_fixture, lab_fixture  # noqa: F401  -- fixtures
from superlinks import RunningServer

from mpfedcl.core.errors import InvalidInput
from mpfedcl.network.flower import client_executor
from mpfedcl.network.flower.client_executor import take_part
from mpfedcl.network.flower.fleet import FleetNode
from mpfedcl.network.flower.records import from_records
from mpfedcl.network.message import Kind, Message
from mpfedcl.network.setup.folders import ClientFolder
from mpfedcl.network.setup.keys import make_node_key

pytestmark = pytest.mark.whole


class Ended(BaseException):
    """Ends a client of a test."""


def begin(
    lab: RunningServer, name: str, handle: Callable[[Kind, Message], Message], said: list[str]
) -> threading.Thread:
    folder = ClientFolder.open(lab.folder.root, name)
    folder.settings.write_text(tomli_w.dumps({"server": lab.address}))

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
    deadline = time.monotonic() + 120
    while not (found := [each for each in said if words in each]):
        assert time.monotonic() < deadline, said
        time.sleep(0.02)
    return found[0]


@pytest.mark.usefixtures("plain_connections")
def test_what_a_killed_process_was_working_on_is_not_waited_for(
    lab: RunningServer, connect: Connect
) -> None:
    said: list[str] = []
    folder = ClientFolder.open(lab.folder.root, "b")
    place = client_executor._Place(folder)
    killed = connect("b")
    place.enter(killed.enter(None))
    number = killed.number
    with run_of(lab) as grid:
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

        thread = begin(lab, "b", work, said)
        reply = pull(grid, identity)
        assert reply.error.reason == "its process was killed during this work"
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
    lab: RunningServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_executor, "_ASK_SECONDS", 0.05)

    def end(kind: Kind, message: Message) -> Message:
        raise Ended

    first, said = connect("c"), list[str]()
    number = first.enter(None)
    thread = begin(lab, "c", end, said)
    # It was never in: nothing is said of a client that was killed.
    why = wait_for(said, "The server does not let c in yet")
    assert "does not know the client's key yet" in why
    assert "killed" not in why
    first.leave()
    wait_for(said, "c takes part at")
    with run_of(lab) as grid:
        send(grid, number)
        thread.join(30)
    # It has been in, and another has taken its place.
    first.enter(None)
    said.clear()
    thread = begin(lab, "c", end, said)
    assert "killed less than a minute ago" in wait_for(said, "does not let c in yet")
    first.leave()
    wait_for(said, "c takes part at")
    with run_of(lab) as grid:
        send(grid, number)
        thread.join(30)
    assert len(said) == 2


@pytest.mark.usefixtures("plain_connections")
def test_a_client_that_may_never_come_in_gives_up(
    lab: RunningServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(client_executor, "_ASK_SECONDS", 0.05)
    monkeypatch.setattr(client_executor, "_REFUSED_SECONDS", 0.2)
    folder = ClientFolder(tmp_path, "stranger", lab.address)
    folder.settings.write_text("")
    source = ClientFolder.open(lab.folder.root, "c")
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


@pytest.mark.usefixtures("plain_connections")
@pytest.mark.parametrize(("seconds", "wait"), [(0.0, 0.5), (0.3, 3.0)])
def test_a_slow_server_is_asked_less_often(
    seconds: float, wait: float, lab: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ClientFolder.open(lab.folder.root, "c")
    folder.settings.write_text(tomli_w.dumps({"server": lab.address}))
    plainly, waits = FleetHttpClient.PullMessages, list[float]()

    def pull_slowly(client: FleetHttpClient, request: PullMessagesRequest) -> PullMessagesResponse:
        time.sleep(seconds)
        return plainly(client, request)

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
