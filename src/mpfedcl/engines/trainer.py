"""What a client begins a round with, and who trains it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mpfedcl.data.client_data import ClientData
from mpfedcl.engines.trained_clients import TrainedClients
from mpfedcl.rounds.assembly import Assembly
from mpfedcl.tensors import Tensors


@dataclass(frozen=True)
class ClientTask:
    """One client's task for a round."""

    client: ClientData
    start: Tensors
    """All parameters as the client begins: what it received, and what it kept at home."""
    state: Tensors
    """What else it kept from its last round."""


class Trainer(ABC):
    """A way to run the local training of several clients."""

    name: ClassVar[str]
    """As records have it."""

    def __init__(self, assembly: Assembly) -> None:
        self._experiment = assembly.experiment
        self._method = assembly.method
        self._model = assembly.model

    @abstractmethod
    def train(
        self, tasks: Sequence[ClientTask], round_number: int, received: object
    ) -> list[TrainedClients]:
        """Train the clients of one round; every client is in one of the groups returned."""
