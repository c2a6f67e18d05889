"""Coordinate-wise rules (Yin et al., 2018); all clients count alike."""

from collections.abc import Sequence

import torch

from mpfedcl.core.tensors import Tensors
from mpfedcl.rounds.aggregation.base import RuleOverAll


class CoordinateMedian(RuleOverAll):
    """Each number is the median of the clients' numbers.

    Of an even number of clients it is the mean of the two in the middle.
    """

    def combine(self, updates: Sequence[Tensors], attackers: int) -> Tensors:
        """Return the medians."""
        low, high = (len(updates) - 1) // 2, len(updates) // 2
        medians: Tensors = {}
        for name in updates[0]:
            ordered = torch.stack([each[name] for each in updates]).sort(dim=0).values
            # Halves first: the sum of two large numbers may overflow.
            medians[name] = ordered[low] / 2 + ordered[high] / 2 if low < high else ordered[low]
        return medians


class TrimmedMean(RuleOverAll):
    """Of each number the clients' f least and f greatest values are left out; the rest is averaged.

    f are the attackers that `aggregation.attackers` allows for.
    """

    def combine(self, updates: Sequence[Tensors], attackers: int) -> Tensors:
        """Return the trimmed means."""
        kept = slice(attackers, len(updates) - attackers)
        return {
            name: torch.stack([each[name] for each in updates]).sort(dim=0).values[kept].mean(0)
            for name in updates[0]
        }
