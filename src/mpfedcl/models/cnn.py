"""The convolutional network that most comparisons of federated methods use."""

import math
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import conv2d, max_pool2d, relu

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors
from mpfedcl.models.base import Model, apply_in_pieces
from mpfedcl.models.mlp import Mlp

HIDDEN_BEHIND_CONVOLUTIONS: tuple[int, ...] = (512,)
CHANNELS = (32, 64)
KERNEL_SIZE = 5
NORM_GROUPS = 8
"""Groups of channels in group normalization; divides both numbers of channels."""
_EPSILON = 1e-5
SMALLEST_SIDE = 4
"""The smallest side that survives two poolings."""


class Cnn(Model):
    """Two 5 x 5 convolutions, each with ReLU and 2 x 2 max pooling, then fully connected layers.

    `Cnn((28, 28), 10)` is the network of the FedAvg paper for MNIST with its 1,663,370 parameters.
    Borders are padded by zeros, so that convolutions keep the size. The embedding is the last
    hidden layer. Parameters are `conv.*`, `hidden.*`, `classifier.*` and, with `has_norm`, `norm.*`
    of group normalization between convolution and ReLU: it normalizes each image by itself, so
    neither other images of a batch nor padding rows of a stack affect the result.

    Args:
        image_shape: [height, width], or [height, width, 3]; inputs may be flattened images.
        num_classes: C.
        hidden: Sizes of the fully connected layers.
        has_norm: Whether convolutions are followed by group normalization.
    """

    def __init__(
        self,
        image_shape: tuple[int, ...],
        num_classes: int,
        hidden: tuple[int, ...] = (),
        *,
        has_norm: bool = False,
    ) -> None:
        height, width = image_shape[:2]
        if min(height, width) < SMALLEST_SIDE:
            raise InvalidInput(
                f"model.name is 'cnn', but images have {height} x {width} pixels; they must have "
                f"at least {SMALLEST_SIDE} per side (--dataset.image-size enlarges them)."
            )
        self._image_shape = (height, width, *(image_shape[2:] or (1,)))
        self._has_norm = has_norm
        flat = CHANNELS[-1] * (height // 4) * (width // 4)
        self._head = Mlp((flat, *(hidden or HIDDEN_BEHIND_CONVOLUTIONS)), num_classes)
        self.embedding_size = self._head.embedding_size
        if has_norm:
            parts = ("weight", "bias")
            names = (f"norm.{n}.{part}" for n in range(len(CHANNELS)) for part in parts)
            self.normalization = frozenset(names)

    def init(self, generator: torch.Generator, dtype: torch.dtype) -> Tensors:
        """Draw weights and biases uniformly from ±1/sqrt(fan-in), as torch's layers do."""
        params: Tensors = {}
        channels = (self._image_shape[2], *CHANNELS)
        for number, (before, after) in enumerate(pairwise(channels)):
            bound = 1 / math.sqrt(before * KERNEL_SIZE**2)
            shapes = {"weight": (after, before, KERNEL_SIZE, KERNEL_SIZE), "bias": (after,)}
            # Drawn in float64 so that float32 and float64 runs start from the same numbers.
            for part, shape in shapes.items():
                draw = torch.rand(shape, generator=generator, dtype=torch.float64)
                params[f"conv.{number}.{part}"] = ((2 * draw - 1) * bound).to(dtype)
            if self._has_norm:
                params[f"norm.{number}.weight"] = torch.ones(after, dtype=dtype)
                params[f"norm.{number}.bias"] = torch.zeros(after, dtype=dtype)
        return {**params, **self._head.init(generator, dtype)}

    def apply(self, params: Tensors, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings and logits."""
        flat = apply_in_pieces(lambda some: self._convolve(params, some), inputs)
        return self._head.apply(params, flat)

    def apply_many(self, params: Tensors, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Evaluate several models one by one: stacking does not speed up convolutions."""
        count = len(next(iter(params.values())))
        models = [{name: value[i] for name, value in params.items()} for i in range(count)]
        embeddings, logits = zip(*(self.apply(each, inputs) for each in models), strict=True)
        return torch.stack(embeddings), torch.stack(logits)

    def _convolve(self, params: Tensors, inputs: Tensor) -> Tensor:
        """Return the flattened output of the convolutions."""
        hidden = inputs.reshape(-1, *self._image_shape).permute(0, 3, 1, 2)
        for number in range(len(CHANNELS)):
            weight, bias = params[f"conv.{number}.weight"], params[f"conv.{number}.bias"]
            hidden = conv2d(hidden, weight, bias, padding=KERNEL_SIZE // 2)
            if self._has_norm:
                scale, shift = params[f"norm.{number}.weight"], params[f"norm.{number}.bias"]
                hidden = _normalize(hidden, scale, shift)
            hidden = max_pool2d(relu(hidden), 2)
        return hidden.flatten(1)


def _normalize(images: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Scale groups of channels of each image to mean 0 and variance 1, then channels as trained.

    torch.group_norm fails under vmap if the channels are last in memory.
    """
    channels, *size = images.shape[1:]
    groups = images.reshape(-1, NORM_GROUPS, channels // NORM_GROUPS, *size)
    variance, mean = torch.var_mean(groups, (2, 3, 4), correction=0, keepdim=True)
    normal = ((groups - mean) * (variance + _EPSILON).rsqrt()).flatten(1, 2)
    return normal * scale.view(-1, 1, 1) + shift.view(-1, 1, 1)
