"""Noise: its size, where it comes from, and what one number of it takes."""

import importlib
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from scipy.stats import kstest
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.privacy.extra import require_extra
from mpfedcl.privacy.noise import add_exact_noise, draw_noise, share_sigma

SIGMA = 3.7


@pytest.mark.parametrize(
    "draw",
    [lambda n: add_exact_noise(torch.zeros(n), SIGMA), lambda n: draw_noise(SIGMA, [n])],
    ids=["sums", "models"],
)
def test_noise_is_gaussian_of_the_stated_deviation(draw: Callable[[int], Tensor]) -> None:
    noise = draw(25_000)
    # The deviation of the deviation is 0.45 %: 2 % are four of them.
    assert float(noise.std()) == pytest.approx(SIGMA, rel=0.02)
    assert abs(float(noise.mean())) < 5 * SIGMA / 25_000**0.5
    assert kstest(noise.numpy() / SIGMA, "norm").pvalue > 1e-6


@pytest.mark.parametrize(
    "draw",
    [lambda: add_exact_noise(torch.zeros(8), 1.0), lambda: draw_noise(1.0, [8])],
    ids=["sums", "models"],
)
def test_no_seed_makes_noise_come_again(draw: Callable[[], Tensor]) -> None:
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        numpy.random.seed(0)
        random.seed(0)
        drawn.append(draw())
    assert not torch.equal(*drawn)


def test_values_keep_their_shape_and_precision() -> None:
    values = torch.arange(6, dtype=torch.float32).view(2, 3) * 1e6
    noisy = add_exact_noise(values, 1e-3)
    assert noisy.dtype == torch.float64
    assert torch.allclose(noisy, values.double(), rtol=0, atol=0.01)


def test_shares_add_up_to_the_whole() -> None:
    assert share_sigma(2.0, 4) == 1.0
    assert share_sigma(2.0, 1) == 2.0
    shares = sum((draw_noise(share_sigma(SIGMA, 5), [100_000]) for _ in range(5)), torch.zeros(1))
    assert float(shares.std()) == pytest.approx(SIGMA, rel=0.02)
    with pytest.raises(InvalidInput, match="least_honest is 0"):
        share_sigma(1.0, 0)


def test_without_the_extra_one_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    require_extra()

    def missing(name: str, *_: Any) -> Any:
        raise ImportError(name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(
        InvalidInput, match=r"needs dp_accounting.*pip install 'mpfedcl\[privacy\]'"
    ):
        require_extra()
