"""The transport over Flower: time limits, incomplete answers, malformed objects."""

import json
import re
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy
import pytest
from conversations import LIMIT, Conversation, answer, wait_until
from federations import records_of
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_id
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes
from hypothesis.extra.numpy import arrays as arrays_of
from loopback import LoopbackGrid, Objects
from safetensors.numpy import save

from mpfedcl.network.flower.records import PACKED, open_answer, to_records
from mpfedcl.network.flower.transport import FlowerTransport
from mpfedcl.network.transport import Arrays, Message, MessageError, Reply
from opened_records import from_records
from small_experiments import VirtualTime


def test_answers_round_trip() -> None:
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


def test_partial_answer_does_not_delay_others(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_answers_are_kept_for_other_callers() -> None:
    grid = LoopbackGrid(answer)
    talk = Conversation(grid)
    # All are announced, and one is fetched.
    (first,) = talk.transport.receive(dict.fromkeys(talk.ids.values(), LIMIT), 10)
    others = {node for node, each in talk.ids.items() if each != first.request_id}
    assert [talk.hear(node).keys() for node in others] == [{node} for node in others]
    assert talk.hear() == {}


def test_errors_are_kept_for_other_callers() -> None:
    def fail(_: str, request: FlowerMessage, __: FlowerMessage) -> FlowerMessage:
        return FlowerMessage(Error(400, "no data"), reply_to=request)

    talk = Conversation(LoopbackGrid(fail))
    talk.transport._look(dict.fromkeys(talk.ids.values(), LIMIT), time.monotonic() + 60)
    assert [talk.hear(node)[node].reason for node in (1, 2, 3)] == ["no data"] * 3
    assert talk.hear() == {}


def test_expired_answers_are_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualTime()
    monkeypatch.setattr("mpfedcl.network.flower.transport.time", clock)
    grid = LoopbackGrid(answer)
    grid.tamper_objects = lambda _client, _reply, objects: dict.fromkeys(objects, b"")
    talk = Conversation(grid)
    assert talk.hear() == {}
    assert len(grid.objects) == 3
    clock.sleep(11)
    assert talk.hear(1) == {}
    wait_until(lambda: len(grid.objects) == 1)
    assert talk.transport._arrivals.keys() == talk.transport._ends.keys() == {talk.ids[1]}


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

    def PullMessages(  # noqa: N802  -- Flower's name
        self, request: PullAppMessagesRequest
    ) -> PullAppMessagesResponse:
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


def test_hanging_call_for_one_client_does_not_delay_others(hanging: HangingGrid) -> None:
    hanging.stuck = {1}
    talk = Conversation(hanging)
    assert talk.hear().keys() == {2, 3}
    # It is not started a second time meanwhile.
    count = threading.active_count()
    assert talk.hear(1) == {}
    assert threading.active_count() == count
    hanging.go_on.set()
    wait_until(lambda: talk.hear(1).keys() == {1})


def test_no_transport_call_exceeds_its_time_limit(hanging: HangingGrid) -> None:
    talk = Conversation(hanging)
    hanging.looks_hang = hanging.pushes_hang = hanging.lists_hang = True
    began = time.monotonic()
    assert talk.hear(seconds=0.2) == {}
    assert talk.transport.send("round", {1: Message({})}, 10, seconds=0.2) == {}
    assert talk.transport.connected_nodes() == {}
    assert time.monotonic() - began < 60
    # Answers announced to an abandoned call are not lost.
    hanging.go_on.set()
    heard: dict[int, Reply] = {}
    wait_until(lambda: heard.update(talk.hear()) or heard.keys() == {1, 2, 3})


def test_server_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise ConnectionError("the SuperLink has gone")

    grid = LoopbackGrid()
    monkeypatch.setattr(grid, "PullMessages", fail)
    with pytest.raises(ConnectionError, match="the SuperLink has gone"):
        FlowerTransport(grid).receive({"x": LIMIT}, 1.0)


def test_error_in_one_answer_affects_only_that_answer(monkeypatch: pytest.MonkeyPatch) -> None:
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


def forge(kind: str, children: list[str], body: bytes) -> bytes:
    """Return an object as Flower stores it."""
    return f"{kind} {','.join(children)} {len(body)}".encode() + b"\0" + body


def store(*contents: bytes) -> Objects:
    return {get_object_id(each): each for each in contents}


def file_pieces(size: int) -> tuple[bytes, bytes]:
    """Return the header of a safetensors file of floats, followed by zeros."""
    data = save({"x": numpy.zeros(size)})
    return data[: len(data) - 8 * size], data[len(data) - 8 * size :]


def bomb(times: int) -> tuple[dict[str, Any], list[bytes]]:
    """Return an array that names one megabyte many times, and its pieces."""
    piece = forge("ArrayChunk", [], bytes(2**20))
    head, _ = file_pieces(times * 2**17)
    return {"arraychunk_ids": [0, *[1] * times]}, [forge("ArrayChunk", [], head), piece]


def many(count: int, size: int = 0) -> bytes:
    """Return a file of so many arrays of no numbers, whose list is at least so long."""
    return save({f"{number}{'x' * (size // count)}": numpy.zeros(0) for number in range(count)})


def with_array(**changes: Any) -> Callable[[FlowerMessage], Objects]:
    """Return an answer whose only array is described otherwise."""

    pieces: list[bytes] = changes.pop("pieces")

    def make(reply: FlowerMessage) -> Objects:
        table = {"dtype": "float64", "shape": [1], "stype": "safetensors", "arraychunk_ids": [0]}
        described = {name: each for name, each in {**table, **changes}.items() if each is not None}
        names = [get_object_id(each) for each in pieces]
        array = forge("Array", names, json.dumps(described).encode())
        return with_record({PACKED: get_object_id(array)}, array, *pieces)(reply)

    return make


def with_record(
    names: Any, *objects: bytes, values: bytes | None = None
) -> Callable[[FlowerMessage], Objects]:
    """Return an answer whose arrays are these."""

    def make(reply: FlowerMessage) -> Objects:
        children = list(names.values()) if isinstance(names, dict) else []
        record = forge("ArrayRecord", [str(c) for c in children], json.dumps(names).encode())
        config = ConfigRecord({"json": "{}"}).deflate() if values is None else values
        references = {"values": get_object_id(config), "arrays": get_object_id(record)}
        content = forge("RecordDict", list(references.values()), json.dumps(references).encode())
        return with_content(content, record, config, *objects)(reply)

    return make


def with_content(*objects: bytes) -> Callable[[FlowerMessage], Objects]:
    """Return an answer whose message holds the first of these."""

    def make(reply: FlowerMessage) -> Objects:
        body = reply.deflate().partition(b"\0")[2]
        root = forge("Message", [get_object_id(objects[0])], body)
        return {reply.metadata.message_id: root, **store(*objects)}

    return make


HEAD, ZEROS = file_pieces(4)
GOOD = forge("ArrayChunk", [], HEAD + ZEROS)
TABLE, PIECES = bomb(64)
SMALL = forge("Array", [get_object_id(GOOD)], json.dumps({**TABLE, "arraychunk_ids": [0]}).encode())
ARCHIVE = forge("ArrayChunk", [], b"PK\x03\x04" + bytes(100))
FORGED: dict[str, tuple[Callable[[FlowerMessage], Objects], str]] = {
    "a bomb": (with_array(**TABLE, pieces=PIECES), "it is too large: its arrays have more than"),
    "arrays of their own": (
        with_record(dict.fromkeys("abc", get_object_id(SMALL)), SMALL, GOOD),
        "its arrays must be packed into one called 'packed'",
    ),
    "an array beside": (
        with_record(dict.fromkeys([PACKED, "x"], get_object_id(SMALL)), SMALL, GOOD),
        "its arrays must be packed into one called 'packed'",
    ),
    "many arrays": (
        with_array(pieces=[forge("ArrayChunk", [], many(5))]),
        "it has 5 arrays; at most 4",
    ),
    "a long list of arrays": (
        with_array(pieces=[forge("ArrayChunk", [], many(4, 2**14))]),
        "it is too large: the header of its arrays has more than 2560 bytes",
    ),
    "a large piece": (
        with_array(pieces=[forge("ArrayChunk", [], bytes(2**23))]),
        "it is too large: a part of it has",
    ),
    "a large list": (
        with_array(pieces=[GOOD], dtype="x" * 2**22),
        "it is too large: a part of it has",
    ),
    "a large text": (
        with_record({}, values=ConfigRecord({"json": "x" * 2**17}).deflate()),
        "it is too large: a part of it has",
    ),
    "no list of pieces": (with_array(arraychunk_ids=None, pieces=[GOOD]), r"\(KeyError\)"),
    "a piece that is not there": (with_array(arraychunk_ids=[7], pieces=[GOOD]), "IndexError"),
    "pieces by name": (with_array(arraychunk_ids=["0"], pieces=[GOOD]), r"\(TypeError\)"),
    "a piece that was lost": (
        lambda reply: {n: c for n, c in with_array(pieces=[GOOD])(reply).items() if c != GOOD},
        "a part of it was lost",
    ),
    "a record as a piece": (with_array(pieces=[ArrayRecord({}).deflate()]), r"\(ValueError\)"),
    "no JSON": (with_content(forge("RecordDict", [], b"{")), r"\(JSONDecodeError\)"),
    "a list of records": (with_content(forge("RecordDict", [], b"[]")), "names no objects"),
    "depth without end": (with_content(forge("RecordDict", [], b"[" * 10**6)), "RecursionError"),
    "records by number": (with_record({"x": 5}), "names no objects"),
    "values that are no record": (with_record({}, values=b"?"), r"\(ValueError\)"),
    "arrays in place of records": (with_content(SMALL, GOOD), r"\(ValueError\)"),
    "an archive": (with_array(pieces=[ARCHIVE]), "its arrays cannot be read"),
    "too short a file": (
        with_array(pieces=[forge("ArrayChunk", [], HEAD + ZEROS[1:])]),
        r"its arrays cannot be read \(SafetensorError\)",
    ),
    "too long a file": (
        with_array(pieces=[forge("ArrayChunk", [], HEAD + ZEROS + b"\0")]),
        r"its arrays cannot be read \(SafetensorError\)",
    ),
    "nothing": (lambda reply: {reply.metadata.message_id: b"\0"}, r"\(ValueError\)"),
    "not even that": (lambda _: {}, "a part of it was lost"),
    "bytes": (lambda reply: {reply.metadata.message_id: bytes(range(255, 0, -1))}, "Error"),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_objects_affect_only_their_client(name: str) -> None:
    make, reason = FORGED[name]
    grid = LoopbackGrid(answer)
    grid.tamper_objects = lambda client, reply, objects: (
        make(reply) if client == "client-2" else objects
    )
    talk = Conversation(grid)
    tracemalloc.start()
    heard = talk.hear()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert heard[2].failure == "unreadable"
    assert heard[2].reason.startswith("its answer cannot be read")
    assert re.search(reason, heard[2].reason), heard[2].reason
    assert all(heard[node].message for node in (1, 3))
    assert peak < 2 * LIMIT.array_bytes + 2**23
    wait_until(lambda: grid.objects == {})


def make_sound_answer() -> tuple[str, Objects]:
    """Return the outermost object of an answer with one array, and all its objects."""
    content = to_records(Message({"a": 1}, {"x": numpy.zeros(4)}))
    held = {n: each.deflate() for n, each in get_all_nested_objects(content).items()}
    root = forge("Message", [content.object_id], b"")
    return get_object_id(root), {**held, **store(root)}


ROOT, SOUND = make_sound_answer()


@st.composite
def damaged(draw: st.DrawFn) -> Objects:
    """Return a sound answer with some of its objects changed, cut, exchanged or gone."""
    objects = dict(SOUND)
    names = sorted(objects)
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=3)):
        content = objects.get(name, b"")
        start = draw(st.integers(0, len(content)))
        end = draw(st.integers(start, len(content)))
        some = st.one_of(
            st.binary(max_size=8),
            st.sampled_from(
                [b"[", b"{}", b"-1", b"null", b'"x"', b"1e400", b"9" * 30, b"\0", b" "]
            ),
            st.sampled_from(names).map(str.encode),
        )
        objects[name] = content[:start] + draw(some) + content[end:]
        if draw(st.integers(0, 9)) == 0:
            objects[name] = SOUND[draw(st.sampled_from(names))]
    return objects


