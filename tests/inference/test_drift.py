"""Drift: the false-alarm rate of a batch holds."""

import math

import numpy
import pytest
import torch
from scipy.stats import betabinom, binom

from mpfedcl.inference.calibration import Drift, find_thresholds, most_by_chance


@pytest.mark.parametrize("rate", [0.01, 0.05, 0.2])
@pytest.mark.parametrize(("num_new", "num_held_out"), [(1, 200), (7, 99), (100, 100), (300, 2000)])
def test_limit_is_the_beta_binomial_quantile(num_new: int, num_held_out: int, rate: float) -> None:
    place = math.ceil((num_held_out + 1) * (1 - rate) - 1e-9)
    chance = betabinom(num_new, num_held_out + 1 - place, place)
    limit = most_by_chance(num_new, num_held_out, rate)
    assert chance.sf(limit) <= 0.01
    assert not limit or chance.sf(limit - 1) > 0.01
    # With many held-out images it is the binomial's.
    assert most_by_chance(num_new, 10**7, rate) == binom(num_new, rate).ppf(0.99)


def test_drift_false_alarm_rate_holds_on_exchangeable_images() -> None:
    """All ways to deal ranks to held-out and new images, drawn often: at most 1 % cry drift."""
    draw = numpy.random.default_rng(3)
    held_out, new, rate = 40, 30, 0.1
    limit = most_by_chance(new, held_out, rate)
    alarms = 0
    for _ in range(3000):
        ranks = draw.permutation(held_out + new)
        threshold = find_thresholds(torch.from_numpy(ranks[:held_out]).double())[f"{rate:g}"]
        alarms += int((ranks[held_out:] > threshold).sum() > limit)
    # Four deviations of a share of 1 %.
    assert alarms / 3000 <= 0.01 + 4 * math.sqrt(0.01 * 0.99 / 3000)
    # A binomial, which ignores that the threshold is estimated, would raise false alarms.
    plain = int(binom(new, rate).ppf(0.99))
    place = math.ceil((held_out + 1) * (1 - rate) - 1e-9)
    assert betabinom(new, held_out + 1 - place, place).sf(plain) > 0.01


def test_drift_is_described_in_one_sentence() -> None:
    drift = Drift(images=100, flagged=37, at_most=11, false_alarms=0.05)
    assert drift.is_drift
    assert drift.describe("image") == (
        "37 of 100 images are farther from the pool than all but 5 % of held-out images were; by "
        "chance at most 11 would be."
    )
    assert not Drift(100, 11, 11, 0.05).is_drift
    assert most_by_chance(0, 100, 0.05) == 0
