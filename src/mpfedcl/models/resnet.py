"""ResNet-18 as a pure function of its parameters, which have torchvision's names.

Batch normalization always uses the running statistics among the parameters, so it is a constant
affine map: a client's few, skewed images never change it, the result for an image does not depend
on the rest of the batch, nothing is modified in place, and `apply` is safe under `torch.func.vmap`.
The affine weight and bias may be trained; the statistics get no gradient.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import conv2d, max_pool2d, relu

from mpfedcl.core.tensors import Tensors

_EPSILON = 1e-5
_STATISTICS = ("running_mean", "running_var")
_WIDTHS = (64, 128, 256, 512)
_BLOCKS = 2


class ResNet18:
    """The encoder of the paper: images [B, 3, h, w] to features [B, 512], no classifier."""

    feature_size = _WIDTHS[-1]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter and running statistic by its name."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, norm, fan_in, fan_out, kernel in _convolutions():
            shapes[f"{name}.weight"] = (fan_out, fan_in, kernel, kernel)
            for part in ("weight", "bias", *_STATISTICS):
                shapes[f"{norm}.{part}"] = (fan_out,)
        return shapes

    def normalization(self) -> frozenset[str]:
        """Return the names of all scales and shifts."""
        norms = (norm for _, norm, *_ in _convolutions())
        return frozenset(f"{norm}.{part}" for norm in norms for part in ("weight", "bias"))

    def init(self, generator: torch.Generator, dtype: torch.dtype) -> Tensors:
        """Draw convolutions from N(0, 2 / fan-out), as torchvision does; norms are the identity."""
        params: Tensors = {}
        for name, shape in self.shapes().items():
            if len(shape) == 4:
                deviation = math.sqrt(2 / (shape[0] * shape[2] * shape[3]))
                # Drawn in float64 so that float32 and float64 start from the same numbers.
                draw = torch.randn(shape, generator=generator, dtype=torch.float64)
                params[name] = (draw * deviation).to(dtype)
            else:
                fill = torch.ones if name.endswith(("weight", "running_var")) else torch.zeros
                params[name] = fill(shape, dtype=dtype)
        return params

    def apply(self, params: Tensors, images: Tensor) -> Tensor:
        """Return the features, normalized by the running statistics."""
        return self.apply_folded(self.fold(params), images)

    def fold(self, params: Tensors) -> Tensors:
        """Return convolution weights and biases with the normalization folded in.

        The normalization then needs no separate pass.
        """
        folded: Tensors = {}
        for name, norm, *_ in _convolutions():
            scale = params[f"{norm}.weight"] * (params[f"{norm}.running_var"] + _EPSILON).rsqrt()
            shift = params[f"{norm}.bias"] - params[f"{norm}.running_mean"] * scale
            folded[f"{name}.weight"] = params[f"{name}.weight"] * scale[:, None, None, None]
            folded[f"{name}.bias"] = shift
        return folded

    def apply_folded(self, folded: Tensors, images: Tensor) -> Tensor:
        """Return the features, given folded parameters."""

        def convolve(inputs: Tensor, name: str, stride: int = 1) -> Tensor:
            weight = folded[f"{name}.weight"]
            padding = weight.shape[-1] // 2
            return conv2d(inputs, weight, folded[f"{name}.bias"], stride, padding=padding)

        hidden = relu(convolve(images, "conv1", stride=2))
        hidden = max_pool2d(hidden, 3, stride=2, padding=1)
        for stage in range(1, len(_WIDTHS) + 1):
            for block in range(_BLOCKS):
                prefix = f"layer{stage}.{block}"
                halves = stage > 1 and block == 0
                stride = 2 if halves else 1
                inner = relu(convolve(hidden, f"{prefix}.conv1", stride))
                outer = convolve(inner, f"{prefix}.conv2")
                if halves:
                    hidden = convolve(hidden, f"{prefix}.downsample.0", stride)
                hidden = relu(outer + hidden)
        return hidden.mean(dim=(2, 3))


def is_statistic(name: str) -> bool:
    """Return whether a name is a running statistic, which is never trained."""
    return name.endswith(_STATISTICS)


def _convolutions() -> Iterator[tuple[str, str, int, int, int]]:
    """Yield each convolution, its norm, the channels in and out, and the kernel size."""
    yield "conv1", "bn1", 3, _WIDTHS[0], 7
    before = _WIDTHS[0]
    for stage, width in enumerate(_WIDTHS, start=1):
        for block in range(_BLOCKS):
            prefix = f"layer{stage}.{block}"
            yield f"{prefix}.conv1", f"{prefix}.bn1", before, width, 3
            yield f"{prefix}.conv2", f"{prefix}.bn2", width, width, 3
            if before != width:
                yield f"{prefix}.downsample.0", f"{prefix}.downsample.1", before, width, 1
            before = width
