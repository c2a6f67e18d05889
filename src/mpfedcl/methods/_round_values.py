"""What the hooks of a method are given and give back, apart from tensors and messages."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax

from mpfedcl.core.tensors import Tensors
from mpfedcl.prototypes import Prototypes


class Batch(NamedTuple):
    """Inputs [B, ...], labels [B], and which of them are real (batched engines pad)."""

    inputs: Tensor
    labels: Tensor
    mask: Tensor

    def mean(self, per_sample: Tensor) -> Tensor:
        """Average one number per sample over the real samples."""
        # Filled, not multiplied: whatever a padding row gives, NaN even, it counts for nothing.
        return per_sample.masked_fill(~self.mask, 0).sum() / self.mask.sum().clamp(min=1)

    def cross_entropy(self, logits: Tensor) -> Tensor:
        """Return the mean cross-entropy over the real samples."""
        if not torch._C._functorch.is_functorch_wrapped_tensor(logits):
            return self.mean(cross_entropy(logits, self.labels, reduction="none"))
        # The same bits: torch's own is slow under vmap, and loads a compiler at the first step.
        likelihoods = log_softmax(logits, -1).gather(-1, self.labels.unsqueeze(-1))
        return self.mean(-likelihoods.squeeze(-1))


class FullBatch(Batch):
    """A batch without padding: means need no mask, and fewer steps."""

    __slots__ = ()

    @classmethod
    def of(cls, inputs: Tensor, labels: Tensor) -> Self:
        """Return these samples, all of them real."""
        return cls(inputs, labels, torch.ones_like(labels, dtype=torch.bool))

    def mean(self, per_sample: Tensor) -> Tensor:
        """Average one number per sample."""
        return per_sample.mean()

    def cross_entropy(self, logits: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        if torch._C._functorch.is_functorch_wrapped_tensor(logits):
            return super().cross_entropy(logits)
        return cross_entropy(logits, self.labels)


@dataclass(frozen=True)
class Context:
    """What a client knows while it trains, apart from the parameters and the batch."""

    apply: Callable[[Tensors, Tensor], tuple[Tensor, Tensor]]
    """The model: `embeddings, logits = context.apply(params, inputs)`."""
    start: Tensors
    """The parameters that this client began the round with."""
    received: Any
    """What `prepare` made of the broadcast: the same for every client."""
    state: Tensors
    """This client's own state, kept between rounds."""
    own: Tensors = field(default_factory=dict)
    """What `describe` made of this client's labels."""
    memory: Tensors = field(default_factory=dict)
    """What this client remembers from step to step, until the round ends."""


@dataclass(frozen=True)
class Server:
    """What the server keeps between rounds, apart from the prototype pool."""

    params: Tensors
    extra: Tensors = field(default_factory=dict)
    """Sent to the clients with each broadcast, beside the parameters that are shared."""
    private: Tensors = field(default_factory=dict)
    """Kept, and never sent."""


class Public(NamedTuple):
    """Samples that the server has, and the model that it judges on them."""

    apply: Callable[[Tensors, Tensor], tuple[Tensor, Tensor]]
    """`embeddings, logits = public.apply(params, public.inputs)`."""
    inputs: Tensor
    labels: Tensor


class Tally(NamedTuple):
    """Whose updates a round has brought, in order of client name; all were accepted."""

    names: Sequence[str]
    sizes: Sequence[int]
    """Training samples."""
    weights: Sequence[float]
    """In the mean; 0 for a client that has withheld its update."""
    losses: Sequence[float | None]
    share: float
    """Σ n_i of these clients / Σ n_i of all clients."""
    prototypes: Mapping[str, Prototypes]
    sums: Tensors
    """Σ_i of what `collect` returned."""
    units: Mapping[str, Tensors] = MappingProxyType({})
    """By client that had a part of the model: which units of each hidden layer."""
