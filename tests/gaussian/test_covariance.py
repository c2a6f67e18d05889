"""The metric and its scores, against formulas written out with inverses and densities."""

import math

import numpy
import pytest
import torch
from clients_cases import Array, draw_clients, group_means, within_by_loop
from scipy.special import logsumexp
from scipy.stats import multivariate_normal
from torch import Tensor

from mpfedcl.gaussian import (
    ABSENT,
    Covariance,
    Degrees,
    Shrinkage,
    center_by_class,
    choose_shrinkage,
    make_components,
    own_strength,
    score,
    solve_own,
)
from mpfedcl.gaussian.classifier import SHRINKAGES

SIZES = [[9, 4, 0], [0, 12, 5], [6, 6, 6]]


def degrees_of(degrees: Tensor) -> Degrees:
    return Degrees(float(degrees.sum()), float(degrees.square().sum()), int((degrees > 0).sum()))


def shrunk_inverse(matrix: Array, weight: float) -> Array:
    size = len(matrix)
    even = numpy.trace(matrix) / size * numpy.eye(size)
    inverse: Array = numpy.linalg.inv((1 - weight) * matrix + weight * even)
    return inverse


def pooled(sizes: list[list[int]] = SIZES) -> tuple[Array, float]:
    clients = draw_clients(0, sizes)
    degrees = sum(n - 1 for counts in sizes for n in counts if n)
    return numpy.sum([within_by_loop(c, 3) for c in clients], axis=0) / degrees, degrees


