"""What attacks are measured by: similarity of images, and members found."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[2] / "attacks"))

from curious_server import load_digits
from gradient_inversion import CASES, measure
from membership import Scores
from ssim import ssim


def slow_ssim(left: Tensor, right: Tensor) -> float:
    """The formula, window by window."""
    found = []
    for row in range(left.shape[0] - 6):
        for column in range(left.shape[1] - 6):
            a, b = (x[row : row + 7, column : column + 7].flatten() for x in (left, right))
            covariance = float(((a - a.mean()) * (b - b.mean())).sum() / 48)
            brightness = (2 * a.mean() * b.mean() + 1e-4) / (a.mean() ** 2 + b.mean() ** 2 + 1e-4)
            structure = (2 * covariance + 9e-4) / (a.var() + b.var() + 9e-4)
            found.append(float(brightness * structure))
    return sum(found) / len(found)


def test_similarity_matches_the_formula() -> None:
    images = torch.rand(4, 2, 11, 9, dtype=torch.float64)
    found = ssim(images[:, 0], images[:, 1])
    for each, (left, right) in zip(found, images, strict=True):
        assert float(each) == pytest.approx(slow_ssim(left, right), abs=1e-9)
    assert ssim(images[:, 0], images[:, 0]) == pytest.approx(torch.ones(4).double())


def test_true_positive_rate_at_one_false_positive_per_thousand() -> None:
    others = [torch.arange(2000.0)]
    # Two of two thousand may be accused: those above 1997.
    assert Scores([torch.tensor([1997.0, 1997.5, 1998.5, 3000.0])], others).found() == 0.75
    assert Scores([torch.full((10,), -torch.inf)], others).found() == 0
    # Members that nothing tells from others are found as seldom as these are accused.
    assert Scores([torch.arange(2000.0)], others).found() == 0.001


@pytest.mark.whole
def test_one_image_is_reconstructed_from_its_update() -> None:
    own, strangers = measure(load_digits("fedavg"), CASES[0], range(1))
    assert float(own.min()) > 0.999
    assert float(strangers.max()) < 0.9
