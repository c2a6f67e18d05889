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


def with_flat_norm(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    """Return a model whose batch normalization has one value per channel and sample."""
    size = torch.Size(input_shape).numel()
    norm = nn.Sequential(nn.Linear(size, 8), nn.BatchNorm1d(8), nn.ReLU())
    return nn.Sequential(nn.Flatten(), *norm, nn.Linear(8, num_classes))


def of_tokens(num_classes: int) -> nn.Module:
    """Return a model of 5 token ids below 20."""
    return nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.Linear(20, num_classes))


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


class LowRank(nn.Module):
    """A frozen linear layer plus a trained update of rank 2, as in LoRA."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(0.1 * torch.randn(2, base.in_features))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.base(inputs) + inputs @ self.lora_a.T @ self.lora_b.T
        return outputs


def with_low_rank(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    """Return a model of two layers; the first is frozen and has a trained update."""
    model = Plain(num_classes, input_shape)
    model.add_module("body", LowRank(model.body))
    return model


class Convolution(nn.Module):
    """A convolution whose embedding has 5 values, as an mlp with a last hidden layer of 5."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        channels, height, width = input_shape
        self.conv = nn.Conv2d(channels, 3, 3)
        self.hidden = nn.Linear(3 * (height - 2) * (width - 2), 5)
        self.head = nn.Linear(5, num_classes)

    def embed(self, images: Tensor) -> Tensor:
        """Return the input of the last layer."""
        return torch.relu(self.hidden(torch.relu(self.conv(images)).flatten(1)))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(images))
        return logits


class Series(nn.Module):
    """A convolution over series [channels, length]."""

    def __init__(self, num_classes: int, input_shape: tuple[int, int]) -> None:
        super().__init__()
        self.conv = nn.Conv1d(input_shape[0], 4, 3, padding=1)
        self.head = nn.Linear(4, num_classes)

    def forward(self, series: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.relu(self.conv(series)).mean(2))
        return logits


class Tokens(nn.Module):
    """The mean of the embeddings of 20 words."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 6)
        self.head = nn.Linear(6, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.words(tokens).mean(1))
        return logits
