"""Messages between server and clients, in every engine: a broadcast down, an update up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.models.units import count_bytes, mask_params
from mpfedcl.prototypes import PrototypePool, Prototypes


@dataclass(frozen=True)
class Broadcast:
    """The message that the server sends to each sampled client at the start of a round."""

    round: int
    params: Tensors
    """The shared parameters; empty if no parameters are shared."""
    extra: Tensors
    """Further tensors of the server's state, `Server.extra`."""
    pool: PrototypePool
    units: Mapping[str, Tensors] = field(default_factory=dict)
    """`PartialModel`: masks of the hidden units that a client is sent, by client and layer."""
    version: int | None = None
    """`Asynchronous`: the number of changes of the model so far."""
    dispatch: int | None = None
    """`Asynchronous`: the number of this dispatch, part of the key that batches are drawn with."""

    def to(self, device: torch.device) -> Self:
        """Return the broadcast on a device."""
        return replace(
            self,
            params=_move(self.params, device),
            extra=_move(self.extra, device),
            pool=self.pool.to(device),
            units={client: _move(units, device) for client, units in self.units.items()},
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of tensors that one client receives."""
        pool = self.pool
        columns = (pool.vectors, pool.labels, pool.counts, pool.owners)
        return _num_bytes(*self.params.values(), *self.extra.values(), *columns)

    def num_bytes_to(self, clients: Sequence[str]) -> int:
        """Return the bytes that these clients receive; some may be sent a part of the model."""
        total = self.num_bytes * len(clients)
        for units in (self.units[client] for client in clients if client in self.units):
            for name, mask in mask_params(self.params, units).items():
                total -= int((~mask).sum()) * self.params[name].element_size()
            total += count_bytes(units)
        return total


class UpdateStack(Protocol):
    """The updates of several clients of one process, without a tensor for each of them.

    Averaging a thousand models does not need a thousand models in memory.
    """

    def __len__(self) -> int: ...

    @property
    def template(self) -> Tensors:
        """Tensors of the shapes and types of one client's update."""

    def weighted_sum(self, weights: Tensor) -> Tensors:
        """Return Σ_i weights_i x_i over the clients of the stack."""

    @property
    def squared_changes(self) -> Sequence[float]:
        """|x_i - x|² of each client, x the parameters it was sent; not finite if a value is not."""

    def tensors(self, index: int) -> Tensors:
        """Return the tensors of one client's update."""


@dataclass(frozen=True)
class StackMember:
    """One client's part of a stack; it stays in the process that made it."""

    stack: UpdateStack
    index: int


@dataclass(frozen=True)
class Update:
    """The message that a client sends back."""

    client: str
    num_samples: int
    averaged: Tensors | StackMember | None
    """The tensors that `finish` returned, averaged by weight; None if the client withholds them."""
    prototypes: Prototypes
    """Collected from all clients, never averaged."""
    loss: float | None
    """Mean training loss over the round's samples; None if the method does not train."""
    summed: Tensors = field(default_factory=dict)
    """Statistics of the client's samples, to be added up over clients."""
    processed: tuple[str, ...] = ()
    """The processors that have changed the update."""
    left_out: int = 0
    """The number of averaged values that are the server's own, neither received nor sent."""
    coding: Mapping[str, Tensor] = field(default_factory=dict)
    """Scales or indices of compressed tensors, by group and name: `averaged/output.weight`."""

    @property
    def num_parameters(self) -> int:
        """The number of values that are sent in tensors to average or add up."""
        tensors = [*self._shapes.values(), *self.summed.values()]
        return sum(value.numel() for value in tensors) - self.left_out

    @property
    def num_bytes(self) -> int:
        """Bytes of tensors that the client sends."""
        shapes, own = [*self._shapes.values()], self.prototypes
        unsent = self.left_out * shapes[0].element_size() if self.left_out else 0
        others = (*self.summed.values(), *self.coding.values())
        return _num_bytes(*shapes, *others, own.vectors, own.labels, own.counts) - unsent

    def to(self, device: torch.device) -> Self:
        """Return a written-out update on a device."""
        assert not isinstance(self.averaged, StackMember)
        return replace(
            self,
            averaged=None if self.averaged is None else _move(self.averaged, device),
            prototypes=self.prototypes.to(device),
            summed=_move(self.summed, device),
            coding=_move(self.coding, device),
        )

    def written_out(self) -> Self:
        """Return the update with its own tensors instead of a part of a stack."""
        if not isinstance(self.averaged, StackMember):
            return self
        return replace(self, averaged=self.averaged.stack.tensors(self.averaged.index))

    @property
    def _shapes(self) -> Tensors:
        if isinstance(self.averaged, StackMember):
            return self.averaged.stack.template
        return self.averaged or {}


@dataclass(frozen=True)
class Total:
    """The sum of several clients' updates under secure aggregation."""

    clients: tuple[str, ...]
    """The clients whose updates are in the sum, in order of name."""
    weight: float
    """Σ_i w_i."""
    averaged: Tensors
    """Σ_i w_i x_i of the averaged tensors, in float64."""
    summed: Tensors
    """Sums of the clients' statistics, in float64 or int64."""
    num_samples: int
    """Σ_i n_i."""
    loss: float
    """Σ_i n_i loss_i."""
    is_possible: bool
    """False if no clients with values in range can have sent it."""
    num_parameters: int
    """The number of values that one client has sent."""
    num_bytes: int
    """The bytes that all clients have sent."""
    noise: Tensor | None = None
    """Under a privacy budget: the variance of its noise, relative to the required one."""

    @property
    def client(self) -> str:
        """The empty name: a total belongs to no single client."""
        return ""


@dataclass(frozen=True)
class Failure:
    """The reason why a client's update is missing or unreadable."""

    client: str
    reason: str


def fill_part(update: Update, broadcast: Broadcast) -> Update:
    """Return the update of a client with a part of the model, completed by the server's values."""
    averaged = update.written_out().averaged
    if averaged is None:
        return update
    assert not isinstance(averaged, StackMember)
    masks = mask_params(broadcast.params, broadcast.units[update.client])
    sent = [name for name in masks if name in averaged]
    filled = {n: torch.where(masks[n], averaged[n], broadcast.params[n]) for n in sent}
    left_out = sum(int((~masks[name]).sum()) for name in sent)
    return replace(update, averaged={**averaged, **filled}, left_out=left_out)


def _move(tensors: Mapping[str, Tensor], device: torch.device) -> Tensors:
    return {name: value.to(device) for name, value in tensors.items()}


def _num_bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
