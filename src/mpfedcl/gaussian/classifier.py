"""The Gaussian classifier: the shrunk covariance within classes, a client's own, and the scores."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from mpfedcl.gaussian.statistics import unpack_symmetric
from mpfedcl.prototypes import PrototypePool

SHRINKAGES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Candidates for lambda."""
_NARROW = 0.4
"""The least lambda if the estimates for new samples are too noisy to choose a smaller one."""
_MOST_LEVERAGE = 0.3
"""Beyond it the estimates for new samples are not to be believed: with few samples they would
choose a small lambda, and directions in which the samples happen not to scatter."""
_CAUTION = 2.0
"""Scores are assumed to vary, and a client's scatter to be noisy, by this factor more than
estimated."""
_LEAST_SEPARATION = 0.1
"""The separation on new samples is at least this share of that on training samples."""
ABSENT = -1e30
"""The score of a class that no client holds; finite, so that no arithmetic on it gives NaN."""
_NO_SCATTER = 1e-12
"""A smaller trace is rounding error, because features have norm 1."""


@dataclass(frozen=True)
class Covariance:
    """A symmetric positive semidefinite matrix in its eigenbasis: S = U diag(e) U'."""

    basis: Tensor
    """[d, d]: U, a column per eigenvector."""
    spectrum: Tensor
    """[d]: e, nonnegative."""

    @classmethod
    def decompose(cls, matrix: Tensor) -> Self:
        """Return the eigendecomposition of a matrix, in float64."""
        spectrum, basis = torch.linalg.eigh(matrix.double())
        spectrum = spectrum.clamp(min=0)
        return cls(basis, spectrum if float(spectrum.sum()) > _NO_SCATTER else spectrum * 0)

    @classmethod
    def spherical(cls, trace: float, like: Tensor) -> Self:
        """Return a covariance of this trace that is equal in all directions of `like` [..., d]."""
        size = like.shape[-1]
        basis = torch.eye(size, dtype=torch.float64, device=like.device)
        return cls(basis, torch.full_like(basis[0], trace / size))

    @property
    def trace(self) -> float:
        """Return tr S."""
        return float(self.spectrum.sum())

    def precision(self, shrinkage: float) -> Tensor:
        """Return a [d], the eigenvalues of A = ((1 - lambda) S + lambda tr(S)/d I)^-1.

        Without any scatter, if no client has two samples of a class, A is d I: the nearest mean.
        """
        size = len(self.spectrum)
        if not self.trace:
            return torch.full_like(self.spectrum, size)
        return 1 / ((1 - shrinkage) * self.spectrum + shrinkage * self.trace / size)

    def to(self, dtype: torch.dtype) -> Self:
        """Return the covariance in another precision, which suffices for a single client."""
        return type(self)(self.basis.to(dtype), self.spectrum.to(dtype))

    def solve(self, vectors: Tensor, shrinkage: float) -> Tensor:
        """Return A v for each row of `vectors` [..., d]."""
        return (vectors @ self.basis * self.precision(shrinkage)) @ self.basis.T


class Shrinkage(NamedTuple):
    """The shrinkage of a covariance, and the temperature of its scores."""

    weight: float
    """lambda: the weight of the isotropic part."""
    temperature: float
    """T: scores divided by it are calibrated log-likelihoods."""


def choose_shrinkage(
    covariance: Covariance, degrees: float, means: Tensor, counts: Tensor, *, wide: bool = True
) -> Shrinkage:
    """Choose lambda and T from estimates for new samples; no data is held out.

    Args:
        covariance: S.
        degrees: F, the degrees of freedom behind it.
        means, counts: [C, d] and [C], of the classes that any client holds.
        wide: Whether to choose among all candidates by leverage, or only among those from 0.4 on.

    S and the means are fitted to the training samples. With the leverage
    h = (1 - lambda) Σ a e / F taken out, classes are separated on new samples by
    sep = Σ a M - (K - 1) Σ a e / (1 - h), with variance var = Σ a² e M / (1 - h)²; M are the means'
    squares along each eigenvector, by count. Among the lambdas with h of at most 0.3, or else only
    the largest, lambda has the largest sep²/var; T = 2 var/sep.
    """
    overall = (counts.unsqueeze(1) * means).sum(0) / counts.sum()
    along = ((means - overall) @ covariance.basis).square()
    spread = (counts.unsqueeze(1) * along).sum(0)
    best, chosen = -torch.inf, Shrinkage(SHRINKAGES[-1], _CAUTION)
    # From the largest, which is taken if the leverage of all is too large.
    for weight in reversed(SHRINKAGES) if covariance.trace else ():
        a, e = covariance.precision(weight), covariance.spectrum
        noise = float((a * e).sum())
        leverage = (1 - weight) * noise / degrees
        is_allowed = leverage <= _MOST_LEVERAGE if wide else weight >= _NARROW
        if not is_allowed and best > -torch.inf:
            break
        # Positive in exact arithmetic.
        kept = max(1 - leverage, torch.finfo(torch.float64).eps)
        seen = float((a * spread).sum())
        separation = seen - (len(means) - 1) * noise / kept
        variance = float((a.square() * e * spread).sum()) / kept**2
        if not variance > 0:
            continue
        quality = separation * abs(separation) / variance
        if quality > best:
            temperature = _CAUTION * variance / max(separation, _LEAST_SEPARATION * seen)
            best, chosen = quality, Shrinkage(weight, temperature)
    return chosen


class Degrees(NamedTuple):
    """The degrees of freedom f_i of all clients' scatters, by totals."""

    total: float
    squares: float
    """Σ_i f_i²."""
    clients: int
    """Those with f_i > 0."""


