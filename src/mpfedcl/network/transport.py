"""A message of plain values and arrays, and the transport that carries it.

This module does not import torch, so that programs that only carry messages start quickly.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

    from mpfedcl.core.tensors import Tensors

Arrays = dict[str, NDArray[Any]]
Kind = Literal["hello", "secure", "round", "close"]
"""hello: introduce yourself. secure: a stage of secure aggregation without training. round: train.
close: evaluate the last round."""

FORMAT = 6
"""Version of the message format; server and clients must use the same one."""
MOST_BYTES = 2**31
"""Maximum size of all arrays in a message; a larger message is not opened."""


KILLED = "its process was killed during this work"
"""A client's reason for not answering a request that its previous process had got."""


class MessageError(ValueError):
    """A malformed message; the text gives the reason."""


@dataclass(frozen=True)
class Message:
    """The content of a message."""

    values: dict[str, Any]
    """Plain values: numbers, strings, lists and dictionaries of them."""
    arrays: Arrays = field(default_factory=dict)

    def value(self, name: str, kind: type[Any]) -> Any:
        """Return a required value after checking its type."""
        found = self.values.get(name)
        if type(found) is not kind:
            raise MessageError(f"{name} is {shorten(found)}; it must be of type {kind.__name__}")
        return found

    def tensors(self, group: str) -> "Tensors":
        """Return the arrays of a group as tensors, by name."""
        prefix = f"{group}/"
        found = {n.removeprefix(prefix): a for n, a in self.arrays.items() if n.startswith(prefix)}
        return {name: _to_tensor(name, array) for name, array in found.items()}


@dataclass(frozen=True)
class AnswerLimit:
    """Upper bounds on an honest answer; a larger answer is rejected before it is opened."""

    num_arrays: int
    array_bytes: int
    """Of all arrays together."""
    text_bytes: int
    """Of the plain values, as JSON."""


@dataclass(frozen=True)
class Reply:
    """A node's reply to a message."""

    request_id: str
    """The message that it replies to."""
    message: Message | None = None
    failure: Literal["gone", "failed", "unreadable"] | None = None
    """gone: the client disconnected; failed: it reported an error; unreadable: malformed answer."""
    reason: str = ""


class Transport(Protocol):
    """Sends messages to nodes and fetches replies. A node is an address, not a client.

    No call exceeds its time limit, whatever a node or the network does.
    """

    def connected_nodes(self) -> Mapping[int, str]:
        """Return the connected nodes with the names of their keys."""

    def send(
        self, kind: Kind, messages: Mapping[int, Message], timeout: float, *, seconds: float
    ) -> dict[int, str]:
        """Send each node its message, which expires after `timeout` seconds.

        Return message ids by node, without the messages not sent within `seconds`.
        """

    def receive(self, limits: Mapping[str, AnswerLimit], seconds: float) -> list[Reply]:
        """Return new replies to these messages, each once, within `seconds`; or none.

        `limits` are the size limits by message id. Replies to other messages are kept until those
        expire.
        """


def to_json(values: Mapping[str, Any]) -> str:
    """Return plain values as JSON; raise an error on non-finite numbers."""
    return json.dumps(values, allow_nan=False)


def from_json(text: str) -> dict[str, Any]:
    """Parse plain values."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"its values cannot be read ({error})") from None
    if not isinstance(values, dict):
        raise MessageError("its values are not a table")
    return values


def shorten(value: object) -> str:
    """Return a value as text that fits into a sentence."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _to_tensor(name: str, array: NDArray[Any]) -> "torch.Tensor":
    import torch

    # numpy opens some byte strings as an archive of several arrays.
    if not isinstance(array, numpy.ndarray):
        raise MessageError(f"{name[:80]!r} is not an array")
    try:
        # Received arrays may be in read-only memory, so copy.
        return torch.from_numpy(numpy.array(array, order="C"))
    except (TypeError, ValueError):
        raise MessageError(f"{name[:80]!r} is of type {array.dtype}, which no tensor has") from None
