"""The covariance within classes, how far it is shrunk, and how far its scores can be trusted."""

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

SHRINKAGES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""What lambda is chosen from; less than 0.4 has never helped."""
_CAUTION = 2.0
"""The one constant of the method: how much wider than estimated scores are taken to spread."""
_LEAST_SEPARATION = 0.1
"""Of what the training samples show: what is left of it on new samples is at least this share."""
NO_SCATTER = 1e-12
"""A trace no larger is rounding: features have length 1, and equal ones scatter nowhere."""


@dataclass(frozen=True)
class Covariance:
    """A symmetric positive semidefinite matrix in its eigenbasis: S = U diag(e) U'."""

    basis: Tensor
    """[d, d]: U, a column per eigenvector."""
    spectrum: Tensor
    """[d]: e, none below 0."""

    @classmethod
    def decompose(cls, matrix: Tensor) -> Self:
        """Find the eigenbasis, in float64."""
        spectrum, basis = torch.linalg.eigh(matrix.double())
        spectrum = spectrum.clamp(min=0)
        return cls(basis, spectrum if float(spectrum.sum()) > NO_SCATTER else spectrum * 0)

    @classmethod
    def spherical(cls, trace: float, like: Tensor) -> Self:
        """Return a covariance of this trace that is alike in all directions of `like` [..., d]."""
        size = like.shape[-1]
        basis = torch.eye(size, dtype=torch.float64, device=like.device)
        return cls(basis, torch.full_like(basis[0], trace / size))

    @property
    def trace(self) -> float:
        """Return tr S."""
        return float(self.spectrum.sum())

    def precision(self, shrinkage: float) -> Tensor:
        """Return a [d], the eigenvalues of A = ((1 - lambda) S + lambda tr(S)/d I)^-1.

        Without any scatter, where nobody has two samples of a class, A is d I: the nearest mean.
        """
        size = len(self.spectrum)
        if not self.trace:
            return torch.full_like(self.spectrum, size)
        return 1 / ((1 - shrinkage) * self.spectrum + shrinkage * self.trace / size)

    def to(self, dtype: torch.dtype) -> Self:
        """Return the same in another precision: enough for what one client computes."""
        return type(self)(self.basis.to(dtype), self.spectrum.to(dtype))

    def solve(self, vectors: Tensor, shrinkage: float) -> Tensor:
        """Return A v for each row of `vectors` [..., d]."""
        return (vectors @ self.basis * self.precision(shrinkage)) @ self.basis.T


class Shrinkage(NamedTuple):
    """How a covariance becomes a metric, and by what its scores are divided."""

    weight: float
    """lambda: the share of the covariance that is spread evenly."""
    temperature: float
    """T: scores divided by it are log-likelihoods that can be believed."""


def choose_shrinkage(
    covariance: Covariance, degrees: float, means: Tensor, counts: Tensor
) -> Shrinkage:
    """Choose lambda and T by what the sums say of new samples; nothing is held out.

    Args:
        covariance: S.
        degrees: F, the degrees of freedom behind it.
        means, counts: [C, d] and [C], of the classes that somebody holds.

    The training samples lean on the S and the means that they made themselves. With the leverage
    h = (1 - lambda) Σ a e / F taken out, classes are separated on new samples by
    sep = Σ a M - (K - 1) Σ a e / (1 - h), with variance var = Σ a² e M / (1 - h)²; M are the means'
    squares along each eigenvector, by count. lambda has the largest sep²/var; T = 2 var/sep.
    """
    overall = (counts.unsqueeze(1) * means).sum(0) / counts.sum()
    along = ((means - overall) @ covariance.basis).square()
    spread = (counts.unsqueeze(1) * along).sum(0)
    best, chosen = -torch.inf, Shrinkage(SHRINKAGES[0], _CAUTION)
    for weight in SHRINKAGES if covariance.trace else ():
        a, e = covariance.precision(weight), covariance.spectrum
        noise = float((a * e).sum())
        kept = 1 - (1 - weight) * noise / degrees
        # By its bounds above 0; rounding may say otherwise.
        kept = max(kept, torch.finfo(torch.float64).eps)
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