@given(damaged())
def test_damaged_objects_are_parsed_or_raise_an_exception(objects: Objects) -> None:
    """A malformed answer raises an exception quickly and without much memory."""

    def fetch(object_id: str, most: int) -> bytes:
        if object_id not in objects:
            raise MessageError("a part of it was lost")
        assert len(objects[object_id]) <= most
        return objects[object_id]

    try:
        message = open_answer(ROOT, fetch, LIMIT)
    except Exception:
        return
    assert isinstance(message.values, dict)
    assert sum(each.nbytes for each in message.arrays.values()) <= LIMIT.array_bytes


def test_client_cannot_answer_for_another() -> None:
    """The server identifies the sender of an answer by the request, not by its content."""
    grid = LoopbackGrid(answer)
    talk = Conversation(grid)

    def pretend(client: str, reply: FlowerMessage, objects: Objects) -> Objects:
        root = reply.metadata.message_id
        if client == "client-1":
            own, others = talk.ids[1].encode(), talk.ids[2].encode()
            objects[root] = objects[root].replace(own, others)
            assert others in objects[root]
        return objects

    grid.tamper_objects = pretend
    for node, reply in talk.hear().items():
        assert reply.message is not None
        assert reply.message.values == {"node": node}


def test_error_reply_needs_no_objects() -> None:
    grid = LoopbackGrid(lambda _, request, __: FlowerMessage(Error(9, "a\nb"), reply_to=request))
    grid.tamper_objects = lambda _client, _reply, _objects: {}
    for reply in Conversation(grid).hear().values():
        assert (reply.failure, reply.reason) == ("failed", "a b")


def test_records_are_validated_like_objects() -> None:
    archive = Array("float64", (1,), "safetensors", b"PK\x03\x04" + bytes(100))
    with pytest.raises(MessageError, match="its arrays cannot be read"):
        from_records(records_of("{}", archive))
    apart = ArrayRecord([numpy.eye(2)])
    with pytest.raises(MessageError, match="its arrays must be packed into one"):
        from_records(RecordDict({"values": ConfigRecord({"json": "{}"}), "arrays": apart}))
    fortran = numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3))
    found = from_records(records_of("{}", {"x": fortran})).arrays["x"]
    assert numpy.array_equal(found, [[0, 1, 2], [3, 4, 5]])


ARRAYS = st.dictionaries(
    st.text(max_size=8),
    arrays_of(
        st.sampled_from(["f2", "f4", "f8", "i1", "u1", "i4", "i8", "u8", "bool"]),
        array_shapes(min_dims=0, min_side=0, max_side=4),
    ),
    max_size=4,
)


@given(ARRAYS)
def test_arrays_of_any_type_and_shape_round_trip(arrays: Arrays) -> None:
    records = to_records(Message({}, arrays))
    assert len(get_all_nested_objects(records)) == (5 if arrays else 3)
    found = from_records(records).arrays
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()
