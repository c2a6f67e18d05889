"""A client's own classifier: leave-one-out in closed form against refitting, and the sharpness."""

import math

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mpfedcl.gaussian import (
    SHARPNESS,
    ClientEffects,
    ClientMeans,
    Components,
    Covariance,
    GaussianPool,
    Shrinkage,
    center_by_class,
    choose_sharpness,
    left_out_scores,
    own_classifier,
    score,
)

NUM_CLASSES = 4


class Case:
    """A client of some samples, in a pool with others that hold some of the classes."""

    def __init__(self, seed: int, size: int, num_samples: int, *, least: int, shares: bool) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.labels = torch.randint(0, 3, (num_samples,), generator=generator)
        self.features = draw(num_samples, size)
        self.counts = torch.bincount(self.labels, minlength=NUM_CLASSES).double()
        self.sums = draw(NUM_CLASSES, size) * 0
        self.sums.index_add_(0, self.labels, self.features)
        others = torch.randint(0, 6, (NUM_CLASSES,), generator=generator).double()
        self.sent = self.counts >= least
        held = others + self.counts * self.sent
        sums = draw(NUM_CLASSES, size) * others.unsqueeze(1)
        sums = sums + self.sums * self.sent.unsqueeze(1)
        rows = center_by_class(self.features, self.labels, self.counts, self.sums)
        self.within = rows.T @ rows
        elsewhere = draw(30, size)
        self.pool = GaussianPool(
            Covariance.decompose((elsewhere.T @ elsewhere + self.within) / 40),
            Shrinkage(0.1, 1.7),
            ClientEffects(0.3, 0.2 * (seed % 3)),
            math.inf if shares else 5.0,
            40.0,
            sums / held.clamp(min=1).unsqueeze(1),
            held,
        )

    @property
    def samples(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.features, self.labels, self.counts, self.sums, self.sent

    def refit_without(self, row: int) -> Tensor:
        """Return the scores [C] of a sample by dense matrices fitted without it."""
        pool, label, sample = self.pool, int(self.labels[row]), self.features[row]
        size = len(sample)
        away = sample - self.sums[label] / self.counts[label]
        factor = self.counts[label] / max(1.0, float(self.counts[label]) - 1)
        scatter = factor * torch.outer(away, away)
        counts, sums = self.counts.clone(), self.sums.clone()
        counts[label] -= 1
        sums[label] -= sample
        held, totals = pool.counts.clone(), pool.means * pool.counts.unsqueeze(1)
        basis, spectrum = pool.covariance.basis, pool.covariance.spectrum
        shared = (basis * spectrum) @ basis.T
        total = float(shared.trace())
        degrees = float((self.counts - 1).clamp(min=0).sum())
        if self.sent[label]:
            held[label] -= 1
            totals[label] -= sample
            shared = shared - scatter / pool.degrees
        own = sums / counts.clamp(min=1).unsqueeze(1)
        known = pool.counts > 0
        pooled = torch.where(known.unsqueeze(1), totals / held.clamp(min=1).unsqueeze(1), own)
        shift, effect = pool.effects
        shares = [1 / (effect + 1 / n) if n else 0.0 for n in counts.tolist()]
        trust, apart = torch.tensor(shares, dtype=torch.float64).unsqueeze(1), own - pooled
        moved = shift * (trust * apart).sum(0) / (1 + shift * trust.sum())
        prototypes = pooled + moved + effect * trust * (apart - moved)
        if math.isfinite(pool.strength):
            whole = degrees + pool.strength
            total = (float(self.within.trace()) + pool.strength * total) / whole
            shared = (self.within - scatter + pool.strength * shared) / whole
        even = pool.shrinkage.weight * total / size * torch.eye(size).double()
        metric = torch.linalg.inv((1 - pool.shrinkage.weight) * shared + even)
        gaps = sample - prototypes
        scores = -((gaps @ metric) * gaps).sum(1) / (2 * pool.shrinkage.temperature)
        exists = torch.where(known, held > 0, counts > 0)
        return torch.where(exists, scores, torch.full_like(scores, -math.inf))


@given(
    st.integers(0, 2**31),
    st.integers(2, 8),
    st.integers(1, 14),
    st.sampled_from([1, 3]),
    st.booleans(),
)
def test_left_out_scores_equal_refitting_without_the_sample(
    seed: int, size: int, num_samples: int, least: int, shares: bool
) -> None:
    case = Case(seed, size, num_samples, least=least, shares=shares)
    found = left_out_scores(case.pool, *case.samples)
    for row, label in enumerate(case.labels.tolist()):
        wanted = case.refit_without(row)
        if not math.isfinite(wanted[label]):
            assert found[row, label] == -math.inf
            continue
        torch.testing.assert_close(found[row], wanted, rtol=1e-12, atol=1e-12)


def test_prototypes_equal_those_of_a_federation_with_the_client() -> None:
    case = Case(4, 6, 12, least=1, shares=True)
    held = case.counts.nonzero().squeeze(1)
    groups = ClientMeans(
        case.sums[held] / case.counts[held].unsqueeze(1),
        held,
        case.counts[held],
        torch.zeros_like(held),
        1,
        NUM_CLASSES,
    )
    effects, means = case.pool.effects, case.pool.means
    shifts = effects.shifts(groups, means)
    prototypes = means + shifts
    prototypes[held] = effects.group_means(groups, means, shifts)
    centered = center_by_class(case.features, case.labels, case.counts, case.sums)
    found = own_classifier(case.pool, case.counts, case.sums, centered)
    weight, temperature = case.pool.shrinkage
    wanted = case.pool.covariance.solve(prototypes - case.pool.origin, weight) / temperature
    known = (case.pool.counts > 0) | (case.counts > 0)
    torch.testing.assert_close(found["weight"][known, 0], wanted[known])


def test_sharpness_is_the_likeliest_of_left_out_samples() -> None:
    """With the criterion written out; scores far too sharp or too flat are corrected."""
    case = Case(2, 5, 400, least=1, shares=False)
    prior = numpy.log(case.counts.numpy() + 0.1)
    for heat, is_less in ((0.01, True), (1.0, None), (300.0, False)):
        pool = case.pool._replace(shrinkage=Shrinkage(0.1, heat))
        scores = left_out_scores(pool, *case.samples).numpy()
        found = {}
        for sharpness in SHARPNESS:
            total = -(math.log(sharpness) ** 2) / 0.5
            for row, label in enumerate(case.labels.tolist()):
                own = prior.copy()
                own[label] = math.log(case.counts[label] - 1 + 0.1)
                values = sharpness * scores[row] + own
                total += values[label] - numpy.logaddexp.reduce(values)
            found[sharpness] = total
        best = max(found, key=lambda each: found[each])
        wanted = best if found[best] > found[1.0] + 3 else 1.0
        assert choose_sharpness(pool, *case.samples) == wanted
        if is_less is not None:
            assert (wanted < 1) is is_less


def test_samples_that_nobody_else_knows_choose_nothing() -> None:
    case = Case(1, 5, 9, least=1, shares=False)
    few = torch.tensor([0])
    counts = torch.bincount(case.labels[few], minlength=NUM_CLASSES).double()
    sums = torch.zeros_like(case.sums).index_add_(0, case.labels[few], case.features[few])
    pool = case.pool._replace(counts=counts, means=sums)
    own = (case.features[few], case.labels[few], counts, sums, counts > 0)
    assert bool((left_out_scores(pool, *own).gather(1, own[1].unsqueeze(1)) == -math.inf).all())
    assert choose_sharpness(pool, *own) == 1.0


@pytest.mark.parametrize("sharpness", [0.5, 2.8])
def test_sharpness_multiplies_the_scores(sharpness: float) -> None:
    case = Case(3, 6, 12, least=1, shares=False)
    centered = center_by_class(case.features, case.labels, case.counts, case.sums)
    own = (case.counts, case.sums, centered)
    plain, sharp = (
        score(Components(**own_classifier(pool, *own)), case.features)
        for pool in (case.pool, case.pool.sharpened(sharpness))
    )
    known = ((case.pool.counts > 0) | (case.counts > 0)).nonzero().squeeze(1)
    torch.testing.assert_close(sharp[:, known], sharpness * plain[:, known])
