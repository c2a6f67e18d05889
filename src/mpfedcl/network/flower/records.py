"""A message as Flower's records, and back; what a stranger sends is measured before opening."""

import io
import math
from typing import Any

import numpy
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.lib import format as npy
from numpy.typing import NDArray

from mpfedcl.network.message import MOST_BYTES, Message, MessageError, from_json, to_json

_MOST_ARRAYS = 10_000
LONGEST_TEXT = 2**26
STORED_AS = "numpy.ndarray"
"""How Flower calls an array that is stored as an npy file."""
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def to_records(message: Message) -> RecordDict:
    """Return a message as Flower's records."""
    return RecordDict(
        {
            "values": ConfigRecord({"json": to_json(message.values)}),
            "arrays": ArrayRecord({name: Array(array) for name, array in message.arrays.items()}),
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
    if (
        len(text) > LONGEST_TEXT
        or len(arrays) > _MOST_ARRAYS
        or sum(len(each.data) for each in arrays.values()) > MOST_BYTES
    ):
        raise MessageError("it is too large")
    opened = {name: open_array(name, each.stype, each.data) for name, each in arrays.items()}
    return Message(from_json(text), opened)


def open_array(name: str, kind: str, data: bytes) -> NDArray[Any]:
    """Return the array that an npy file holds, in the file's own memory.

    An archive of many is none, nor is a file that is longer or shorter than it says.
    """
    try:
        if kind != STORED_AS:
            raise ValueError(kind)
        file = io.BytesIO(data)
        shape, is_fortran, dtype = _HEADERS[npy.read_magic(file)](file)
        if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(data) - file.tell():
            raise ValueError(shape)
        array = numpy.frombuffer(data, dtype, offset=file.tell())
        return array.reshape(shape, order="F" if is_fortran else "C")
    # Whatever a stranger calls an array: there are many ways to find that it is none.
    except Exception as error:
        raise MessageError(f"array {name[:80]!r} cannot be read ({type(error).__name__})") from None
