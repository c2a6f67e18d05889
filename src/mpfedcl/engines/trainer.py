"""What a client sets out with in a round, and who trains it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mpfedcl.data.client_data import ClientData
from mpfedcl.engines.trained_clients import Trained
from mpfedcl.models import Tensors


@dataclass(frozen=True)
class Work:
    """One client's task for a round."""

    client: ClientData
    start: Tensors
    """All parameters as the client begins: what it received, and what it kept at home."""
    state: Tensors
    """What else it kept from its last round."""


class Trainer(Protocol):
    """A way to run the local training of several clients."""

    def train(self, works: Sequence[Work], round_number: int, received: object) -> list[Trained]:
        """Train the clients of one round; every client is in one of the groups returned."""
        ...
