"""Replies over Flower's grid: one that hangs, is forged or is a bomb costs its own client alone."""

import http.server
import threading
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import httpx
import numpy
import pytest
from conversations import LIMIT, Conversation, answer, wait_until
from flwr.app import Message as FlowerMessage
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.superlink.grid import HttpGrid
from loopback import LoopbackGrid, Objects

from mpfedcl.network.flower.object_store import ObjectStore
from mpfedcl.network.flower.transport import FlowerTransport
from mpfedcl.network.message import Message, MessageError
from mpfedcl.network.transport import Reply


def test_answers_arrive_as_they_were_sent() -> None:
    talk = Conversation(LoopbackGrid(answer))
    for node, reply in talk.hear().items():
        assert reply.message is not None
        assert reply.message.values == {"node": node}
        expected = numpy.array([[0, 1, 2], [3, 4, 5]]) + node
        assert numpy.array_equal(reply.message.arrays["x"], expected)
    # Each comes once, and nothing of it is kept.
    assert talk.hear() == {}
    wait_until(lambda: talk.grid.objects == {})


# Half an answer


def test_half_an_answer_holds_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client was killed in the midst of its upload; its answer counts if the rest comes."""
    held: Objects = {}

    def withhold(client: str, reply: FlowerMessage, objects: Objects) -> Objects:
        if client != "client-2":
            return objects
        held.update(objects)
        # The array's data are missing, and so is all that is sent after them.
        return {name: b"" if b"ArrayChunk" in each[:20] else each for name, each in objects.items()}

    grid = LoopbackGrid(answer)
    grid.tamper_objects = withhold
    talk = Conversation(grid)
    began = time.monotonic()
    assert talk.hear().keys() == {1, 3}
    assert time.monotonic() - began < 60
    # Meanwhile nothing but the part that is missing is asked for.
    asked: list[str] = []
    pull_object = grid.PullObject

    def note(request: PullObjectRequest) -> PullObjectResponse:
        asked.append(request.object_id)
        return pull_object(request)

    monkeypatch.setattr(grid, "PullObject", note)
    assert talk.hear(2) == {}
    assert len(asked) == 1
    grid.objects = dict.fromkeys(grid.objects, held)
    found = talk.hear(2)[2]
    assert found.message is not None
    assert found.message.values == {"node": 2}


def test_an_answer_that_nobody_waits_for_is_forgotten() -> None:
    grid = LoopbackGrid(answer)
    grid.tamper_objects = lambda _client, _reply, objects: dict.fromkeys(objects, b"")
    talk = Conversation(grid)
    assert talk.hear() == {}
    assert len(grid.objects) == 3
    assert talk.hear(1) == {}
    wait_until(lambda: len(grid.objects) == 1)


class HangingGrid(LoopbackGrid):
    """Does not return from calls that concern some nodes, as long as it is told not to."""

    def __init__(self) -> None:
        super().__init__(answer)
        self.stuck: set[int] = set()
        self.go_on = threading.Event()
        self.pushes_hang = self.looks_hang = self.lists_hang = False

    def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:  # noqa: N802
        roots = {root for root, each in list(self.objects.items()) if request.object_id in each}
        sent = {r.metadata.message_id: int(n[-1]) for n, r in self.replies}
        if self.stuck & {sent[root] for root in roots}:
            self.go_on.wait(30)
        return super().PullObject(request)

    def PullMessages(self, request: PullAppMessagesRequest) -> PullAppMessagesResponse:  # noqa: N802
        if self.looks_hang:
            self.go_on.wait(30)
        return super().PullMessages(request)

    def push_messages(self, messages: Any) -> list[str]:
        if self.pushes_hang:
            self.go_on.wait(30)
        return super().push_messages(messages)

    def get_nodes(self) -> Any:
        if self.lists_hang:
            self.go_on.wait(30)
        return super().get_nodes()


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingGrid]:
    monkeypatch.setattr("mpfedcl.network.flower.transport.OPEN_SECONDS", 0.1)
    monkeypatch.setattr("mpfedcl.network.flower.transport._NODES_SECONDS", 0.1)
    grid = HangingGrid()
    yield grid
    grid.go_on.set()


def test_a_call_that_hangs_for_one_client_holds_up_nobody_else(hanging: HangingGrid) -> None:
    hanging.stuck = {1}
    talk = Conversation(hanging)
    assert talk.hear().keys() == {2, 3}
    # It is not started a second time meanwhile.
    count = threading.active_count()
    assert talk.hear(1) == {}
    assert threading.active_count() == count
    hanging.go_on.set()
    wait_until(lambda: talk.hear(1).keys() == {1})


def test_no_call_takes_longer_than_it_may(hanging: HangingGrid) -> None:
    talk = Conversation(hanging)
    hanging.looks_hang = hanging.pushes_hang = hanging.lists_hang = True
    began = time.monotonic()
    assert talk.hear(seconds=0.2) == {}
    assert talk.transport.send("round", {1: Message({})}, 10, seconds=0.2) == {}
    assert talk.transport.connected_nodes() == {}
    assert time.monotonic() - began < 60
    # Answers that were announced to a call which nobody waited for any more are not lost.
    hanging.go_on.set()
    heard: dict[int, Reply] = {}
    wait_until(lambda: heard.update(talk.hear()) or heard.keys() == {1, 2, 3})


def test_what_goes_wrong_with_the_server_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise ConnectionError("the SuperLink has gone")

    grid = LoopbackGrid()
    monkeypatch.setattr(grid, "PullMessages", fail)
    with pytest.raises(ConnectionError, match="the SuperLink has gone"):
        FlowerTransport(grid).receive({"x": LIMIT}, 1.0)


def test_what_goes_wrong_with_one_answer_costs_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = LoopbackGrid(answer)
    talk = Conversation(grid)
    pull_object = grid.PullObject

    def fail(request: PullObjectRequest) -> PullObjectResponse:
        (root,) = (root for name, root in of_clients(grid).items() if name == "client-1")
        if request.object_id == root:
            raise httpx.HTTPError("500")
        return pull_object(request)

    monkeypatch.setattr(grid, "PullObject", fail)
    heard = talk.hear()
    assert heard[1].reason == "its answer cannot be read (HTTPError)"
    assert all(heard[node].message for node in (2, 3))


def of_clients(grid: LoopbackGrid) -> dict[str, str]:
    return {name: reply.metadata.message_id for name, reply in grid.replies}


# Over HTTP


@pytest.fixture
def web_server() -> Iterator[tuple[str, list[bytes]]]:
    """A server that has one object, whatever it is asked for."""
    held: list[bytes] = []
    sent: list[bytes] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", str(len(held[0])))
            self.end_headers()
            with memoryview(held[0]) as body:
                try:
                    for start in range(0, len(body), 2**16):
                        self.wfile.write(body[start : start + 2**16])
                        sent.append(b"")
                except OSError:
                    return

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    held.append(
        PullObjectResponse(
            object_found=True, object_available=True, object_content=bytes(2**26)
        ).SerializeToString()
    )
    yield f"127.0.0.1:{server.server_port}", sent
    server.shutdown()
    server.server_close()
    thread.join()


class LocalGrid(HttpGrid):
    @property
    def run(self) -> Any:
        return LoopbackGrid().run


def test_too_large_an_object_is_not_even_fetched(web_server: tuple[str, list[bytes]]) -> None:
    """Its size is known from the head of the response, before 64 MB have come."""
    address, sent = web_server
    grid = LocalGrid(address, insecure=True, token="x")
    store = ObjectStore(grid)
    tracemalloc.start()
    with pytest.raises(MessageError, match="it is too large: a part of it has 67108"):
        store.fetch("a" * 64, 2**20)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**24
    assert len(sent) < 2**26 / 2**16
    assert store.fetch("a" * 64, 2**26) == bytes(2**26)
    grid.close()
