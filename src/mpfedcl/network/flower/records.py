"""Conversion between messages and Flower's records and objects, with size limits.

All arrays of a message are packed into one Flower array in safetensors format, because Flower
transfers objects one by one. Sizes are checked before anything is unpacked: a Flower array may name
one chunk many times, so that megabytes become gigabytes.
"""

import json
from collections.abc import Callable

import numpy
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.app.message.arraychunk import ArrayChunk
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_children_ids_from_object_content,
)
from safetensors.numpy import load, save

from mpfedcl.network.transport import (
    AnswerLimit,
    Arrays,
    Kind,
    Message,
    MessageError,
    from_json,
    to_json,
)

MESSAGE_TYPES: dict[Kind, str] = {
    "hello": "query",
    "secure": "query.secure",
    "round": "train",
    "close": "evaluate",
}
"""Flower's message type of each kind."""
PACKED = "packed"
"""Name of the only array of a message."""
STORED_AS = "safetensors"
"""Its storage type in Flower's description."""
LONGEST_TEXT = 2**26
MOST_ARRAYS = 10_000
_LENGTH_BYTES = 8
"""Length of the first field of a safetensors file, which gives the size of its header."""
_ENTRY_BYTES = 512
"""Maximum size of an array's entry in that header."""
_LONGEST_LIST = 2**21
"""Maximum bytes of an object that only names other objects."""
_ENVELOPE = 2**12
"""Bytes of an object in addition to its content."""

Fetch = Callable[[str, int], bytes]
"""(object id, maximum bytes) -> the object; raises `NotYetError` if it has not arrived."""


def to_records(message: Message) -> RecordDict:
    """Return a message as Flower's records."""
    packed = {PACKED: _pack(message.arrays)} if message.arrays else {}
    return RecordDict(
        {
            "values": ConfigRecord({"json": to_json(message.values)}),
            "arrays": ArrayRecord(packed),
        }
    )


def open_arrays(kind: str, data: bytes, most: int) -> Arrays:
    """Return the arrays of a safetensors file, at most `most`.

    The library checks that arrays do not overlap, so they take no more memory than the file. The
    size of the header is checked here.
    """
    if kind != STORED_AS:
        raise MessageError(f"its arrays are stored as {kind[:80]!r}; it must be {STORED_AS}")
    size, longest = int.from_bytes(data[:_LENGTH_BYTES], "little"), _ENTRY_BYTES * (most + 1)
    if longest < size <= len(data):
        raise MessageError(
            f"it is too large: the header of its arrays has more than {longest} bytes"
        )
    try:
        arrays = load(data)
    # Malformed content may fail in any way.
    except Exception as error:
        raise MessageError(f"its arrays cannot be read ({type(error).__name__})") from None
    if len(arrays) > most:
        raise MessageError(f"it has {len(arrays)} arrays; at most {most}")
    return arrays


def _pack(arrays: Arrays) -> Array:
    # safetensors ignores strides.
    data = save({name: numpy.asarray(each, order="C") for name, each in arrays.items()})
    return Array("uint8", (len(data),), STORED_AS, data)


class NotYetError(Exception):
    """An announced object has not arrived yet."""

    def __init__(self, object_id: str) -> None:
        super().__init__(object_id)
        self.object_id = object_id


def read_object(found: PullObjectResponse, object_id: str, most: int) -> bytes:
    """Return a pulled object of at most `most` bytes; raise `NotYetError` if it has not arrived."""
    if not found.object_found:
        raise MessageError("a part of it was lost")
    if not found.object_available:
        raise NotYetError(object_id)
    check_size(len(found.object_content), most)
    return bytes(found.object_content)


def check_size(size: int, most: int) -> None:
    """Reject an object that is too large."""
    if size > most:
        raise MessageError(f"it is too large: a part of it has {size} bytes; at most {most}")


def open_answer(root: str, fetch: Fetch, limit: AnswerLimit) -> Message:
    """Fetch and read the answer with the root object `root`.

    Raises `NotYetError` if a part has not arrived, and any other exception on a malformed answer.
    """
    try:
        (content,) = get_object_children_ids_from_object_content(fetch(root, _LONGEST_LIST))
        records = _references(fetch(content, _LONGEST_LIST), RecordDict)
        values, arrays = records["values"], records["arrays"]
    except KeyError as error:
        raise MessageError(f"the record {error} is missing") from None
    text = ConfigRecord.inflate(fetch(values, limit.text_bytes + _ENVELOPE)).get("json")
    if not isinstance(text, str):
        raise MessageError("its values are not text")
    return Message(from_json(text), _read_arrays(arrays, fetch, limit))


def _read_arrays(record: str, fetch: Fetch, limit: AnswerLimit) -> Arrays:
    """Fetch the packed array chunk by chunk; a chunk counts as often as it is named."""
    names = _references(fetch(record, _LONGEST_LIST), ArrayRecord)
    if not names:
        return {}
    if set(names) != {PACKED}:
        raise MessageError(f"its arrays must be packed into one called {PACKED!r}")
    content = fetch(names[PACKED], _LONGEST_LIST)
    chunks = get_object_children_ids_from_object_content(content)
    table = json.loads(get_object_body(content, Array))
    order = [chunks[place] for place in table["arraychunk_ids"]]
    most = left = limit.array_bytes + limit.num_arrays * _ENVELOPE
    fetched: dict[str, bytes] = {}
    for chunk in order:
        if chunk not in fetched:
            fetched[chunk] = get_object_body(fetch(chunk, left + _ENVELOPE), ArrayChunk)
        left -= len(fetched[chunk])
        if left < 0:
            raise MessageError(f"it is too large: its arrays have more than {most} bytes")
    data = b"".join(fetched[chunk] for chunk in order)
    return open_arrays(table["stype"], data, limit.num_arrays)


def _references(content: bytes, kind: type[RecordDict | ArrayRecord]) -> dict[str, str]:
    """Return the object ids in a record, by name."""
    found = json.loads(get_object_body(content, kind))
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise MessageError(f"its {kind.__name__} names no objects")
    return found