def test_rounding_errors_count_as_no_scatter() -> None:
    rounding = 1e-15 * torch.diag(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    assert Covariance.decompose(rounding).precision(0.4).tolist() == [3, 3, 3]


def test_metric_is_the_inverse_of_the_shrunk_covariance() -> None:
    matrix, _ = pooled()
    covariance = Covariance.decompose(torch.from_numpy(matrix))
    vectors = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected = vectors.numpy() @ shrunk_inverse(matrix, 0.5)
    numpy.testing.assert_allclose(covariance.solve(vectors, 0.5).numpy(), expected)


def test_metric_without_scatter_is_isotropic() -> None:
    covariance = Covariance.decompose(torch.zeros(3, 3))
    assert covariance.solve(torch.tensor([[1.0, 2.0, 3.0]]).double(), 0.5).tolist() == [[3, 6, 9]]


def shrinkage_by_formula(
    matrix: Array,
    degrees: float,
    means: Array,
    counts: Array,
) -> Shrinkage:
    """Return lambda and T with matrices in place of eigenvalues."""
    overall = (counts[:, None] * means).sum(0) / counts.sum()
    away = means - overall
    between = (counts[:, None] * away).T @ away
    found = []
    for weight in SHRINKAGES:
        inverse = shrunk_inverse(matrix, weight)
        noise = numpy.trace(inverse @ matrix)
        leverage = (1 - weight) * noise / degrees
        if leverage > 0.3 and weight < 0.9:
            continue
        seen = numpy.trace(inverse @ between)
        separation = seen - (len(means) - 1) * noise / (1 - leverage)
        variance = numpy.trace(inverse @ matrix @ inverse @ between) / (1 - leverage) ** 2
        temperature = 2 * variance / max(separation, 0.1 * seen)
        found.append((separation * abs(separation) / variance, Shrinkage(weight, temperature)))
    return max(found)[1]


@pytest.mark.parametrize("factor", [1, 4, 30], ids=["few samples", "more", "many"])
def test_shrinkage_and_temperature_match_the_formulas(factor: int) -> None:
    sizes = [[factor * count for count in counts] for counts in SIZES]
    matrix, degrees = pooled(sizes)
    groups = group_means(draw_clients(0, sizes), 3)
    means, counts = groups.class_means, groups.class_counts
    found = choose_shrinkage(Covariance.decompose(torch.from_numpy(matrix)), degrees, means, counts)
    expected = shrinkage_by_formula(matrix, degrees, means.numpy(), counts.numpy())
    assert found.weight == expected.weight
    assert found.temperature == pytest.approx(expected.temperature, rel=1e-9)


def test_few_degrees_of_freedom_need_much_shrinkage() -> None:
    """A leverage above 0.3 is not believed, however well the classes seem to be separated."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(8, 40, generator=generator, dtype=torch.float64)
    covariance = Covariance.decompose(rows.T @ rows / 8)
    means = torch.randn(3, 40, generator=generator, dtype=torch.float64)
    counts = torch.tensor([4.0, 4.0, 3.0], dtype=torch.float64)
    assert choose_shrinkage(covariance, 8.0, means, counts).weight == 0.9
    many = choose_shrinkage(covariance, 1e6, means, counts)
    assert many.weight < 0.1
    assert choose_shrinkage(covariance, 1e6, means, counts, wide=False).weight == 0.4


def test_temperature_of_a_single_class_is_finite() -> None:
    matrix, degrees = pooled([[9, 0, 0]])
    found = choose_shrinkage(
        Covariance.decompose(torch.from_numpy(matrix)),
        degrees,
        torch.ones(1, 6).double(),
        torch.tensor([9.0]).double(),
    )
    assert found.temperature > 0
    assert math.isfinite(found.temperature)


def test_scores_are_log_densities_of_a_mixture() -> None:
    """Against scipy's densities: the scores differ from theirs by the same number everywhere."""
    matrix, _ = pooled()
    generator = torch.Generator().manual_seed(4)
    prototypes = torch.randn(4, 6, dtype=torch.float64, generator=generator)
    labels, shares = torch.tensor([0, 2, 2, 2]), torch.tensor([1.0, 0.5, 0.3, 0.2]).double()
    origin = torch.randn(6, dtype=torch.float64, generator=generator)
    covariance = Covariance.decompose(torch.from_numpy(matrix))
    components = make_components(
        prototypes,
        covariance.solve(prototypes - origin, 0.5),
        labels,
        shares,
        origin=origin,
        temperature=1.0,
        num_classes=4,
    )
    samples = torch.randn(5, 6, dtype=torch.float64, generator=generator)
    found = score(components, samples).numpy()
    spread = numpy.linalg.inv(shrunk_inverse(matrix, 0.5))
    densities = numpy.stack(
        [multivariate_normal(m.numpy(), spread).logpdf(samples.numpy()) for m in prototypes], axis=1
    )
    expected = numpy.stack(
        [densities[:, 0], logsumexp(densities[:, 1:], axis=1, b=shares[1:].numpy())], axis=1
    )
    numpy.testing.assert_allclose(found[:, 0] - found[:, 2], expected[:, 0] - expected[:, 1])
    assert (found[:, [1, 3]] < ABSENT / 2).all()


def test_strength_of_the_pool_matches_the_formula() -> None:
    # Clients with different covariances, so that some strength is finite.
    clients = draw_clients(5, [[40, 0, 0], [0, 30, 30]])
    clients[0].features[:, 0] *= 4
    scatters = [within_by_loop(c, 3) for c in clients]
    degrees = numpy.array([39.0, 58.0])
    total = degrees.sum()
    s = numpy.sum(scatters, axis=0) / total
    square, trace = (s**2).sum(), numpy.trace(s)
    noise = (square - trace**2 / total) / (1 + 1 / total) + trace**2
    spread = sum((w**2).sum() / f for w, f in zip(scatters, degrees, strict=True))
    differ = (spread - total * square - noise) / (total - (degrees**2).sum() / total)
    covariance = Covariance.decompose(torch.from_numpy(s))
    found = own_strength(covariance, degrees_of(torch.from_numpy(degrees)), float(spread))
    assert differ > 0
    assert found == pytest.approx(2 * noise / differ)


@pytest.mark.parametrize("degrees", [[0.0, 0.0], [7.0, 0.0]])
def test_strength_is_infinite_if_one_client_has_scatter(degrees: list[float]) -> None:
    covariance = Covariance.decompose(torch.eye(2))
    assert own_strength(covariance, degrees_of(torch.tensor(degrees).double()), 3.0) == math.inf


@pytest.mark.parametrize("counts", [[3, 0, 1], [30, 5, 9]], ids=["few samples", "many samples"])
@pytest.mark.parametrize("strength", [0.5, 40.0, math.inf])
def test_personal_metric_matches_a_dense_inverse(counts: list[int], strength: float) -> None:
    matrix, _ = pooled()
    (client,) = draw_clients(8, [counts])
    tallied = torch.tensor(counts)
    sums = torch.zeros(3, 6, dtype=torch.float64).index_add_(0, client.labels, client.features)
    centered = center_by_class(client.features, client.labels, tallied, sums)
    degrees = sum(n - 1 for n in counts if n)
    covariance = Covariance.decompose(torch.from_numpy(matrix))
    vectors = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mixed = matrix
    if math.isfinite(strength):
        mixed = (within_by_loop(client, 3) + strength * matrix) / (degrees + strength)
    expected = vectors.numpy() @ shrunk_inverse(mixed, 0.6)
    found = solve_own(vectors, covariance, centered, degrees, strength, 0.6)
    numpy.testing.assert_allclose(found.numpy(), expected, rtol=1e-9)
