"""A client's own covariance: its samples' scatter, as far as clients' scatters differ at all."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mpfedcl.gaussian.covariance import Covariance, Shrinkage

_CAUTION = 2.0
"""The same constant as for scores: how much noisier than estimated a client's scatter is."""


def own_strength(covariance: Covariance, degrees: Tensor, scatter: float) -> float:
    """Return nu, the samples that the pooled covariance counts for beside a client's own.

    Args:
        covariance: S.
        degrees: [N] f_i of each client.
        scatter: Σ_i |W_i|² / f_i over clients.

    Infinity where clients' scatters differ no more than samples of one covariance would.
    """
    total = float(degrees.sum())
    if not total or not covariance.trace:
        return math.inf
    square, trace = float(covariance.spectrum.square().sum()), covariance.trace
    noise = (square - trace**2 / total) / (1 + 1 / total) + trace**2
    others = int((degrees > 0).sum()) - 1
    room = total - float(degrees.square().sum()) / total
    if room <= 1e-9 * total:
        return math.inf
    differ = (scatter - total * square - others * noise) / room
    return _CAUTION * noise / differ if differ > 0 else math.inf


@dataclass(frozen=True)
class OwnCovariance:
    """S_i = (W_i + nu S) / (f_i + nu), given by the pooled S and a client's centred samples."""

    pooled: Covariance
    centred: Tensor
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
        rows = self.centred
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
