"""Gaussian prototypes as a classifier that is linear in the features, and as a metric."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from mpfedcl.gaussian.covariance import NO_SCATTER
from mpfedcl.gaussian.statistics import unpack_symmetric
from mpfedcl.prototypes import PrototypePool

ABSENT = -1e30
"""The score of a class that no client holds; finite, so that no arithmetic on it gives NaN."""


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
