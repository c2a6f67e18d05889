"""The Gaussian mechanism: closed form, noise, and private sufficient statistics."""

import importlib
import math
import random
from collections.abc import Callable
from typing import Any

import dp_accounting
import numpy
import pytest
import torch
from dp_accounting import pld
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest, norm
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment.settings import PrivacySettings
from mpfedcl.gaussian import (
    SecondMoment,
    pack_symmetric,
    sum_samples,
    unpack_symmetric,
    within_from_moment,
)
from mpfedcl.gaussian import mechanism as gaussian_mechanism
from mpfedcl.gaussian.mechanism import (
    MEANS_SENSITIVITY,
    MOMENTS_SENSITIVITY,
    PrivateSums,
    add_exact_noise,
    composed_multiplier,
    draw_noise,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_multiplier,
    require_extra,
    share_sigma,
)
from mpfedcl.privacy import accounting
from mpfedcl.privacy.accounting import calibrate_multiplier, spent_epsilon


def dp_accounting_epsilon(releases: dict[float, int], delta: float, sampling: float) -> float:
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
def test_noise_for_a_budget_spends_exactly_that_budget(epsilon: float, delta: float) -> None:
    multiplier = gaussian_multiplier(epsilon, delta)
    assert gaussian_epsilon(multiplier, delta) == pytest.approx(epsilon, rel=1e-9)
    assert gaussian_delta(multiplier, epsilon) <= delta
    assert gaussian_delta(0.999 * multiplier, epsilon) > delta


@pytest.mark.parametrize("epsilon", [0.5, 3.0, 8.0])
def test_epsilon_matches_dp_accounting(epsilon: float) -> None:
    multiplier = gaussian_multiplier(epsilon, 1e-5)
    assert dp_accounting_epsilon({multiplier: 1}, 1e-5, 1.0) == pytest.approx(epsilon, abs=1e-3)
    assert spent_epsilon({multiplier: 1}, 1e-5) == pytest.approx(epsilon, abs=1e-3)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("releases", "sampling"),
    [({5.0: 30}, 1.0), ({1.4: 60}, 0.1), ({2.0: 30, 1.4: 30}, 0.1), ({3.0: 2, 7.0: 5}, 1.0)],
)
def test_composed_epsilon_matches_dp_accounting(
    releases: dict[float, int], sampling: float
) -> None:
    expected = dp_accounting_epsilon(releases, 1e-5, sampling)
    assert spent_epsilon(releases, 1e-5, sampling=sampling) == pytest.approx(expected, abs=1e-3)


def test_no_release_spends_nothing() -> None:
    assert spent_epsilon({}, 1e-5) == 0
    assert spent_epsilon({2.0: 0}, 1e-5) == 0


@pytest.mark.whole
@pytest.mark.parametrize("sampling", [1.0, 0.2])
def test_noise_for_many_releases_is_tight(sampling: float) -> None:
    multiplier = calibrate_multiplier(2.0, 1e-5, 8, sampling=sampling)
    spent = dp_accounting_epsilon({multiplier: 8}, 1e-5, sampling)
    assert 1.98 < spent <= 2.0 + 1e-6


def test_noise_grows_until_the_fine_accountant_confirms_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def underestimate(
        releases: dict[float, int], delta: float, *, sampling: float, interval: float
    ) -> float:
        exact = spent_epsilon(releases, delta)
        return exact if interval == accounting._FINE else 0.99 * exact

    monkeypatch.setattr(accounting, "spent_epsilon", underestimate)
    enough = calibrate_multiplier(3.0, 1e-5, 1, sampling=0.5)
    assert 1.3905 < enough < 1.3914


def test_composed_gaussians_equal_one_gaussian() -> None:
    assert composed_multiplier({2.0: 4}) == pytest.approx(1.0)
    assert composed_multiplier({3.0: 1, 4.0: 1}) == pytest.approx(1 / math.hypot(1 / 3, 1 / 4))


def test_huge_noise_spends_nothing() -> None:
    assert gaussian_epsilon(1e6, 1e-3) == 0


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 1e-5), (-1.0, 1e-5), (1.0, 0.0), (1.0, 1.0)])
def test_invalid_budget_is_rejected(epsilon: float, delta: float) -> None:
    with pytest.raises(InvalidInput, match=r"epsilon is .* and delta"):
        gaussian_multiplier(epsilon, delta)


SIGMA = 3.7


@pytest.mark.thorough
@pytest.mark.whole
@pytest.mark.parametrize(
    "draw",
    [lambda n: add_exact_noise(torch.zeros(n), SIGMA), lambda n: draw_noise(SIGMA, [n])],
    ids=["sums", "models"],
)
def test_noise_is_gaussian_with_the_stated_standard_deviation(
    draw: Callable[[int], Tensor],
) -> None:
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
def test_seeds_do_not_reproduce_noise(draw: Callable[[], Tensor]) -> None:
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


