"""An answer fetched as Flower's objects, from the root down, and never more of it than agreed.

Flower fetches all objects of an answer and joins them before anybody can look at them. Since an
array may name one piece any number of times, megabytes can become gigabytes that way.
"""

import json
from collections.abc import Callable

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.app.message.arraychunk import ArrayChunk
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_children_ids_from_object_content,
)

from mpfedcl.network.flower.records import PACKED, is_packed, open_arrays
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
    return Message(from_json(text), _read_arrays(arrays, fetch, limit))


def _read_arrays(record: str, fetch: Fetch, limit: AnswerLimit) -> Arrays:
    """Fetch the one array that holds all, piece by piece, and open it.

    Each piece counts as often as it is named.
    """
    names = _references(fetch(record, _LONGEST_LIST), ArrayRecord)
    if not is_packed(names):
        return {}
    content = fetch(names[PACKED], _LONGEST_LIST)
    pieces = get_object_children_ids_from_object_content(content)
    table = json.loads(get_object_body(content, Array))
    order = [pieces[place] for place in table["arraychunk_ids"]]
    most = left = limit.array_bytes + limit.num_arrays * _ENVELOPE
    fetched: dict[str, bytes] = {}
    for piece in order:
        if piece not in fetched:
            fetched[piece] = get_object_body(fetch(piece, left + _ENVELOPE), ArrayChunk)
        left -= len(fetched[piece])
        if left < 0:
            raise MessageError(f"it is too large: its arrays have more than {most} bytes")
    data = b"".join(fetched[piece] for piece in order)
    return open_arrays(table["stype"], data, limit.num_arrays)


def _references(content: bytes, kind: type[RecordDict | ArrayRecord]) -> dict[str, str]:
    """Return which objects a record names, by the names it gives them."""
    found = json.loads(get_object_body(content, kind))
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise MessageError(f"its {kind.__name__} names nothing")
    return found
