"""What a client begins a round with, and who trains it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from mpfedcl.core.tensors import Tensors
from mpfedcl.data.client_data import ClientData
from mpfedcl.engines.trained_clients import TrainedClients
from mpfedcl.rounds.assembly import Assembly


@dataclass(frozen=True)
class ClientTask:
    """One client's task for a round."""

    client: ClientData
    start: Tensors
    """All parameters as the client begins: what it received, and what it kept at home."""
    state: Tensors
    """What else it kept from its last round."""
    own: Tensors = field(default_factory=dict)
    """What the method made of its labels."""
    is_part: bool = False
    """Whether it has a part of the model only, the rest being zeros: others start elsewhere."""
    dispatch: int | None = None
    """Which sending of the server this is, where there are no rounds: batches are drawn by it."""

    def draw_number(self, round_number: int) -> int:
        """Return the number that the client's batches are drawn by."""
        return round_number if self.dispatch is None else self.dispatch


def stack_tensors(each: Sequence[Tensors]) -> Tensors:
    """Return the tensors of several clients side by side, [clients, ...] by name."""
    return {name: torch.stack([one[name] for one in each]) for name in each[0]}


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
