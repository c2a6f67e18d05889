"""How far samples are from prototypes in the metric of a covariance (Mahalanobis)."""

from dataclasses import replace

import torch
from torch import Tensor

from mpfedcl.gaussian.covariance import NO_SCATTER
from mpfedcl.gaussian.sums import unpack_symmetric
from mpfedcl.prototypes import PrototypePool


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
        # Without any scatter, where nobody has two samples of a class, A is d I.
        even = shrinkage * trace / size if trace > NO_SCATTER else 1 / size
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
