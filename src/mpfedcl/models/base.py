"""What every model offers to methods and engines."""

from typing import Protocol

import torch
from torch import Tensor
from torch.func import vmap

from mpfedcl.core.tensors import Tensors


class Model(Protocol):
    """A classifier that shows its embedding. It holds no weights: they are passed in."""

    embedding_size: int

    def init(self, generator: torch.Generator, dtype: torch.dtype) -> Tensors:
        """Return fresh parameters."""

    def apply(self, params: Tensors, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the embeddings [B, d] and the logits [B, C] of a batch of inputs."""

    def apply_many(self, params: Tensors, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same of several models [models, B, ...], whose parameters are stacked."""
        embeddings, logits = vmap(self.apply, in_dims=(0, None))(params, inputs)
        return embeddings, logits

    def fits(self, params: Tensors) -> bool:
        """Tell whether parameters are of this model, by their names and shapes."""
        like = self.init(torch.Generator(), torch.float32)
        return {n: v.shape for n, v in params.items()} == {n: v.shape for n, v in like.items()}
