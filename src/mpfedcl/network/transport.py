"""The seam between a federation and whatever carries its messages."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from mpfedcl.network.message import Kind, Parcel


@dataclass(frozen=True)
class Answer:
    """What came back for a message."""

    message: str
    """Which message it answers."""
    parcel: Parcel | None = None
    trouble: Literal["gone", "failed", "unreadable"] | None = None
    """gone: the client went away; failed: it could not do it; unreadable: its answer is none."""
    reason: str = ""


class Courier(Protocol):
    """Carries parcels to nodes and brings answers. A node is an address, not a client."""

    def present(self) -> Mapping[int, str]:
        """Return the nodes that are there now, with the names their keys are registered under.

        The name is empty where nodes need no keys.
        """
        ...

    def send(self, kind: Kind, parcels: Mapping[int, Parcel], timeout: float) -> dict[int, str]:
        """Send each node its parcel; return the messages by node, without those not sent."""
        ...

    def collect(self, messages: Iterable[str]) -> list[Answer]:
        """Return the answers that have come for these messages, each once."""
        ...
