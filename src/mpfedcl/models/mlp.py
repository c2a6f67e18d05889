"""The paper's multilayer perceptron."""

import math
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import linear, relu

from mpfedcl.core.tensors import Tensors
from mpfedcl.models.base import Model

HIDDEN_ON_PIXELS: tuple[int, ...] = (512, 512, 256)
"""The paper's hidden layers, used by default."""
HIDDEN_BEHIND_ENCODER: tuple[int, ...] = (256,)


class Mlp(Model):
    """Fully connected layers; the embedding is v = ReLU(W h + b) of the last hidden one.

    `Mlp((784, 512, 512, 256), 10)` is the MNIST model with its 798,474 parameters.
    """

    def __init__(self, sizes: tuple[int, ...], num_classes: int) -> None:
        self.embedding_size = sizes[-1]
        self._shapes = [*pairwise(sizes), (sizes[-1], num_classes)]
        self._names = [f"hidden.{index}" for index in range(len(sizes) - 1)] + ["classifier"]

    def init(self, generator: torch.Generator, dtype: torch.dtype) -> Tensors:
        """Draw weights and biases uniformly from ±1/sqrt(fan-in), as torch's Linear does."""
        params: Tensors = {}
        for name, (fan_in, fan_out) in zip(self._names, self._shapes, strict=True):
            bound = 1 / math.sqrt(fan_in)
            # Drawn in float64 so that float32 and float64 runs start from the same numbers.
            for part, shape in (("weight", (fan_out, fan_in)), ("bias", (fan_out,))):
                draw = torch.rand(shape, generator=generator, dtype=torch.float64)
                params[f"{name}.{part}"] = ((2 * draw - 1) * bound).to(dtype)
        return params

    def apply(self, params: Tensors, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings and logits."""
        hidden = inputs
        for name in self._names[:-1]:
            hidden = relu(linear(hidden, params[f"{name}.weight"], params[f"{name}.bias"]))
        return hidden, linear(hidden, params["classifier.weight"], params["classifier.bias"])


def make_mlp(
    input_size: int, num_classes: int, hidden: tuple[int, ...], *, is_encoded: bool
) -> Mlp:
    """Return the model with these hidden layers; by default the paper's for this type of input."""
    default = HIDDEN_BEHIND_ENCODER if is_encoded else HIDDEN_ON_PIXELS
    return Mlp((input_size, *(hidden or default)), num_classes)
