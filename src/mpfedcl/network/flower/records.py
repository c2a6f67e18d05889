"""A message as Flower's records, and back; what a stranger sends is measured before opening.

All arrays of a message are one of Flower's, in the safetensors format: the server answers a request
for each object, and takes about as long for a bias as for a layer.
"""

import numpy
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from safetensors.numpy import load, save

from mpfedcl.network.message import MOST_BYTES, Arrays, Message, MessageError, from_json, to_json

PACKED = "packed"
"""The one array of a message."""
STORED_AS = "safetensors"
"""What it is stored as, in Flower's words."""
LONGEST_TEXT = 2**26
MOST_ARRAYS = 10_000
_LENGTH_BYTES = 8
"""Of the number that a safetensors file begins with: how long its list of arrays is."""
_ENTRY_BYTES = 512
"""Of an array's name, type, shape and place in that list, at most."""


def to_records(message: Message) -> RecordDict:
    """Return a message as Flower's records."""
    # The record is there without arrays too: older programs read it before they see the format.
    packed = {PACKED: _pack(message.arrays)} if message.arrays else {}
    return RecordDict(
        {
            "values": ConfigRecord({"json": to_json(message.values)}),
            "arrays": ArrayRecord(packed),
        }
    )


def from_records(content: RecordDict) -> Message:
    """Read Flower's records; what is too large or no array is refused before it is opened."""
    try:
        text = content.config_records["values"]["json"]
        arrays = content.array_records["arrays"]
    except KeyError as error:
        raise MessageError(f"the record {error} is missing") from None
    if not isinstance(text, str):
        raise MessageError("its values are not text")
    if len(text) > LONGEST_TEXT or sum(len(each.data) for each in arrays.values()) > MOST_BYTES:
        raise MessageError("it is too large")
    if not is_packed(arrays):
        return Message(from_json(text))
    packed = arrays[PACKED]
    return Message(from_json(text), open_arrays(packed.stype, packed.data, MOST_ARRAYS))


def is_packed(names: "ArrayRecord | dict[str, str]") -> bool:
    """Tell whether a record has arrays; others than one that holds all are refused."""
    if names and set(names) != {PACKED}:
        raise MessageError(f"its arrays must be packed into one called {PACKED!r}")
    return bool(names)


def open_arrays(kind: str, data: bytes, most: int) -> Arrays:
    """Return the arrays that a safetensors file holds: at most so many.

    Its list must describe each of its bytes once, which the library checks; so they take no more
    memory than the file does. The list itself is measured before it is read.
    """
    if kind != STORED_AS:
        raise MessageError(f"its arrays are stored as {kind[:80]!r}; it must be {STORED_AS}")
    size, longest = int.from_bytes(data[:_LENGTH_BYTES], "little"), _ENTRY_BYTES * (most + 1)
    if longest < size <= len(data):
        raise MessageError(f"it is too large: the list of its arrays has more than {longest} bytes")
    try:
        arrays = load(data)
    # Whatever a stranger calls arrays: there are many ways to find that it is none.
    except Exception as error:
        raise MessageError(f"its arrays cannot be read ({type(error).__name__})") from None
    if len(arrays) > most:
        raise MessageError(f"it has {len(arrays)} arrays; at most {most}")
    return arrays


def _pack(arrays: Arrays) -> Array:
    # The library takes the memory as it lies.
    data = save({name: numpy.asarray(each, order="C") for name, each in arrays.items()})
    return Array("uint8", (len(data),), STORED_AS, data)
