"""The interface of models."""

from typing import Protocol

import torch
from torch import Tensor
from torch.func import vmap

from mpfedcl.core.tensors import Tensors


class Model(Protocol):
    """A classifier with an embedding, as a pure function of its parameters."""

    embedding_size: int

    def init(self, generator: torch.Generator, dtype: torch.dtype) -> Tensors:
        """Return fresh parameters."""

    def apply(self, params: Tensors, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the embeddings [B, d] and the logits [B, C] of a batch of inputs."""

    def apply_many(self, params: Tensors, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings and logits [models, B, ...] of models with stacked parameters."""
        embeddings, logits = vmap(self.apply, in_dims=(0, None))(params, inputs)
        return embeddings, logits

    def fits(self, params: Tensors) -> bool:
        """Return whether parameters fit this model, by names and shapes."""
        like = self.init(torch.Generator(), torch.float32)
        return {n: v.shape for n, v in params.items()} == {n: v.shape for n, v in like.items()}
