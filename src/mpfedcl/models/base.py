"""The interface of models."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.func import vmap

from mpfedcl.core.tensors import Tensors

Apply = Callable[[Tensors, Tensor], tuple[Tensor, Tensor]]
"""Embeddings [B, d] and logits [B, C] of a batch of inputs, given the parameters."""


class Model(Protocol):
    """A classifier with an embedding, as a pure function of its parameters."""

    embedding_size: int
    buffers: frozenset[str] = frozenset()
    """Tensors among the parameters that are not trained by gradients: running statistics."""
    classifier: frozenset[str] = frozenset(("classifier.weight", "classifier.bias"))
    """The parameters of the last layer."""
    normalization: frozenset[str] = frozenset()
    """The parameters and buffers of normalization layers."""
    difference: str | None = None
    """Why training differs from evaluation, such as dropout; None if it does not."""

    def init(self, generator: torch.Generator, dtype: torch.dtype) -> Tensors:
        """Return fresh parameters."""

    def apply(self, params: Tensors, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the embeddings [B, d] and the logits [B, C] of a batch of inputs."""

    def apply_in_training(self, start: Tensors, buffers: Tensors) -> Apply:
        """Return `apply` for a client that trains; it may change `buffers` in place."""
        return self.apply

    def apply_many(self, params: Tensors, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings and logits [models, B, ...] of models with stacked parameters."""
        embeddings, logits = vmap(self.apply, in_dims=(0, None))(params, inputs)
        return embeddings, logits

    def fits(self, params: Tensors) -> bool:
        """Return whether parameters fit this model, by names and shapes."""
        like = self.init(torch.Generator(), torch.float32)
        return {n: v.shape for n, v in params.items()} == {n: v.shape for n, v in like.items()}


IMAGES_AT_ONCE = 256
"""Batch size without gradients: the activations of a whole test set would not fit into memory."""


def apply_in_pieces(apply: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Apply a function of images to many, some at a time unless a gradient needs all."""
    # An exported program must not branch on the batch size.
    is_whole = torch.compiler.is_exporting() or torch.is_grad_enabled()
    if is_whole or len(inputs) <= IMAGES_AT_ONCE:
        return apply(inputs)
    return torch.cat([apply(part) for part in torch.split(inputs, IMAGES_AT_ONCE)])
