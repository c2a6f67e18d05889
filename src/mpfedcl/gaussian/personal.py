"""A client's own Gaussian classifier, and what the client chooses by leaving out its samples.

The pooled estimates come from all clients. With its own samples a client has its own prototypes and
covariance, and chooses the sharpness of its scores by the likelihood of each of its samples under
the classifier without that sample, in closed form.
"""

import math
from typing import NamedTuple, Self

import torch
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.gaussian.classifier import Covariance, Shrinkage, make_components, solve_own
from mpfedcl.gaussian.effects import ClientEffects
from mpfedcl.gaussian.statistics import center_by_class

SMOOTHING = 0.1
"""Added to each count of a label prior, so that a class without samples is not impossible."""
SHARPNESS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 8.0)
"""Candidates for the factor on a client's scores."""
_SPREAD = 0.5
"""Standard deviation of the prior of log sharpness."""
_HURDLE = 3.0
"""The gain of log-likelihood below which a client chooses nothing: its few samples are noisy."""


class GaussianPool(NamedTuple):
    """The pooled estimates that a client needs for its own classifier."""

    covariance: Covariance
    shrinkage: Shrinkage
    effects: ClientEffects
    strength: float
    """nu, of `own_strength`."""
    degrees: float
    """F, the degrees of freedom of the covariance."""
    means: Tensor
    """[C, d], float64."""
    counts: Tensor
    """[C], float64: 0 for a class that no client holds."""

    @property
    def origin(self) -> Tensor:
        """Return the mean of all samples [d]."""
        return self.counts @ self.means / self.counts.sum().clamp(min=1)

    def to(self, dtype: torch.dtype) -> Self:
        """Return the estimates in another precision, which suffices for a single client."""
        means, counts = self.means.to(dtype), self.counts.to(dtype)
        return self._replace(covariance=self.covariance.to(dtype), means=means, counts=counts)

    def sharpened(self, sharpness: float) -> Self:
        """Return the estimates with the sharpness of a client's scores."""
        weight, temperature = self.shrinkage
        return self._replace(shrinkage=Shrinkage(weight, temperature / sharpness))


