"""The closed form of the Gaussian mechanism, against an integral and against dp-accounting."""

import math

import dp_accounting
import numpy
import pytest
from dp_accounting import pld
from scipy.stats import norm

from mpfedcl.core.errors import InvalidInput
from mpfedcl.privacy import accounting
from mpfedcl.privacy.accounting import calibrate_multiplier, spent_epsilon
from mpfedcl.privacy.gaussian_mechanism import (
    composed_multiplier,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_multiplier,
)


def told_by_dp_accounting(releases: dict[float, int], delta: float, sampling: float) -> float:
    accountant = pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    for multiplier, count in releases.items():
        event = dp_accounting.GaussianDpEvent(multiplier)
        if sampling < 1:
            event = dp_accounting.PoissonSampledDpEvent(sampling, event)
        accountant.compose(dp_accounting.SelfComposedDpEvent(event, count))
    return float(accountant.get_epsilon(delta))


@pytest.mark.parametrize("multiplier", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.5, 3.0])
def test_delta_is_the_integral_of_its_definition(multiplier: float, epsilon: float) -> None:
    # delta = ∫ max(0, p(x) - e^eps q(x)) dx, p and q a sensitivity of 1 apart.
    x = numpy.linspace(-40 * multiplier, 40 * multiplier, 2_000_001)
    excess = norm.pdf(x, 1, multiplier) - math.exp(epsilon) * norm.pdf(x, 0, multiplier)
    expected = numpy.trapezoid(excess.clip(0), x)
    assert gaussian_delta(multiplier, epsilon) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0, 3.0, 8.0, 30.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-3])
def test_noise_for_a_budget_costs_that_budget(epsilon: float, delta: float) -> None:
    multiplier = gaussian_multiplier(epsilon, delta)
    assert gaussian_epsilon(multiplier, delta) == pytest.approx(epsilon, rel=1e-9)
    assert gaussian_delta(multiplier, epsilon) <= delta
    assert gaussian_delta(0.999 * multiplier, epsilon) > delta


@pytest.mark.parametrize("epsilon", [0.5, 3.0, 8.0])
def test_epsilon_is_that_of_dp_accounting(epsilon: float) -> None:
    multiplier = gaussian_multiplier(epsilon, 1e-5)
    assert told_by_dp_accounting({multiplier: 1}, 1e-5, 1.0) == pytest.approx(epsilon, abs=1e-3)
    assert spent_epsilon({multiplier: 1}, 1e-5) == pytest.approx(epsilon, abs=1e-3)


@pytest.mark.parametrize(
    ("releases", "sampling"),
    [({5.0: 30}, 1.0), ({1.4: 60}, 0.1), ({2.0: 30, 1.4: 30}, 0.1), ({3.0: 2, 7.0: 5}, 1.0)],
)
def test_releases_add_up_as_dp_accounting_says(releases: dict[float, int], sampling: float) -> None:
    expected = told_by_dp_accounting(releases, 1e-5, sampling)
    assert spent_epsilon(releases, 1e-5, sampling=sampling) == pytest.approx(expected, abs=1e-3)


def test_nothing_released_costs_nothing() -> None:
    assert spent_epsilon({}, 1e-5) == 0
    assert spent_epsilon({2.0: 0}, 1e-5) == 0


@pytest.mark.parametrize("sampling", [1.0, 0.2])
def test_noise_for_many_releases_keeps_the_budget_and_is_not_too_much(sampling: float) -> None:
    weights = {1.0: 5, math.sqrt(2): 3}
    multiplier = calibrate_multiplier(2.0, 1e-5, weights, sampling=sampling)
    releases = {multiplier / sensitivity: count for sensitivity, count in weights.items()}
    spent = told_by_dp_accounting(releases, 1e-5, sampling)
    assert 1.98 < spent <= 2.0 + 1e-6


def test_too_little_noise_grows_until_the_accountant_agrees() -> None:
    enough = accounting._grow(1.388, 3.0, 1e-5, {1.0: 1}, 1.0)
    assert 1.3905 < enough < 1.3912


def test_several_gaussians_are_one() -> None:
    assert composed_multiplier({2.0: 4}) == pytest.approx(1.0)
    assert composed_multiplier({3.0: 1, 4.0: 1}) == pytest.approx(1 / math.hypot(1 / 3, 1 / 4))


def test_a_huge_noise_costs_nothing() -> None:
    assert gaussian_epsilon(1e6, 1e-3) == 0


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 1e-5), (-1.0, 1e-5), (1.0, 0.0), (1.0, 1.0)])
def test_a_budget_that_is_none_is_refused(epsilon: float, delta: float) -> None:
    with pytest.raises(InvalidInput, match=r"epsilon is .* and delta"):
        gaussian_multiplier(epsilon, delta)
