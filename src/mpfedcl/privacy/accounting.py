"""The epsilon that releases cost together.

If all clients take part in every release there is an exact closed form. If clients are sampled, it
is the composition of privacy loss distributions by Google's dp-accounting.
"""

import math
from collections.abc import Mapping
from functools import lru_cache, reduce
from typing import Any

from mpfedcl.gaussian.mechanism import (
    composed_multiplier,
    gaussian_epsilon,
    gaussian_multiplier,
    import_extra,
)

Releases = Mapping[float, int]
"""Number of releases by noise multiplier."""

_FINE, _COARSE = 1e-4, 1e-3
"""Discretization of the privacy loss: for results, and for the search of a multiplier."""
_STEP = 1.0002
"""Factor by which noise grows until the accountant agrees."""


def spent_epsilon(
    releases: Releases, delta: float, *, sampling: float = 1.0, interval: float = _FINE
) -> float:
    """Return the epsilon that releases have cost together, at a delta.

    Args:
        releases: Number of releases by noise multiplier.
        delta: The failure probability.
        sampling: The probability with which each client takes part in a release.
        interval: Discretization of the privacy loss; the result is an upper bound.
    """
    kinds = [(multiplier, count) for multiplier, count in sorted(releases.items()) if count]
    if not kinds:
        return 0.0
    if sampling == 1:
        # Several Gaussian mechanisms cost as much as one with less noise.
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
    """Return the privacy loss of one release; expensive, and the same in every round."""
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

    `weights` is the number of releases by sensitivity: one of sensitivity s has the multiplier z/s.
    """
    unsampled = gaussian_multiplier(epsilon, delta) / composed_multiplier(
        {1 / sensitivity: count for sensitivity, count in weights.items()}
    )
    if sampling == 1:
        # So that rounding never exceeds the budget.
        return unsampled * (1 + 1e-9)
    # Bisection of the ratio: each evaluation takes a second, so a rough result is grown below.
    low, high = unsampled * sampling / 4, unsampled
    while high / low > 1.003:
        middle = math.sqrt(low * high)
        said = spent_epsilon(_scale(middle, weights), delta, sampling=sampling, interval=_COARSE)
        low, high = (low, middle) if said <= epsilon else (middle, high)
    return _grow(high, epsilon, delta, weights, sampling)


def _grow(z: float, epsilon: float, delta: float, weights: Releases, sampling: float) -> float:
    """Return the noise, increased until the accountant confirms the budget."""
    while spent_epsilon(_scale(z, weights), delta, sampling=sampling) > epsilon:
        z *= _STEP
    return z


def _scale(z: float, weights: Releases) -> dict[float, int]:
    return {z / sensitivity: count for sensitivity, count in weights.items()}
