"""the coordinate-wise mean without the smallest and largest values (Yin et al., 2018)."""

from collections.abc import Sequence

import torch

from mpfedcl.core.tensors import Tensors
from mpfedcl.rounds.aggregation.base import RuleOverAll


class TrimmedMean(RuleOverAll):
    """Of each number the clients' f least and f greatest values are left out; the rest is averaged.

    f are the attackers that `aggregation.attackers` allows for. All clients count alike.
    """

    def combine(self, updates: Sequence[Tensors], attackers: int) -> Tensors:
        """Return the trimmed means."""
        kept = slice(attackers, len(updates) - attackers)
        return {
            name: torch.stack([each[name] for each in updates]).sort(dim=0).values[kept].mean(0)
            for name in updates[0]
        }
