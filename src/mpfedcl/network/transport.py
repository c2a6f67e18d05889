"""The seam between a federation and whatever carries its messages."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from mpfedcl.network.message import Kind, Message


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
    """Carries messages to nodes and brings replies. A node is an address, not a client."""

    def connected_nodes(self) -> Mapping[int, str]:
        """Return the nodes that are connected now, with the names their keys are registered under.

        The name is empty where nodes need no keys.
        """

    def send(self, kind: Kind, messages: Mapping[int, Message], timeout: float) -> dict[int, str]:
        """Send each node its message; return message ids by node, without those not sent."""

    def receive(self, request_ids: Iterable[str]) -> list[Reply]:
        """Return the replies that have come for these messages, each once."""
