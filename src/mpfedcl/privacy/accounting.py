"""Privacy accounting: the total epsilon of several Gaussian releases.

Without client sampling, an exact closed form exists. With sampling, privacy loss distributions are
composed by Google's dp-accounting.
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
"""Discretization of the privacy loss: for results, and for the search for a multiplier."""
_STEP = 1.0002
"""Factor by which noise grows until the accountant confirms the budget."""


def spent_epsilon(
    releases: Releases, delta: float, *, sampling: float = 1.0, interval: float = _FINE
) -> float:
    """Return the total epsilon of releases at a given delta.

    Each client takes part in a release with the probability `sampling`. `interval` discretizes the
    privacy loss; the result is an upper bound.
    """
    made = {multiplier: count for multiplier, count in sorted(releases.items()) if count}
    if not made:
        return 0.0
    if sampling == 1:
        # Several Gaussian mechanisms cost as much as one with less noise.
        return gaussian_epsilon(composed_multiplier(made), delta)
    total = reduce(
        lambda left, right: left.compose(right),
        (_loss_distribution(z, sampling, interval).self_compose(n) for z, n in made.items()),
    )
    return float(total.get_epsilon_for_delta(delta))


@lru_cache(maxsize=16)
def _loss_distribution(multiplier: float, sampling: float, interval: float) -> Any:
    """Return the privacy loss of one release; cached, as it is slow and the same in every round."""
    losses = import_extra("dp_accounting.pld.privacy_loss_distribution")
    return losses.from_gaussian_mechanism(
        multiplier,
        sampling_prob=sampling,
        value_discretization_interval=interval,
        use_connect_dots=True,
    )


def calibrate_multiplier(
    epsilon: float, delta: float, num_releases: int, *, sampling: float = 1.0
) -> float:
    """Return the smallest noise multiplier that keeps the budget over all releases."""
    unsampled = gaussian_multiplier(epsilon, delta) * math.sqrt(num_releases)
    if sampling == 1:
        # A margin, so that rounding never exceeds the budget.
        return unsampled * (1 + 1e-9)

    def spent(z: float, interval: float) -> float:
        return spent_epsilon({z: num_releases}, delta, sampling=sampling, interval=interval)

    # A coarse bisection of the ratio, because each evaluation takes a second; then a fine check.
    low, z = unsampled * sampling / 4, unsampled
    while z / low > 1.003:
        middle = math.sqrt(low * z)
        low, z = (low, middle) if spent(middle, _COARSE) <= epsilon else (middle, z)
    while spent(z, _FINE) > epsilon:
        z *= _STEP
    return z
