"""An audit: a membership attack on many runs, whose lower bound of epsilon must hold the claim.

The attacker knows everything but whether one image is there, and asks the best question there is:
how far the release lies along what that image adds.
"""

import math

import pytest
import torch
from scipy.stats import beta
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment.settings import PrivacySettings
from mpfedcl.gaussian import sum_samples
from mpfedcl.gaussian.mechanism import PrivateSums

RUNS = 2500
EPSILON, DELTA = 1.0, 1e-5
_CONFIDENCE = 0.999


def sums(with_it: bool) -> Tensors:
    """Return the sums of one or two images, of as many classes as there are runs.

    Noise is drawn for each class anew, so that one release is as many runs with one class.
    """
    features = torch.eye(2, dtype=torch.float64)[: 2 if with_it else 1]
    labels = torch.zeros(len(features), dtype=torch.int64)
    one = sum_samples(features, labels, 1, None)
    return {name: value.expand(RUNS, *value.shape[1:]) for name, value in one.items()}


def attack(mechanism: PrivateSums, *, with_it: bool) -> Tensor:
    """Return the attacker's score of each run: larger means that the image seems to be there."""

    def rows(summed: Tensors) -> Tensor:
        return torch.cat([summed["counts"].unsqueeze(1), summed["sums"]], dim=1)

    direction = rows(sums(with_it=True)) - rows(sums(with_it=False))
    return (rows(mechanism.add_noise(sums(with_it))) * direction).sum(1)


def lower_bound(present: Tensor, absent: Tensor) -> float:
    """Return what epsilon is at least, by Clopper and Pearson; chosen and judged on two halves."""
    half = RUNS // 2
    thresholds = torch.linspace(float(absent.min()), float(present.max()), 200)

    def ratio(threshold: Tensor, rows: slice) -> float:
        hits = int((present[rows] > threshold).sum())
        alarms = int((absent[rows] > threshold).sum())
        tail = (1 - _CONFIDENCE) / 2
        least = beta.ppf(tail, hits, half - hits + 1) if hits else 0.0
        most = beta.ppf(1 - tail, alarms + 1, half - alarms) if alarms < half else 1.0
        return math.log(max(least - DELTA, 1e-12) / most)

    best = max(thresholds, key=lambda each: ratio(each, slice(0, half)))
    return ratio(best, slice(half, 2 * half))


@pytest.fixture(scope="module")
def mechanism() -> PrivateSums:
    found = PrivateSums.of(PrivacySettings(epsilon=EPSILON, delta=DELTA), has_moments=False)
    assert found is not None
    return found


@pytest.mark.whole
def test_attack_does_not_exceed_the_claimed_epsilon(mechanism: PrivateSums) -> None:
    shown = lower_bound(attack(mechanism, with_it=True), attack(mechanism, with_it=False))
    assert shown <= EPSILON


@pytest.mark.whole
def test_attack_detects_a_fifth_of_the_noise(mechanism: PrivateSums) -> None:
    weak = mechanism.with_share(mechanism.sigma / 5)
    shown = lower_bound(attack(weak, with_it=True), attack(weak, with_it=False))
    assert shown > EPSILON
