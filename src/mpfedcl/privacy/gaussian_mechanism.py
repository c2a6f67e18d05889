"""The Gaussian mechanism in closed form: how much noise a budget asks for, and the reverse.

The multiplier z is the noise's standard deviation over the sensitivity, the L2 length by which one
image (or one client) can move all that is released. By Balle and Wang (2018) the mechanism is
(epsilon, delta)-private exactly where

    Phi(1/(2z) - epsilon z) - exp(epsilon) Phi(-1/(2z) - epsilon z) <= delta.
"""

import math
from collections.abc import Callable, Mapping

from scipy.special import log_ndtr

from mpfedcl.core.errors import InvalidInput


def gaussian_delta(multiplier: float, epsilon: float) -> float:
    """Return the smallest delta at which noise of this multiplier is (epsilon, delta)-private."""
    half = 1 / (2 * multiplier)
    first = float(log_ndtr(half - epsilon * multiplier))
    second = epsilon + float(log_ndtr(-half - epsilon * multiplier))
    # exp(first) - exp(second), without the cancellation of two large numbers.
    return math.exp(first) * -math.expm1(min(second - first, 0.0))


def gaussian_epsilon(multiplier: float, delta: float) -> float:
    """Return the epsilon that noise of this multiplier costs at a delta.

    Example:
        >>> round(gaussian_epsilon(1.5, 1e-5), 3)
        2.753
    """
    if gaussian_delta(multiplier, 0.0) <= delta:
        return 0.0
    high = 1.0
    while gaussian_delta(multiplier, high) > delta:
        high *= 2
    return _bisect(lambda epsilon: gaussian_delta(multiplier, epsilon) <= delta, 0.0, high)


def gaussian_multiplier(epsilon: float, delta: float) -> float:
    """Return the least noise over sensitivity that keeps a budget.

    Example:
        >>> round(gaussian_multiplier(3.0, 1e-5), 3)
        1.391
    """
    if not (epsilon > 0 and 0 < delta < 1):
        raise InvalidInput(
            f"epsilon is {epsilon:g} and delta {delta:g}; epsilon must be above 0 and delta "
            "between 0 and 1."
        )
    high = 1.0
    while gaussian_delta(high, epsilon) > delta:
        high *= 2
    return _bisect(lambda multiplier: gaussian_delta(multiplier, epsilon) <= delta, 0.0, high)


def composed_multiplier(multipliers: Mapping[float, int]) -> float:
    """Return the multiplier of one release that costs what several do: {multiplier: releases}."""
    return 1 / math.sqrt(sum(count / each**2 for each, count in multipliers.items()))


def _bisect(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Return the least number at which something holds that holds from there on."""
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
