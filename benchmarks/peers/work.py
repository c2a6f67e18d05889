"""The work that every peer does: settings, data and model; nothing here is timed."""

import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from torch import Tensor, nn

CLASSES = 10
EMBEDDING = 256
BATCH_SIZE = 32
LEARNING_RATE = float(os.environ.get("PEERS_RATE", "0.01"))
MOMENTUM = 0.5
SEED = 0


class Mlp(nn.Module):
    """784-512-512-256-10 with ReLU between: 798,474 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(784, 512),
            nn.ReLU(),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Linear(512, EMBEDDING),
            nn.ReLU(),
        )
        self.head = nn.Linear(EMBEDDING, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, 10] of images [B, 784]."""
        logits: Tensor = self.head(self.body(images))
        return logits


class Data(NamedTuple):
    """What compare.py has exported."""

    x: tuple[Tensor, ...]
    """Of each client [images, 784], standardized."""
    y: tuple[Tensor, ...]
    """Of each client [images], int64."""
    test_x: Tensor
    test_y: Tensor

    @property
    def clients(self) -> int:
        """How many clients hold the images."""
        return len(self.y)


@cache
def load_data(path: str) -> Data:
    """Read the exported arrays, once a process."""
    with numpy.load(Path(path)) as arrays:
        x, y, test_x, test_y = (torch.from_numpy(arrays[name]) for name in Data._fields)
        sizes = arrays["sizes"].tolist()
    return Data(torch.split(x, sizes), torch.split(y, sizes), test_x, test_y)


def new_model() -> Mlp:
    """Return the model with torch's usual initial weights, the same for every peer."""
    torch.manual_seed(SEED)
    return Mlp()


@torch.no_grad()
def accuracy(model: nn.Module, data: Data) -> float:
    """Return the accuracy on the test images in %."""
    model.eval()
    hits = model(data.test_x).argmax(1) == data.test_y
    return 100 * float(hits.double().mean())
