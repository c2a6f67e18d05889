"""A client's own covariance: its samples' scatter, as far as clients' scatters differ at all."""

import math
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from mpfedcl.gaussian.covariance import Covariance, Shrinkage

_CAUTION = 2.0
"""The same constant as for scores: how much noisier than estimated a client's scatter is."""


class Degrees(NamedTuple):
    """The degrees of freedom f_i of all clients' scatters, by totals."""

    total: float
    squares: float
    """Σ_i f_i²."""
    clients: int
    """Those with f_i > 0."""

    @classmethod
    def of(cls, degrees: Tensor) -> Self:
        """Return the totals of f_i [N]."""
        return cls(float(degrees.sum()), float(degrees.square().sum()), int((degrees > 0).sum()))


def own_strength(covariance: Covariance, degrees: Degrees, scatter: float) -> float:
    """Return nu, the samples that the pooled covariance counts for beside a client's own.

    Args:
        covariance: S.
        degrees: Of the clients' scatters.
        scatter: Σ_i |W_i|² / f_i over clients.

    Infinity where clients' scatters differ no more than samples of one covariance would.
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


@dataclass(frozen=True)
class OwnCovariance:
    """S_i = (W_i + nu S) / (f_i + nu), given by the pooled S and a client's centered samples."""

    pooled: Covariance
    centered: Tensor
    """[n, d]: features less their class means, W_i = X'X."""
    degrees: float
    strength: float
    """nu."""

    def solve(self, vectors: Tensor, shrinkage: Shrinkage) -> Tensor:
        """Return A_i v for each row of `vectors` [V, d]."""
        if math.isinf(self.strength):
            return self.pooled.solve(vectors, shrinkage.weight)
        weight, size = shrinkage.weight, len(self.pooled.spectrum)
        total = self.degrees + self.strength
        rows = self.centered
        trace = (float(rows.square().sum()) + self.strength * self.pooled.trace) / total
        own = (1 - weight) / total
        diagonal = own * self.strength * self.pooled.spectrum + weight * trace / size
        rotated, rights = rows @ self.pooled.basis * own**0.5, vectors @ self.pooled.basis
        if len(rows) < size:
            found = _solve_few_rows(diagonal, rotated, rights)
        else:
            whole = rotated.T @ rotated + diagonal.diag()
            found = torch.cholesky_solve(rights.T, torch.linalg.cholesky(whole)).T
        return found @ self.pooled.basis.T


def _solve_few_rows(diagonal: Tensor, rows: Tensor, rights: Tensor) -> Tensor:
    """Solve (D + Z'Z) x = r for each row r, by a system as small as Z has rows (Woodbury)."""
    scaled = rows / diagonal
    small = scaled @ rows.T
    small.diagonal().add_(1)
    begun = rights / diagonal
    inner = torch.cholesky_solve(rows @ begun.T, torch.linalg.cholesky(small))
    return begun - inner.T @ scaled
