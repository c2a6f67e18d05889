"""Networks by name, as ordinary modules: the small CNN of NIID-Bench, and ResNets."""

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu

from mpfedcl.core.errors import InvalidInput, explain
from mpfedcl.experiment.names import did_you_mean

_SMALLEST_SIDE = 16
"""Two 5 x 5 convolutions without padding, each with a pooling, leave nothing of smaller images."""
_LARGEST_SIDE_OF_SMALL_STEM = 64


class SmallCnn(nn.Module):
    """The CNN of NIID-Bench (Li et al., ICDE 2022): 6 and 16 filters, then 120 and 84 units."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        channels, height, width = input_shape
        if min(height, width) < _SMALLEST_SIDE:
            raise InvalidInput(
                f"model.name is 'cnn-small', but images have {height} x {width} pixels; they must "
                f"have at least {_SMALLEST_SIDE} per side (--dataset.image-size enlarges them)."
            )
        self.conv1 = nn.Conv2d(channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        sides = [((side - 4) // 2 - 4) // 2 for side in (height, width)]
        self.fc1 = nn.Linear(16 * sides[0] * sides[1], 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        hidden = max_pool2d(relu(self.conv1(images)), 2)
        hidden = max_pool2d(relu(self.conv2(hidden)), 2)
        hidden = relu(self.fc1(hidden.flatten(1)))
        logits: Tensor = self.fc3(relu(self.fc2(hidden)))
        return logits


class _Block(nn.Module):
    """Two 3 x 3 convolutions with batch normalization, and a shortcut."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = nn.Sequential()
        if stride != 1 or before != width:
            self.downsample.append(nn.Conv2d(before, width, 1, stride, bias=False))
            self.downsample.append(nn.BatchNorm2d(width))

    def forward(self, images: Tensor) -> Tensor:
        """Return the features."""
        inner = relu(self.bn1(self.conv1(images)))
        return relu(self.bn2(self.conv2(inner)) + self.downsample(images))


class ResNet(nn.Module):
    """A residual network with batch normalization and torchvision's parameter names.

    Images of up to 64 pixels per side enter through a 3 x 3 convolution, larger ones through a 7 x
    7 convolution with stride 2 and a pooling.

    Args:
        num_classes: C.
        input_shape: [channels, height, width].
        widths: Channels of each stage; each but the first halves the side.
        blocks: Blocks per stage.
    """

    def __init__(
        self,
        num_classes: int,
        input_shape: tuple[int, ...],
        *,
        widths: tuple[int, ...],
        blocks: int,
    ) -> None:
        super().__init__()
        self._is_large = max(input_shape[1:]) > _LARGEST_SIDE_OF_SMALL_STEM
        kernel, stride = (7, 2) if self._is_large else (3, 1)
        self.conv1 = nn.Conv2d(
            input_shape[0], widths[0], kernel, stride, padding=kernel // 2, bias=False
        )
        self.bn1 = nn.BatchNorm2d(widths[0])
        before = widths[0]
        for stage, width in enumerate(widths, start=1):
            strides = [1 if stage == 1 else 2, *[1] * (blocks - 1)]
            layer = [_Block(before if n == 0 else width, width, s) for n, s in enumerate(strides)]
            self.add_module(f"layer{stage}", nn.Sequential(*layer))
            before = width
        self._num_stages = len(widths)
        self.fc = nn.Linear(before, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        hidden = relu(self.bn1(self.conv1(images)))
        if self._is_large:
            hidden = max_pool2d(hidden, 3, stride=2, padding=1)
        for stage in range(1, self._num_stages + 1):
            hidden = self.get_submodule(f"layer{stage}")(hidden)
        logits: Tensor = self.fc(torch.mean(hidden, dim=(2, 3)))
        return logits


TIMM = "timm:"
"""The begin of the name of a model of timm."""


def find_timm_factory(name: str) -> Callable[..., nn.Module]:
    """Return the factory of `timm:NAME`, with fresh weights: nothing is downloaded."""
    try:
        timm = import_module("timm")
    # It needs torchvision, which fails in several ways if it was built for another torch.
    except (ImportError, RuntimeError, OSError) as error:
        raise InvalidInput(
            f"model.name is {name!r}, which needs timm ({type(error).__name__}: {explain(error)}); "
            "`pip install 'mpfedcl[vision]'` brings it."
        ) from None
    plain = name.removeprefix(TIMM)
    # A run directory may name a model: no address is opened, and no file is read.
    if not timm.is_model(plain):
        raise InvalidInput(
            f"model.name is {name!r}; it must be timm: and a name of timm.list_models()"
            f"{did_you_mean(plain, timm.list_models(), TIMM)}."
        )

    def make(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
        if len(input_shape) != 3:
            raise InvalidInput(
                f"model.name is {name!r}, which takes images as they are; samples are "
                f"{list(input_shape)}."
            )
        made: nn.Module = timm.create_model(plain, num_classes=num_classes, in_chans=input_shape[0])
        return made

    return make


NETWORKS: Mapping[str, Callable[..., nn.Module]] = {
    "cnn-small": SmallCnn,
    "resnet8": partial(ResNet, widths=(16, 32, 64), blocks=1),
    "resnet18": partial(ResNet, widths=(64, 128, 256, 512), blocks=2),
}
"""The networks that `model.name` names, for images."""
