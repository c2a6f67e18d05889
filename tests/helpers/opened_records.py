"""Flower's records, opened as the server and the clients open the objects of a message."""

from flwr.app import RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_id

from mpfedcl.network.flower.client import LIMIT
from mpfedcl.network.flower.records import open_answer
from mpfedcl.network.transport import AnswerLimit, Message


def from_records(content: RecordDict, limit: AnswerLimit = LIMIT) -> Message:
    """Return the message in records; sizes are checked as for objects of a server."""
    objects = {name: each.deflate() for name, each in get_all_nested_objects(content).items()}
    root = b"Message " + content.object_id.encode() + b" 0\0"
    objects[get_object_id(root)] = root
    return open_answer(get_object_id(root), lambda name, _: objects[name], limit)
