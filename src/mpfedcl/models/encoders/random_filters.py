"""Random filters as a frozen encoder: for small images, without trained weights.

All clients draw the same filters from the same seed, so nothing has to be sent. Each filter is a
Gaussian draw with mean 0 and norm 1, without a bias. Its responses y are used as relu(y) and
relu(-y), each averaged over 4 x 4 windows.
"""

import re
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import conv2d, relu

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.rng import generator
from mpfedcl.core.tensors import Tensors
from mpfedcl.models.encoders.encoder import (
    IMAGES_AT_ONCE,
    PixelScaling,
    TorchEncoder,
)

KIND = "random-filters"
_FILTERS = "filters.weight"
_DEFAULT_FILTERS, _MOST_FILTERS = 32, 1024
_KERNEL = 5
_WINDOWS = 4
"""Windows per side; each sign of a filter gives this number squared of features."""
_LARGEST_SIDE = 96
"""In larger images, 4 x 4 windows of 5 x 5 filters carry almost no information."""
_ANSWERS_AT_ONCE = 2**24
"""Values of 4 bytes."""


class RandomFilters(TorchEncoder):
    """Filters for images of one size and color mode; 32 features per filter, none below 0."""

    def __init__(
        self,
        seed: int,
        num_filters: int,
        preprocessing: PixelScaling,
        device: torch.device | str = "cpu",
    ) -> None:
        height, width = preprocessing.image_shape[:2]
        answers_at_once = _ANSWERS_AT_ONCE // (2 * num_filters * height * width)
        super().__init__(
            f"{KIND}:{seed}:{num_filters}",
            KIND,
            {_FILTERS: draw_filters(seed, num_filters, preprocessing.channels)},
            preprocessing,
            device,
            feature_size=num_filters * 2 * _WINDOWS**2,
            batch_size=min(IMAGES_AT_ONCE, max(1, answers_at_once)),
        )

    def apply(self, tensors: Tensors, inputs: Tensor) -> Tensor:
        """Return the features [B, 32 per filter]."""
        return apply_filters(tensors, inputs)

    @classmethod
    def parse(
        cls, name: str, find_scaling: Callable[[], PixelScaling], device: torch.device | str
    ) -> Self:
        """Read random-filters, random-filters:SEED or random-filters:SEED:FILTERS."""
        found = re.fullmatch(rf"{KIND}(?::(\d{{1,18}}))?(?::(\d{{1,4}}))?", name, re.ASCII)
        num_filters = int(found[2] or _DEFAULT_FILTERS) if found else 0
        if found is None or not 1 <= num_filters <= _MOST_FILTERS:
            raise InvalidInput(
                f"encoder.name is {name!r}; it must be {KIND}, {KIND}:SEED or "
                f"{KIND}:SEED:FILTERS with 1 to {_MOST_FILTERS} filters."
            )
        scaling = find_scaling()
        _refuse_size(name, scaling)
        return cls(int(found[1] or 0), num_filters, scaling, device)


def draw_filters(seed: int, num_filters: int, channels: int) -> Tensor:
    """Return filters [filters, channels, 5, 5] with mean 0 and norm 1, in float32."""
    draw = torch.randn(
        (num_filters, channels, _KERNEL, _KERNEL),
        generator=generator(seed, KIND, channels),
        dtype=torch.float64,
    )
    centered = draw - draw.mean(dim=(1, 2, 3), keepdim=True)
    return (centered / centered.square().sum(dim=(1, 2, 3), keepdim=True).sqrt()).float()


def apply_filters(tensors: Tensors, inputs: Tensor) -> Tensor:
    """Return the features [B, filters * 32] of pixels [B, channels, height, width]."""
    # A filter's weights sum to 0 only up to rounding. Subtracting the first pixel makes blank
    # images give exact zeros instead of noise that normalization would amplify.
    answers = conv2d(inputs - inputs[:, :1, :1, :1], tensors[_FILTERS])
    both = torch.cat([relu(answers), relu(-answers)], dim=1)
    return _average_windows(_average_windows(both, dim=2), dim=3).flatten(start_dim=1)


def _average_windows(values: Tensor, dim: int) -> Tensor:
    """Average over one dimension like `adaptive_avg_pool2d`, which ONNX lacks for some sizes."""
    size = values.shape[dim]
    bounds = [(n * size // _WINDOWS, -(-(n + 1) * size // _WINDOWS)) for n in range(_WINDOWS)]
    means = [values.narrow(dim, begin, end - begin).mean(dim) for begin, end in bounds]
    return torch.stack(means, dim)


def _refuse_size(name: str, scaling: PixelScaling) -> None:
    height, width = scaling.image_shape[:2]
    if min(height, width) >= _KERNEL and max(height, width) <= _LARGEST_SIDE:
        return
    raise InvalidInput(
        f"encoder.name is {name!r}, and the images have {height} x {width} pixels; it must be "
        f"resnet18 or onnx:FILE, or the images {_KERNEL} to {_LARGEST_SIDE} pixels per side: "
        "--dataset.image-size 64 resizes them."
    )
