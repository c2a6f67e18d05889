"""the mean of the n - f updates that are nearest to their neighbors (Blanchard et al., 2017)."""

import torch
from torch import Tensor

from mpfedcl.rounds.aggregation.base import RuleByDistances
from mpfedcl.rounds.aggregation.krum import krum_scores


class MultiKrum(RuleByDistances):
    """The mean of the n - f updates with the best scores of Krum; it needs as many as Krum."""

    @classmethod
    def most_attackers(cls, count: int) -> int:
        """n > 2f + 2."""
        return (count - 3) // 2

    def shares(self, squared_distances: Tensor, attackers: int) -> Tensor:
        """Return equal shares of the chosen ones; of equal scores the first by name."""
        scores = krum_scores(squared_distances, attackers)
        chosen = scores.sort(stable=True).indices[: len(scores) - attackers]
        shares = torch.zeros_like(scores)
        shares[chosen] = 1 / len(chosen)
        return shares
