"""How the clients' updates become one."""

from mpfedcl.exchange import Update
from mpfedcl.models import Tensors


class WeightedMean:
    """mean = sum_i n_i x_i / sum_i n_i, folded one update at a time so that none must be kept.

    Fold in client-name order: then the order of arrival never changes a bit.
    """

    def __init__(self) -> None:
        self._sums: Tensors = {}
        self._weight = 0

    def add(self, update: Update) -> None:
        """Fold in an update."""
        for name, value in update.sums.items():
            if name in self._sums:
                self._sums[name].add_(value.detach(), alpha=update.num_samples)
            else:
                self._sums[name] = value.detach() * update.num_samples
        self._weight += update.num_samples

    def means(self) -> Tensors:
        """Return the weighted means of all that was folded in."""
        return {name: value / self._weight for name, value in self._sums.items()}
