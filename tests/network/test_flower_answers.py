"""Answers as Flower's objects: forged ones and bombs cost their client alone, and little memory."""

import json
import re
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from conversations import LIMIT, Conversation, answer, wait_until
from federations import records_of
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_id
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes
from hypothesis.extra.numpy import arrays as arrays_of
from loopback import LoopbackGrid, Objects
from safetensors.numpy import save

from mpfedcl.network.flower.answers import open_answer
from mpfedcl.network.flower.records import PACKED, from_records, to_records
from mpfedcl.network.message import Arrays, Message, MessageError


def forge(kind: str, children: list[str], body: bytes) -> bytes:
    """Return an object as Flower stores it."""
    return f"{kind} {','.join(children)} {len(body)}".encode() + b"\0" + body


def store(*contents: bytes) -> Objects:
    return {get_object_id(each): each for each in contents}


def file_pieces(size: int) -> tuple[bytes, bytes]:
    """Return the list of a safetensors file of so many floats, and nothing but zeros."""
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
        "it is too large: the list of its arrays has more than 2560 bytes",
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
    "a list of records": (with_content(forge("RecordDict", [], b"[]")), "names nothing"),
    "depth without end": (with_content(forge("RecordDict", [], b"[" * 10**6)), "RecursionError"),
    "records by number": (with_record({"x": 5}), "names nothing"),
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
def test_forged_objects_cost_their_client_alone(name: str) -> None:
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
def test_damaged_objects_give_a_message_or_an_exception(objects: Objects) -> None:
    """What is not an answer is told by an exception, in no time and without much memory."""

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


def test_nobody_answers_in_anothers_name() -> None:
    """What an answer says of itself does not count: the server knows to whom it was asked."""
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


def test_an_error_is_read_without_its_objects() -> None:
    grid = LoopbackGrid(lambda _, request, __: FlowerMessage(Error(9, "a\nb"), reply_to=request))
    grid.tamper_objects = lambda _client, _reply, _objects: {}
    for reply in Conversation(grid).hear().values():
        assert (reply.failure, reply.reason) == ("failed", "a b")


def test_records_are_read_the_same_way() -> None:
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
def test_arrays_of_any_type_and_shape_come_out_as_they_were(arrays: Arrays) -> None:
    records = to_records(Message({}, arrays))
    assert len(get_all_nested_objects(records)) == (5 if arrays else 3)
    found = from_records(records).arrays
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()
