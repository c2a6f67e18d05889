"""What travels between server and clients, whatever the engine: a broadcast down, an update up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.gaussian import MemberSums
from mpfedcl.models.parts import count_bytes, mask_params
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
    units: Mapping[str, Tensors] = field(default_factory=dict)
    """By client, where it is sent a part of the model: which units it has of each hidden layer."""
    version: int | None = None
    """Asynchronous methods: how often the model was changed before."""
    dispatch: int | None = None
    """Asynchronous methods: which of the server's sendings this is; draws go by it."""

    def to(self, device: torch.device) -> Self:
        """Return the broadcast on a device."""
        return replace(
            self,
            params={name: value.to(device) for name, value in self.params.items()},
            extra={name: value.to(device) for name, value in self.extra.items()},
            pool=self.pool.to(device),
            units={
                client: {layer: mask.to(device) for layer, mask in units.items()}
                for client, units in self.units.items()
            },
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of tensors that one client receives."""
        tensors = _num_bytes(self.params) + _num_bytes(self.extra)
        return tensors + _prototype_bytes(self.pool)

    def num_bytes_to(self, clients: Sequence[str]) -> int:
        """Return the bytes that these clients receive, of whom some may be sent a part."""
        total = self.num_bytes * len(clients)
        for units in (self.units[client] for client in clients if client in self.units):
            for name, mask in mask_params(self.params, units).items():
                total -= int((~mask).sum()) * self.params[name].element_size()
            total += count_bytes(units)
        return total


class UpdateStack(Protocol):
    """What several clients of one process share, in whatever form costs least.

    A thousand models need not exist to be averaged; a stack only has to answer these.
    """

    def __len__(self) -> int: ...

    @property
    def template(self) -> Tensors:
        """Tensors of the shapes and types of what one client shares."""

    def weighted_sum(self, weights: Tensor) -> Tensors:
        """Return Σ_i weights_i x_i over the clients of the stack."""

    @property
    def squared_changes(self) -> Sequence[float]:
        """|x_i - x|² of each client, x what it was sent; not finite where a value is not."""

    def tensors(self, index: int) -> Tensors:
        """Return what one client shares, written out."""


@dataclass(frozen=True)
class StackMember:
    """One client's part of a stack. It never leaves the process that made it."""

    stack: UpdateStack
    index: int


@dataclass(frozen=True)
class Update:
    """What a client sends back."""

    client: str
    num_samples: int
    averaged: Tensors | StackMember | None
    """Averaged over clients by weight: the shared parameters, and a method's own. None where the
    client withholds its update: it has answered, and has nothing to send."""
    prototypes: Prototypes
    """Collected from all clients, never averaged."""
    loss: float | None
    """Mean training loss over the round's samples; None where the method does not train."""
    summed: Mapping[str, Tensor] = field(default_factory=dict)
    """Added up over clients as they are: statistics of their samples."""
    processed: tuple[str, ...] = ()
    """The processors that have changed something on the way."""
    left_out: int = 0
    """Numbers among those that are averaged which the client was not sent, and does not send: they
    are the server's own."""
    coding: Mapping[str, Tensor] = field(default_factory=dict)
    """Where tensors are compressed, by group and name (`averaged/output.weight`): what they must be
    multiplied by, or the places of their numbers."""

    @property
    def num_parameters(self) -> int:
        """Numbers in the tensors that are averaged or added up, as far as they travel."""
        tensors = [*self._shapes.values(), *self.summed_shapes.values()]
        return sum(value.numel() for value in tensors) - self.left_out

    @property
    def num_bytes(self) -> int:
        """Bytes of tensors that the client sends."""
        tensors = _num_bytes(self._shapes) + _num_bytes(self.summed_shapes)
        if self.left_out:
            tensors -= self.left_out * next(iter(self._shapes.values())).element_size()
        return tensors + _num_bytes(self.coding) + _prototype_bytes(self.prototypes)

    def to(self, device: torch.device) -> Self:
        """Return an update that is written out on a device."""
        assert not isinstance(self.averaged, StackMember)
        averaged = self.averaged
        if averaged is not None:
            averaged = {name: value.to(device) for name, value in averaged.items()}
        return replace(
            self,
            averaged=averaged,
            prototypes=self.prototypes.to(device),
            summed={name: value.to(device) for name, value in self.summed.items()},
            coding={name: value.to(device) for name, value in self.coding.items()},
        )

    def written_out(self) -> Self:
        """Return the update with tensors of its own in place of a part of a stack."""
        found = replace(self, summed=dict(self.summed))
        if not isinstance(self.averaged, StackMember):
            return found
        return replace(found, averaged=self.averaged.stack.tensors(self.averaged.index))

    @property
    def summed_shapes(self) -> Mapping[str, Tensor]:
        """Tensors of the shapes and types of the sums, which need not be written out for it."""
        return self.summed.stack.template if isinstance(self.summed, MemberSums) else self.summed

    @property
    def _shapes(self) -> Tensors:
        if isinstance(self.averaged, StackMember):
            return self.averaged.stack.template
        return self.averaged or {}


@dataclass(frozen=True)
class Total:
    """What the updates of several clients add up to, where nobody may see one of them."""

    clients: tuple[str, ...]
    """Those whose updates are in it, in order of name."""
    weight: float
    """Σ_i w_i."""
    averaged: Tensors
    """Σ_i w_i x_i of what is averaged, in float64."""
    summed: Tensors
    """Sums of what clients have collected, in float64 or whole numbers."""
    num_samples: int
    """Σ_i n_i."""
    loss: float
    """Σ_i n_i loss_i."""
    is_possible: bool
    """False where no clients in range can have sent this."""
    num_parameters: int
    """Numbers that one client has sent."""
    num_bytes: int
    """Bytes that all of them have sent."""
    noise: Tensor | None = None
    """Under a privacy budget: the variance of the noise in it, over what the budget asks for."""

    @property
    def client(self) -> str:
        """Nobody's: it comes after what single clients send."""
        return ""


@dataclass(frozen=True)
class Failure:
    """What comes in place of an update where a client could not make one, or none can be read."""

    client: str
    reason: str


def fill_part(update: Update, broadcast: Broadcast) -> Update:
    """Return the update of a client that has a part of the model, the rest as the server has it."""
    averaged = update.written_out().averaged
    if averaged is None:
        return update
    assert not isinstance(averaged, StackMember)
    masks = mask_params(broadcast.params, broadcast.units[update.client])
    sent = [name for name in masks if name in averaged]
    filled = {n: torch.where(masks[n], averaged[n], broadcast.params[n]) for n in sent}
    left_out = sum(int((~masks[name]).sum()) for name in sent)
    return replace(update, averaged={**averaged, **filled}, left_out=left_out)


def _num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _prototype_bytes(prototypes: Prototypes | PrototypePool) -> int:
    parts = [prototypes.vectors, prototypes.labels, prototypes.counts]
    if isinstance(prototypes, PrototypePool):
        parts.append(prototypes.owners)
    return sum(part.numel() * part.element_size() for part in parts)
