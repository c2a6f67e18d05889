"""What releases have cost together.

Where all take part in every release there is a closed form, which is exact. Where clients are drawn
it is the sum of privacy loss distributions by Google's dp-accounting.
"""

import math
from collections.abc import Mapping
from functools import lru_cache, reduce
from typing import Any

from mpfedcl.privacy.extra import import_extra
from mpfedcl.privacy.gaussian_mechanism import (
    composed_multiplier,
    gaussian_epsilon,
    gaussian_multiplier,
)

Releases = Mapping[float, int]
"""How many releases there were with which noise multiplier."""

_FINE, _COARSE = 1e-4, 1e-3
"""Steps in which the loss is counted: of what is said, and of what is only searched by."""
_STEP = 1.0002
"""By how much noise grows until the accountant agrees."""


def spent_epsilon(
    releases: Releases, delta: float, *, sampling: float = 1.0, interval: float = _FINE
) -> float:
    """Return the epsilon that releases have cost together, at a delta.

    Args:
        releases: How many there were with which noise multiplier.
        delta: The chance with which the promise may fail.
        sampling: With which probability each client took part in a release, drawn for each anew.
        interval: In what steps the loss is counted; the result is never below the truth.
    """
    kinds = [(multiplier, count) for multiplier, count in sorted(releases.items()) if count]
    if not kinds:
        return 0.0
    if sampling == 1:
        # Several Gaussians are as one of less noise.
        return gaussian_epsilon(composed_multiplier(dict(kinds)), delta)
    losses = [
        _loss_distribution(multiplier, sampling, interval).self_compose(count)
        for multiplier, count in kinds
    ]
    return float(
        reduce(lambda left, right: left.compose(right), losses).get_epsilon_for_delta(delta)
    )


@lru_cache(maxsize=16)
def _loss_distribution(multiplier: float, sampling: float, interval: float) -> Any:
    """Return the loss of one release: dear to make, and the same in every round."""
    losses = import_extra("dp_accounting.pld.privacy_loss_distribution")
    return losses.from_gaussian_mechanism(
        multiplier,
        sampling_prob=sampling,
        value_discretization_interval=interval,
        use_connect_dots=True,
    )


def calibrate_multiplier(
    epsilon: float, delta: float, weights: Releases, *, sampling: float = 1.0
) -> float:
    """Return the least noise multiplier z that keeps a budget over all releases.

    `weights` says how many releases there are of which sensitivity: one of sensitivity s has the
    multiplier z/s.
    """
    unsampled = gaussian_multiplier(epsilon, delta) / composed_multiplier(
        {1 / sensitivity: count for sensitivity, count in weights.items()}
    )
    if sampling == 1:
        # So that rounding never makes more of it than the budget.
        return unsampled * (1 + 1e-9)
    # By halving the ratio: each look takes a second, and a hundredth is near enough to grow from.
    low, high = unsampled * sampling / 4, unsampled
    while high / low > 1.003:
        middle = math.sqrt(low * high)
        said = spent_epsilon(_scale(middle, weights), delta, sampling=sampling, interval=_COARSE)
        low, high = (low, middle) if said <= epsilon else (middle, high)
    return _grow(high, epsilon, delta, weights, sampling)


def _grow(z: float, epsilon: float, delta: float, weights: Releases, sampling: float) -> float:
    """Return at least as much noise, and so much that the accountant does not say more."""
    while spent_epsilon(_scale(z, weights), delta, sampling=sampling) > epsilon:
        z *= _STEP
    return z


def _scale(z: float, weights: Releases) -> dict[float, int]:
    return {z / sensitivity: count for sensitivity, count in weights.items()}
