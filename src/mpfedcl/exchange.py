"""What travels between server and clients, whatever the engine: a broadcast down, an update up."""

from dataclasses import dataclass

from mpfedcl.models import Tensors
from mpfedcl.prototypes import PrototypePool, Prototypes


@dataclass(frozen=True)
class Broadcast:
    """What the server sends to each chosen client at the start of a round."""

    round: int
    params: Tensors
    """The shared parameters; empty for methods that keep models at home."""
    extra: Tensors
    """What else the method's server keeps for its clients."""
    pool: PrototypePool

    @property
    def num_bytes(self) -> int:
        """Bytes of tensors that one client receives."""
        return _num_bytes({**self.params, **self.extra}) + _prototype_bytes(self.pool)


@dataclass(frozen=True)
class Update:
    """What a client sends back."""

    client: str
    num_samples: int
    sums: Tensors
    """Averaged over clients by number of samples: the shared parameters, and a method's own."""
    rows: Prototypes
    """Collected from all clients, never averaged."""
    loss: float
    """Mean training loss over the round's samples."""

    @property
    def num_bytes(self) -> int:
        """Bytes of tensors that the client sends."""
        return _num_bytes(self.sums) + _prototype_bytes(self.rows)


def _num_bytes(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _prototype_bytes(rows: Prototypes | PrototypePool) -> int:
    parts = [rows.vectors, rows.labels, rows.counts]
    if isinstance(rows, PrototypePool):
        parts.append(rows.owners)
    return sum(part.numel() * part.element_size() for part in parts)
