"""The seam between a federation and whatever carries its messages."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from mpfedcl.network.message import Kind, Message


@dataclass(frozen=True)
class AnswerLimit:
    """What an honest answer stays below: a larger one is refused before it is opened."""

    num_arrays: int
    array_bytes: int
    """Of all arrays together."""
    text_bytes: int
    """Of the plain values, as text."""


@dataclass(frozen=True)
class Reply:
    """What came back for a message."""

    request_id: str
    """The message that it replies to."""
    message: Message | None = None
    failure: Literal["gone", "failed", "unreadable"] | None = None
    """gone: the client went away; failed: it could not do it; unreadable: no message came back."""
    reason: str = ""


class Transport(Protocol):
    """Carries messages to nodes and brings replies. A node is an address, not a client.

    No call takes longer than the seconds it is given, whatever a node or the network does.
    """

    def connected_nodes(self) -> Mapping[int, str]:
        """Return the nodes that are connected now, with the names their keys are registered under.

        The name is empty where nodes need no keys.
        """

    def send(
        self, kind: Kind, messages: Mapping[int, Message], timeout: float, *, seconds: float
    ) -> dict[int, str]:
        """Send each node its message, which is worth an answer for `timeout` seconds.

        Return message ids by node, without those not sent within `seconds`.
        """

    def receive(self, limits: Mapping[str, AnswerLimit], seconds: float) -> list[Reply]:
        """Return replies that have come for these messages, each once: some, or none at once.

        Args:
            limits: What the answer to each message may be at most, by message id.
            seconds: How long it may take to bring them here.
        """
