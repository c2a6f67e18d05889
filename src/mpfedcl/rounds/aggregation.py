"""How the clients' updates become one."""

import torch

from mpfedcl.messages import StackMember, Update, UpdateStack
from mpfedcl.tensors import Tensors


class WeightedMean:
    """mean = sum_i n_i x_i / sum_i n_i, folded one update at a time so that none must be kept.

    Fold in client-name order: then the order of arrival never changes a bit. Clients of one stack
    that follow each other are summed by the stack itself.
    """

    def __init__(self) -> None:
        self.sums: Tensors = {}
        self.weight = 0
        self._stack: UpdateStack | None = None
        self._shares: dict[int, int] = {}

    def add(self, update: Update) -> None:
        """Fold in an update."""
        if isinstance(update.averaged, StackMember):
            if self._stack is not update.averaged.stack:
                self.sum_stack()
            self._stack = update.averaged.stack
            self._shares[update.averaged.index] = update.num_samples
        else:
            self.sum_stack()
            self._fold(update.averaged, update.num_samples)
        self.weight += update.num_samples

    def sum_stack(self) -> None:
        """Sum what is still waiting for others of its stack."""
        if self._stack is not None:
            weights = torch.zeros(len(self._stack), dtype=torch.float64)
            for index, num_samples in self._shares.items():
                weights[index] = num_samples
            self._fold(self._stack.weighted_sum(weights), 1)
        self._stack, self._shares = None, {}

    def means(self) -> Tensors:
        """Return the weighted means of all that was folded in."""
        self.sum_stack()
        return {name: value / self.weight for name, value in self.sums.items()}

    def padded(self, template: Tensors) -> Tensors:
        """Return the sums so far; zeros for what nobody has sent."""
        self.sum_stack()
        return {n: self.sums.get(n, torch.zeros_like(value)) for n, value in template.items()}

    def replace(self, sums: Tensors, weight: int) -> None:
        """Take sums that were added up elsewhere for one's own."""
        self.sums, self.weight = sums, weight

    def _fold(self, values: Tensors, weight: int) -> None:
        for name, value in values.items():
            if name in self.sums:
                self.sums[name].add_(value.detach(), alpha=weight)
            else:
                self.sums[name] = value.detach() * weight