def own_strength(covariance: Covariance, degrees: Degrees, scatter: float) -> float:
    """Return nu, the weight of the pooled covariance in samples, relative to a client's samples.

    Args:
        covariance: S.
        degrees: Of the clients' scatters.
        scatter: Σ_i |W_i|² / f_i over clients.

    Infinity if clients' scatters differ no more than samples of one covariance would.
    """
    total = degrees.total
    if not total or not covariance.trace:
        return math.inf
    square, trace = float(covariance.spectrum.square().sum()), covariance.trace
    noise = (square - trace**2 / total) / (1 + 1 / total) + trace**2
    others = degrees.clients - 1
    room = total - degrees.squares / total
    if room <= 1e-9 * total:
        return math.inf
    differ = (scatter - total * square - others * noise) / room
    return _CAUTION * noise / differ if differ > 0 else math.inf


def solve_own(
    vectors: Tensor,
    pooled: Covariance,
    centered: Tensor,
    degrees: float,
    strength: float,
    shrinkage: float,
) -> Tensor:
    """Return A_i v for each row of `vectors` [V, d], with a client's S_i = (W_i + nu S)/(f_i + nu).

    `centered` [n, d] are the client's features minus their class means, so that W_i = X'X;
    `degrees` is f_i and `strength` nu.
    """
    if math.isinf(strength):
        return pooled.solve(vectors, shrinkage)
    size, total = len(pooled.spectrum), degrees + strength
    trace = (float(centered.square().sum()) + strength * pooled.trace) / total
    own = (1 - shrinkage) / total
    diagonal = own * strength * pooled.spectrum + shrinkage * trace / size
    rotated, rights = centered @ pooled.basis * own**0.5, vectors @ pooled.basis
    if len(centered) < size:
        found = _solve_few_rows(diagonal, rotated, rights)
    else:
        whole = rotated.T @ rotated + diagonal.diag()
        found = torch.cholesky_solve(rights.T, torch.linalg.cholesky(whole)).T
    return found @ pooled.basis.T


def _solve_few_rows(diagonal: Tensor, rows: Tensor, rights: Tensor) -> Tensor:
    """Solve (D + Z'Z) x = r for each row r, by a system as small as Z has rows (Woodbury)."""
    scaled = rows / diagonal
    small = scaled @ rows.T
    small.diagonal().add_(1)
    begun = rights / diagonal
    inner = torch.cholesky_solve(rows @ begun.T, torch.linalg.cholesky(small))
    return begun - inner.T @ scaled


# The classifier


class Components(NamedTuple):
    """The parts that each class's score is made of: log Σ_g exp(weight_cg · phi + bias_cg)."""

    weight: Tensor
    """[C, G, d]; zeros where a class has fewer than G parts."""
    bias: Tensor
    """[C, G]; `ABSENT` where a class has fewer."""


def make_components(
    prototypes: Tensor,
    solved: Tensor,
    labels: Tensor,
    shares: Tensor,
    *,
    origin: Tensor,
    temperature: float,
    num_classes: int,
) -> Components:
    """Return each prototype's log-likelihood, over that of the origin, as a part of its class.

    Args:
        prototypes: [G, d], m.
        solved: [G, d], A (m - origin).
        labels, shares: [G], the class of each and its share in the class; shares add up to 1.
        origin: [d]. What all classes have in common is left out, and with it rounding.
        temperature: T.
        num_classes: C.
    """
    halves = (solved * (prototypes + origin)).sum(1) / 2
    biases = -halves / temperature + shares.log()
    counts = torch.bincount(labels, minlength=num_classes)
    order = labels.argsort(stable=True)
    place = torch.arange(len(labels), device=labels.device)
    slot = place - (counts.cumsum(0) - counts)[labels[order]]
    most = max(1, int(counts.max()))
    weight = solved.new_zeros(num_classes, most, solved.shape[1])
    bias = solved.new_full((num_classes, most), ABSENT)
    weight[labels[order], slot] = solved[order] / temperature
    bias[labels[order], slot] = biases[order]
    return Components(weight, bias)


def score(components: Components, features: Tensor) -> Tensor:
    """Return the log-likelihoods [B, C] of features [B, d], up to what classes have in common."""
    weight, bias = components
    parts = features @ weight.flatten(0, 1).T + bias.flatten()
    if weight.shape[1] == 1:
        return parts
    return torch.logsumexp(parts.view(*parts.shape[:-1], *bias.shape), dim=-1)


class Metric:
    """D² = (phi - m)' A (phi - m), with A = ((1 - lambda) S + lambda tr(S)/d I)^-1.

    With A^-1 = L L' it is a plain distance between L^-1 phi and L^-1 m.

    Args:
        covariance: [d (d + 1) / 2], S, packed.
        shrinkage: lambda.
        prototypes: The m.
    """

    def __init__(self, covariance: Tensor, shrinkage: float, prototypes: PrototypePool) -> None:
        size = prototypes.dimension
        matrix = unpack_symmetric(covariance.double(), size)
        trace = float(matrix.trace())
        # Without any scatter, if no client has two samples of a class, A is d I.
        even = shrinkage * trace / size if trace > _NO_SCATTER else 1 / size
        matrix = (1 - shrinkage) * matrix
        matrix.diagonal().add_(even)
        self._root = torch.linalg.cholesky(matrix)
        self.prototypes = replace(prototypes, vectors=self.whiten(prototypes.vectors))
        """Where plain distances are those of the metric."""

    def whiten(self, features: Tensor) -> Tensor:
        """Return L^-1 phi for each row of `features` [B, d], in float64."""
        columns = features.double().T
        solved: Tensor = torch.linalg.solve_triangular(self._root, columns, upper=False)
        return solved.T
