"""A message as Flower's records, and back; what a stranger sends is measured before opening."""

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from mpfedcl.network.message import MOST_BYTES, Message, MessageError, from_json, to_json

_MOST_ARRAYS = 10_000
LONGEST_TEXT = 2**26


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
        raise MessageError("its values are no text")
    if (
        len(text) > LONGEST_TEXT
        or len(arrays) > _MOST_ARRAYS
        or sum(len(each.data) for each in arrays.values()) > MOST_BYTES
    ):
        raise MessageError("it is too large")
    opened = {}
    for name, array in arrays.items():
        try:
            opened[name] = array.numpy()
        # Whatever a stranger calls an array: numpy has many ways to find that it is none.
        except Exception as error:
            raise MessageError(
                f"array {name[:80]!r} cannot be read ({type(error).__name__})"
            ) from None
    return Message(from_json(text), opened)
