"""Compare five methods on a ResNet and a Dataset of your own; a minute on one core.

python own_model_and_data.py
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset

import mpfedcl


class Block(nn.Module):
    """Two 3 x 3 convolutions with batch normalization, and a shortcut."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        first = nn.Conv2d(before, width, 3, stride, padding=1), nn.BatchNorm2d(width), nn.ReLU()
        second = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.inner = nn.Sequential(*first, *second)
        self.shortcut = nn.Conv2d(before, width, 1, stride)

    def forward(self, images: Tensor) -> Tensor:
        """Return the features."""
        return torch.relu(self.inner(images) + self.shortcut(images))


def resnet(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    """Return a ResNet of two blocks for images of [channels, height, width]."""
    body = Block(input_shape[0], 16, stride=1), Block(16, 32, stride=2), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(32, num_classes))


class Digits(Dataset[tuple[Tensor, int]]):
    """The 1,797 digits of scikit-learn, 8 x 8 pixels."""

    def __init__(self) -> None:
        self.images, self.targets = load_digits(return_X_y=True)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor(self.images[index] / 8 - 1).reshape(1, 8, 8), self.targets[index]


if __name__ == "__main__":
    methods = ["fedavg", "fedprox", "scaffold", "fedbn", "mp-fedcl"]
    base = mpfedcl.Experiment(rounds=15, clients=5).replace(partition__alpha=0.3, train__lr=0.05)
    comparison = mpfedcl.compare(base, methods, model=resnet, data=Digits())
    print(comparison)
    comparison.plot().savefig(comparison.path / "figure.pdf")
