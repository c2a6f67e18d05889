"""An answer fetched as Flower's objects, from the root down, and never more of it than agreed.

Flower fetches all objects of an answer and joins them before anybody can look at them. Since an
array may name one piece any number of times, megabytes can become gigabytes that way.
"""

import json
from collections.abc import Callable
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.app.message.arraychunk import ArrayChunk
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_children_ids_from_object_content,
)
from numpy.typing import NDArray

from mpfedcl.network.flower.records import open_array
from mpfedcl.network.message import Arrays, Message, MessageError, from_json
from mpfedcl.network.transport import AnswerLimit

Fetch = Callable[[str, int], bytes]
"""(object, bytes that it may have) -> the object; raises `NotYetError` where it has not come."""
_LONGEST_LIST = 2**21
"""Bytes of an object that only names others."""
_ENVELOPE = 2**12
"""Bytes that an object may have beside what it holds."""


class NotYetError(Exception):
    """An object that has been announced and has not come yet."""

    def __init__(self, object_id: str) -> None:
        super().__init__(object_id)
        self.object_id = object_id


def open_answer(root: str, fetch: Fetch, limit: AnswerLimit) -> Message:
    """Fetch and read the answer whose outermost object is `root`.

    Raises `NotYetError` where a part is still on its way, and anything else where it is no answer.
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
    names = _references(fetch(arrays, _LONGEST_LIST), ArrayRecord)
    if len(names) > limit.num_arrays:
        raise MessageError(f"it has {len(names)} arrays; at most {limit.num_arrays}")
    return Message(from_json(text), _ArrayReader(fetch, limit).read(names))


class _ArrayReader:
    """Fetches arrays piece by piece, and counts each piece as often as it is named."""

    def __init__(self, fetch: Fetch, limit: AnswerLimit) -> None:
        self._fetch = fetch
        self._most = self._left = limit.array_bytes + limit.num_arrays * _ENVELOPE

    def read(self, names: dict[str, str]) -> Arrays:
        read: dict[str, NDArray[Any]] = {}
        for name, array in names.items():
            if array in read:
                self._count(read[array].nbytes)
            else:
                read[array] = self._read_array(name, array)
        return {name: read[array] for name, array in names.items()}

    def _read_array(self, name: str, array: str) -> NDArray[Any]:
        content = self._fetch(array, _LONGEST_LIST)
        pieces = get_object_children_ids_from_object_content(content)
        table = json.loads(get_object_body(content, Array))
        order = [pieces[place] for place in table["arraychunk_ids"]]
        fetched: dict[str, bytes] = {}
        for piece in order:
            if piece not in fetched:
                held = self._fetch(piece, self._left + _ENVELOPE)
                fetched[piece] = get_object_body(held, ArrayChunk)
            self._count(len(fetched[piece]))
        return open_array(name, table["stype"], b"".join(fetched[piece] for piece in order))

    def _count(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise MessageError(f"it is too large: its arrays have more than {self._most} bytes")


def _references(content: bytes, kind: type[RecordDict | ArrayRecord]) -> dict[str, str]:
    """Return which objects a record names, by the names it gives them."""
    found = json.loads(get_object_body(content, kind))
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise MessageError(f"its {kind.__name__} names nothing")
    return found
