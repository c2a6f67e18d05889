"""the mean of updates clipped around a center, three times (Karimireddy, He and Jaggi, 2021)."""

import torch
from torch import Tensor

from mpfedcl.rounds.aggregation.base import RuleByDistances, distances_to

_STEPS = 3


class CenteredClipping(RuleByDistances):
    """v <- v + 1/n Σ (x_i - v) min(1, r / |x_i - v|), thrice.

    The radius r is the median of the distances to v, taken again in each step, so that it fits
    every model and round. The first v is the update with the least median distance to the others:
    the paper's, the round before, needs momentum at the clients. All clients count alike.
    """

    def shares(self, squared_distances: Tensor, attackers: int) -> Tensor:
        """Return the shares after the last step."""
        count = len(squared_distances)
        first = squared_distances.median(dim=1).values.argmin()
        shares = torch.nn.functional.one_hot(first, count).to(squared_distances)
        for _ in range(_STEPS):
            distances = distances_to(shares, squared_distances)
            radius = distances.quantile(0.5)
            scales = (radius / distances).nan_to_num(nan=1.0, posinf=1.0).clamp(max=1)
            shares = shares * (1 - scales.mean()) + scales / count
        return shares