def test_noise_shares_add_up_to_the_total() -> None:
    assert share_sigma(2.0, 4) == 1.0
    assert share_sigma(2.0, 1) == 2.0
    shares = sum((draw_noise(share_sigma(SIGMA, 5), [100_000]) for _ in range(5)), torch.zeros(1))
    assert float(shares.std()) == pytest.approx(SIGMA, rel=0.02)


def test_missing_extra_is_reported_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_extra()

    def missing(name: str, *_: Any) -> Any:
        raise ImportError(name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(
        InvalidInput, match=r"needs dp_accounting.*pip install 'mpfedcl\[privacy\]'"
    ):
        require_extra()


def unit_rows(count: int, size: int, seed: int) -> Tensor:
    rows: Tensor = torch.randn(count, size, generator=torch.Generator().manual_seed(seed)).double()
    scaled: Tensor = rows / rows.norm(dim=1, keepdim=True)
    return scaled


def sums_of(features: Tensor, labels: list[int], *, moments: bool, classes: int = 3) -> Tensors:
    moment: SecondMoment | None = "moment" if moments else None
    return sum_samples(features, torch.tensor(labels).long(), classes, moment)


def length(left: Tensors, right: Tensors) -> float:
    """How far apart two releases are, by the formula: half the moment, and all of the matrix."""
    squares = 0.0
    for name in left:
        change = left[name].double() - right[name].double()
        if name == "moment":
            size = left["sums"].shape[1]
            squares += float((unpack_symmetric(change, size) / 2).square().sum())
        else:
            squares += float(change.square().sum())
    return math.sqrt(squares)


def mechanism(*, moments: bool = False, **values: object) -> PrivateSums:
    found = PrivateSums.of(PrivacySettings(**{"epsilon": 3.0, **values}), has_moments=moments)
    assert found is not None
    return found


@given(
    count=st.integers(0, 6), size=st.integers(1, 5), seed=st.integers(0, 999), moments=st.booleans()
)
@settings(max_examples=40, deadline=None)
def test_one_image_changes_the_sums_by_the_sensitivity(
    count: int, size: int, seed: int, moments: bool
) -> None:
    features, labels = unit_rows(count + 1, size, seed), [seed % 3] * (count + 1)
    with_it = sums_of(features, labels, moments=moments)
    without = sums_of(features[:count], labels[:count], moments=moments)
    expected = MOMENTS_SENSITIVITY if moments else MEANS_SENSITIVITY
    assert length(with_it, without) == pytest.approx(expected, rel=1e-6)
    # The vector that gets noise has that length too, though it holds half of the matrix.
    vectors = [gaussian_mechanism._flatten(each) for each in (with_it, without)]
    assert float((vectors[0] - vectors[1]).norm()) == pytest.approx(expected, rel=1e-6)


@given(size=st.integers(1, 6), seed=st.integers(0, 99), moments=st.booleans())
@settings(max_examples=20, deadline=None)
def test_flattened_vector_is_split_into_its_fields(size: int, seed: int, moments: bool) -> None:
    summed = sums_of(unit_rows(4, size, seed), [0, 1, 1, 2], moments=moments)
    tensors = {name: value.double() for name, value in summed.items()}
    back = gaussian_mechanism._unflatten(gaussian_mechanism._flatten(tensors), tensors)
    assert back.keys() == tensors.keys()
    for name, value in tensors.items():
        assert torch.allclose(back[name], value)


def test_noise_in_each_field_has_the_stated_standard_deviation() -> None:
    size = 30
    found = mechanism(moments=True)
    zeros = {
        "counts": torch.zeros(120),
        "sums": torch.zeros(120, size),
        "moment": torch.zeros(size * (size + 1) // 2),
    }
    noisy = found.add_noise(zeros)
    matrix = unpack_symmetric(noisy["moment"], size)
    off_diagonal = matrix[torch.triu(torch.ones(size, size), 1) == 1]
    stated = found.deviations()
    assert float(noisy["sums"].std()) == pytest.approx(stated["sums"], rel=0.07)
    assert float(noisy["counts"].std()) == pytest.approx(stated["counts"], rel=0.35)
    assert float(off_diagonal.std()) == pytest.approx(stated["moment"], rel=0.2)
    assert float(matrix.diagonal().std()) == pytest.approx(2 * found.sigma, rel=0.7)


@pytest.mark.parametrize("moments", [False, True])
def test_noise_matches_the_budget(moments: bool) -> None:
    found = mechanism(moments=moments)
    # A little more, for features that are a rounding longer than 1.
    assert gaussian_epsilon(found.sigma / found.sensitivity, 1e-5) == pytest.approx(3.0, rel=1e-4)
    assert gaussian_epsilon(found.sigma / found.sensitivity, 1e-5) <= 3.0
    assert gaussian_epsilon(found.multiplier, 1e-5) == pytest.approx(3.0, rel=1e-6)
    assert PrivateSums.of(PrivacySettings(), has_moments=moments) is None


def test_client_contribution_is_clipped() -> None:
    found = mechanism(unit="client", clip=2.0)
    many = sums_of(unit_rows(50, 4, 0), [0] * 50, moments=False)
    bounded = found.bound(many)
    zero = {name: torch.zeros_like(value) for name, value in bounded.items()}
    assert length(bounded, zero) == pytest.approx(2.0)
    # Directions stay, and with them the class means.
    assert torch.allclose(
        bounded["sums"][0] / bounded["counts"][0], many["sums"][0] / many["counts"][0]
    )
    one = sums_of(unit_rows(1, 4, 0), [0], moments=False)
    assert length(found.bound(one), one) == 0
    assert found.sensitivity == 2.0
    assert mechanism(unit="client").sensitivity == gaussian_mechanism.CLIENT_CLIP
    assert length(mechanism(clip=2.0).bound(many), many) == 0


@given(seed=st.integers(0, 999), moments=st.booleans(), epsilon=st.sampled_from([0.1, 1.0, 50.0]))
@settings(max_examples=25, deadline=None)
def test_repaired_sums_are_possible(seed: int, moments: bool, epsilon: float) -> None:
    found = mechanism(moments=moments, epsilon=epsilon)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 2, (60,), generator=generator).tolist()
    noisy = found.add_noise(sums_of(unit_rows(60, 4, seed), labels, moments=moments))
    own = found.repair(noisy)
    counts, sums = own["counts"], own["sums"]
    assert torch.equal(counts, counts.round())
    assert bool((counts >= 0).all())
    assert bool((sums.norm(dim=1) <= counts * (1 + 1e-9)).all())
    within = within_from_moment(own["moment"], counts, sums)
    assert float(torch.linalg.eigvalsh(within).min()) >= -1e-6
    assert all(bool(value.isfinite().all()) for value in own.values())


def test_repair_without_noise_changes_nothing() -> None:
    found = mechanism(moments=True).with_share(1e-9)
    summed = {
        n: v.double() for n, v in sums_of(unit_rows(40, 3, 1), [0, 1] * 20, moments=True).items()
    }
    own = found.repair(summed)
    assert torch.allclose(own["counts"], summed["counts"])
    assert torch.allclose(own["sums"], summed["sums"])
    assert torch.allclose(pack_symmetric(own["moment"]), summed["moment"], atol=1e-6)


def test_class_without_samples_does_not_emerge_from_noise() -> None:
    found = mechanism()
    noisy = {
        "counts": torch.tensor([100.0, 1.9 * found.sigma, -5.0]),
        "sums": torch.ones(3, 2) * 10,
    }
    own = found.repair(noisy)
    assert own["counts"].tolist() == [100.0, 0.0, 0.0]
    assert not bool(own["sums"][1:].any())


def test_sums_beyond_any_noise_are_detected() -> None:
    found = mechanism(model="local")
    honest = found.add_noise(sums_of(unit_rows(30, 8, 0), [0, 1, 2] * 10, moments=False))
    assert found.is_local
    assert found.find_impossible(honest) is None
    negative = {**honest, "counts": honest["counts"] - 1000}
    assert "below any noise" in (found.find_impossible(negative) or "")
    long = {**honest, "sums": honest["sums"] + 500}
    assert "noise does not explain it" in (found.find_impossible(long) or "")


@pytest.mark.parametrize(
    ("count", "long", "is_possible"),
    [(-12.0, 0.0, True), (-12.01, 0.0, False), (5.0, 35.0, True), (5.0, 35.01, False)],
)
def test_noise_up_to_six_standard_deviations_is_accepted(
    count: float, long: float, is_possible: bool
) -> None:
    # Deviation 2, nine dimensions: a sum may be 3 * 2 + 12 longer than a count of 12 more.
    found = PrivateSums("record", 1.0, 2.0, is_local=True)
    summed = {"counts": torch.tensor([count]), "sums": torch.zeros(1, 9).double()}
    summed["sums"][0, 0] = long
    assert (found.find_impossible(summed) is None) == is_possible


def test_repaired_scatter_is_at_least_the_noise_floor() -> None:
    found = PrivateSums("record", 1.5, 1.0, is_local=False)
    nothing = {"counts": torch.zeros(2), "sums": torch.zeros(2, 9), "moment": torch.zeros(45)}
    expected = 2 * 3 * math.sqrt(2) * torch.eye(9).double()
    assert torch.allclose(found.repair(nothing)["moment"], expected)
