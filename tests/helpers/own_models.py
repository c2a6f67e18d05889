"""Models as users bring them: modules in a file of their own."""

from typing import Any

import torch
from torch import Tensor, nn


class Plain(nn.Module):
    """Two linear layers: it can be stacked."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.body = nn.Linear(torch.Size(input_shape).numel(), 8)
        self.head = nn.Linear(8, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.relu(self.body(images.flatten(1))))
        return logits


class WithNorm(nn.Module):
    """A convolution with batch normalization; `dropout` adds a layer that draws."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...], dropout: float = 0) -> None:
        super().__init__()
        channels, height, width = input_shape
        self.conv = nn.Conv2d(channels, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(dropout)
        self.hidden = nn.Linear(4 * height * width, 8)
        self.head = nn.Linear(8, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        features = torch.relu(self.norm(self.conv(images))).flatten(1)
        logits: Tensor = self.head(torch.relu(self.hidden(self.dropout(features))))
        return logits


def with_dropout(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    """Return a model with batch normalization and dropout."""
    return WithNorm(num_classes, input_shape, dropout=0.3)


class HeadFirst(nn.Module):
    """The classifier is registered first, but called last."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.classify = nn.Linear(5, num_classes)
        self.embed = nn.Linear(7, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.classify(self.embed(inputs).tanh())
        return logits


def returns(value: Any) -> Any:
    """Return a factory whose module returns a value whatever it is given."""

    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(7, 7)

        def forward(self, inputs: Tensor) -> Any:
            self.layer(inputs)
            return value

    return Returns
