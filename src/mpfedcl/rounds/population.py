"""The population of clients, from which rounds sample."""

from collections.abc import Collection, Mapping, Sequence
from statistics import median_low

import numpy


class Population:
    """The names and sizes of the clients; a round does not iterate over all of them.

    Args:
        sizes: Training samples by client name.
        is_fixed: Whether clients never join or leave, so that they are counted once.
    """

    def __init__(self, sizes: Mapping[str, int], *, is_fixed: bool) -> None:
        self._sizes = sizes
        self._is_fixed = is_fixed
        self._count()

    def begin_round(self) -> None:
        """Take in clients that joined since the round before."""
        if not self._is_fixed:
            self._count()

    def _count(self) -> None:
        self._names = sorted(self._sizes)
        self.num_samples = sum(self._sizes.values())
        """Training samples of all clients."""
        self.median_size = median_low(self._sizes.values()) if self._sizes else None
        """The lower median of the clients' training samples; None without clients."""

    def without(self, absent: Collection[str]) -> Sequence[str]:
        """Return the clients that are not absent, in name order."""
        return [name for name in self._names if name not in absent] if absent else self._names


def sample_names(names: Sequence[str], count: int, draw: numpy.random.Generator) -> list[str]:
    """Sample `count` names without replacement; return them in order.

    The same names as `draw.choice(names, count, replace=False)`, without its copy of all names.
    """
    places = draw.choice(len(names), count, replace=False)
    return sorted(names[place] for place in places.tolist())
