"""the one update that is nearest to its neighbors (Blanchard et al., 2017)."""

import torch
from torch import Tensor

from mpfedcl.rounds.aggregation.base import RuleByDistances


class Krum(RuleByDistances):
    """argmin_i Σ |x_i - x_j|² over the n - f - 2 updates x_j that are nearest to x_i.

    With f attackers it needs more than 2f + 2 updates. One client's model is the new one.
    """

    @classmethod
    def most_attackers(cls, count: int) -> int:
        """n > 2f + 2."""
        return (count - 3) // 2

    def shares(self, squared_distances: Tensor, attackers: int) -> Tensor:
        """Return 1 for the chosen one; of equal scores the first by name."""
        scores = krum_scores(squared_distances, attackers)
        return torch.nn.functional.one_hot(scores.argmin(), len(scores)).to(scores)


def krum_scores(squared_distances: Tensor, attackers: int) -> Tensor:
    """Return each update's sum over its n - f - 2 nearest others [n]."""
    count = len(squared_distances)
    others = squared_distances + torch.diag(squared_distances.new_full((count,), torch.inf))
    return others.sort(dim=1).values[:, : count - attackers - 2].sum(1)