class OwnMeans(NamedTuple):
    """The class means of one client next to the pooled ones, and its best prediction of both.

    With E_c the difference of a class mean, v_c = 1/(t_e + 1/n_c), 0 for a class without samples,
    and b = t_b Σ_c v_c E_c / (1 + t_b Σ_c v_c), a prototype is m_c = mu_c + b + t_e v_c (E_c - b).
    """

    effects: ClientEffects
    counts: Tensor
    """[C], n_c."""

    @property
    def trust(self) -> Tensor:
        """Return v_c [C]."""
        return self.counts / (1 + self.effects.by_class * self.counts)

    def prototypes(self, pooled: Tensor, own: Tensor) -> Tensor:
        """Return m_c [C, d] for pooled means and a client's own [C, d]."""
        trust, away = self.trust.unsqueeze(1), own - pooled
        shift = self.effects.shift * (trust * away).sum(0) / (1 + self.effects.shift * trust.sum())
        return pooled + shift + self.effects.by_class * trust * (away - shift)

    def without(
        self, rows: Tensor, labels: Tensor, pooled: Tensor, own: Tensor, pace: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return what changes if each of the samples is left out: b - b' and m'_y, [n, d] each.

        `pace` [n] is 1/(N_y - 1), the weight by which a sample moves the pooled mean of its class,
        or 0. Both results are linear in `rows` [n, d], `pooled` and `own` together.
        """
        shift, effect, trust, away = *self.effects, self.trust, own - pooled
        left = self.counts[labels] - 1
        before, after = trust[labels], left / (1 + effect * left)
        mean = pooled[labels] - pace.unsqueeze(1) * (rows - pooled[labels])
        other = own[labels] - (rows - own[labels]) / left.clamp(min=1).unsqueeze(1) - mean
        pulled = (trust.unsqueeze(1) * away).sum(0)
        moved = pulled - before.unsqueeze(1) * away[labels] + after.unsqueeze(1) * other
        total = trust.sum()
        old = shift * pulled / (1 + shift * total)
        new = shift * moved / (1 + shift * (total - before + after)).unsqueeze(1)
        return old - new, mean + new + effect * after.unsqueeze(1) * (other - new)


def own_classifier(pool: GaussianPool, counts: Tensor, sums: Tensor, centered: Tensor) -> Tensors:
    """Return a client's classifier from its counts [C], sums [C, d] and centered features [n, d].

    `centered` may be any rows R with R'R = W_i.
    """
    answered = ((pool.counts > 0) | (counts > 0)).nonzero().squeeze(1)
    pooled, own = _both_means(pool, counts, sums)
    prototypes = OwnMeans(pool.effects, counts).prototypes(pooled, own)[answered]
    origin, degrees = pool.origin, float((counts - 1).clamp(min=0).sum())
    solved = solve_own(
        prototypes - origin,
        pool.covariance,
        centered,
        degrees,
        pool.strength,
        pool.shrinkage.weight,
    )
    return make_components(
        prototypes,
        solved,
        answered,
        torch.ones_like(prototypes[:, 0]),
        origin=origin,
        temperature=pool.shrinkage.temperature,
        num_classes=len(counts),
    )._asdict()


def _both_means(pool: GaussianPool, counts: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pooled means and a client's own; one stands in for the other if it is unknown."""
    own = sums / counts.clamp(min=1).unsqueeze(1)
    pooled = torch.where((pool.counts > 0).unsqueeze(1), pool.means, own)
    return pooled, torch.where((counts > 0).unsqueeze(1), own, pooled)


def left_out_scores(
    pool: GaussianPool, features: Tensor, labels: Tensor, counts: Tensor, sums: Tensor, sent: Tensor
) -> Tensor:
    """Return the scores [n, C] of samples, each under the client's classifier without that sample.

    A sample is taken out of the client's counts and means, the pooled means and both covariances;
    t_b, t_e, nu, lambda, the trace and the degrees of freedom stay as estimated. With r the sample
    minus its class mean, the metric becomes A + k (A r)(A r)', k = g / (1 - g r'A r), with the
    weight g that r r' has in it.

    Args:
        pool: The pooled estimates.
        features: [n, d].
        labels: [n].
        counts: [C] of the client.
        sums: [C, d] of the client.
        sent: [C], whether the client's samples of a class are among the pooled ones.

    -inf for a class that no other client holds.
    """
    weight, temperature = pool.shrinkage
    origin = pool.origin
    pooled, own = (each - origin for each in _both_means(pool, counts, sums))
    rows, degrees = features - origin, float((counts - 1).clamp(min=0).sum())
    centered = center_by_class(features, labels, counts, sums)

    def solve(vectors: Tensor) -> Tensor:
        return solve_own(vectors, pool.covariance, centered, degrees, pool.strength, weight)

    solved_rows, solved_means = solve(rows), solve(torch.cat([pooled, own]))
    solved_pooled, solved_own = solved_means[: len(counts)], solved_means[len(counts) :]
    known = pool.counts > 0
    sizes = torch.where(known, pool.counts, counts)
    in_mean = sent | ~known
    pace = (in_mean / (sizes - 1).clamp(min=1))[labels]
    means = OwnMeans(pool.effects, counts)
    shift, mean = means.without(rows, labels, pooled, own, pace)
    solved_shift, solved_mean = means.without(solved_rows, labels, solved_pooled, solved_own, pace)
    prototypes, solved = means.prototypes(pooled, own), means.prototypes(solved_pooled, solved_own)
    solved_away = solved_rows - solved_own[labels]
    # Of other classes than its own: u = x - m + (1 - t_e v)(b - b').
    share = 1 - pool.effects.by_class * means.trust

    def dot(left: Tensor, right: Tensor) -> Tensor:
        return (left * right).sum(1, keepdim=True)

    distances = dot(rows, solved_rows) - 2 * solved_rows @ prototypes.T
    distances = distances + (prototypes * solved).sum(1)
    distances += 2 * share * (dot(rows, solved_shift) - solved_shift @ prototypes.T)
    distances += share**2 * dot(shift, solved_shift)
    along = dot(rows, solved_away) - solved_away @ prototypes.T + share * dot(shift, solved_away)
    place, rest = labels.unsqueeze(1), rows - mean
    distances.scatter_(1, place, dot(rest, solved_rows - solved_mean))
    along.scatter_(1, place, dot(rest, solved_away))
    # The weight of r r' in the metric's inverse.
    size, is_sent = counts[labels], sent[labels].to(rows)
    share_pooled = is_sent / pool.degrees
    if not math.isinf(pool.strength):
        share_pooled = (1 + pool.strength * share_pooled) / (degrees + pool.strength)
    removed = (1 - weight) * share_pooled * size / (size - 1).clamp(min=1)
    leverage = removed * dot(rows - own[labels], solved_away).squeeze(1)
    distances += (removed / (1 - leverage)).unsqueeze(1) * along.square()
    scores = -distances / (2 * temperature)
    vanished = in_mean & (sizes <= 1)
    scores = scores.masked_fill((sizes == 0).expand_as(scores), -math.inf)
    return scores.masked_fill(
        place.eq(torch.arange(len(counts), device=place.device)) & vanished, -math.inf
    )


def choose_sharpness(
    pool: GaussianPool, features: Tensor, labels: Tensor, counts: Tensor, sums: Tensor, sent: Tensor
) -> float:
    """Return the sharpness under which left-out samples are likeliest; arguments as above.

    The label prior is that of the other samples. A prior keeps the sharpness near 1, and another
    value must be clearly better.
    """
    place = labels.unsqueeze(1)
    prior = (counts.double() + SMOOTHING).log().repeat(len(labels), 1)
    prior.scatter_(1, place, (counts[labels].double() - 1 + SMOOTHING).log().unsqueeze(1))
    scores = left_out_scores(pool, features, labels, counts, sums, sent).double()
    possible = scores.gather(1, place).isfinite().squeeze(1)
    scores, prior, place = scores[possible], prior[possible], place[possible]
    found = {}
    for sharpness in SHARPNESS:
        likely = torch.log_softmax(sharpness * scores + prior, dim=1).gather(1, place).sum()
        found[sharpness] = float(likely) - math.log(sharpness) ** 2 / (2 * _SPREAD**2)
    best = max(SHARPNESS, key=lambda each: found[each])
    return best if found[best] > found[1.0] + _HURDLE else 1.0
