"""The mean by number of samples, as in FedAvg."""

import torch

from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment import Experiment
from mpfedcl.methods.messages import StackMember, Update, UpdateStack
from mpfedcl.rounds.aggregation.base import Aggregator, Peers


class WeightedMean(Aggregator):
    """mean = Σ w_i x_i / Σ w_i, folded one update at a time so that none must be kept.

    Clients of one stack that follow each other are summed by the stack itself.
    """

    def __init__(self, template: Tensors, experiment: Experiment) -> None:
        super().__init__(template, experiment)
        self._sums: Tensors = {}
        self._weight: float = 0
        self._stack: UpdateStack | None = None
        self._shares: dict[int, float] = {}

    def add(self, update: Update, weight: float) -> None:
        """Fold in an update."""
        if not weight:
            return
        self._weight += weight
        if not isinstance(update.averaged, StackMember):
            assert update.averaged is not None
            self._sum_stack()
            self._fold(update.averaged, weight)
            return
        stack, index = update.averaged.stack, update.averaged.index
        if self._stack is not stack:
            self._sum_stack()
        self._stack = stack
        self._shares[index] = self._shares.get(index, 0.0) + weight

    def merge(self, peers: Peers) -> None:
        """Add the sums of all processes up."""
        self._sum_stack()
        padded = {n: self._sums.get(n, torch.zeros_like(v)) for n, v in self.template.items()}
        weights = [float(part) for part in peers.gather(str(self._weight).encode())]
        self._sums, self._weight = peers.sum(padded), sum(weights)

    def result(self) -> Tensors:
        """Return the weighted means of all that was folded in."""
        self._sum_stack()
        if not self._weight:
            return {}
        return {name: value / self._weight for name, value in self._sums.items()}

    def _sum_stack(self) -> None:
        """Sum what is still waiting for others of its stack."""
        if self._stack is not None:
            weights = torch.zeros(len(self._stack), dtype=torch.float64)
            for index, weight in self._shares.items():
                weights[index] = weight
            self._fold(self._stack.weighted_sum(weights), 1)
        self._stack, self._shares = None, {}

    def _fold(self, values: Tensors, weight: float) -> None:
        for name, value in values.items():
            if name in self._sums:
                self._sums[name].add_(value.detach(), alpha=weight)
            else:
                self._sums[name] = value.detach() * weight
