"""FedRidge: ridge regression on one-hot targets (as Fed3R and AFL), one-shot."""

import torch

from mpfedcl.gaussian import ABSENT, ClientMeans, Components, unpack_symmetric
from mpfedcl.methods import OneShot, Tensors

_RIDGE = 0.1
"""The ridge penalty, relative to the mean eigenvalue of the second moment."""


class FedRidge(OneShot):
    """w_c = (M + 0.1 tr(M)/d I)^-1 s_c, equal to ridge regression on the pooled samples.

    Clients upload class sums s_c [d] and the second moment M [d, d] of their features.
    """

    name = "fedridge"
    summary = "ridge regression on one-hot targets, one-shot"
    paper = "as Fed3R and AFL"
    second_moment = "moment"

    def fit(self, sums: Tensors, groups: ClientMeans) -> tuple[Components, Tensors]:
        """Solve the normal equations."""
        moment = unpack_symmetric(sums["moment"].double(), groups.vectors.shape[1])
        moment.diagonal().add_(_RIDGE * float(moment.trace()) / len(moment))
        targets = sums["sums"].double()
        weight = torch.cholesky_solve(targets.T, torch.linalg.cholesky(moment)).T
        bias = torch.zeros_like(sums["counts"]).masked_fill(sums["counts"] == 0, ABSENT)
        return Components(weight.unsqueeze(1), bias.double().unsqueeze(1)), {}
