"""The population of clients, from which rounds sample."""

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from statistics import median_low
from typing import overload

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
        self.refresh()

    def refresh(self) -> None:
        """Count the clients again."""
        self._names = sorted(self._sizes)
        self._num_samples = sum(self._sizes.values())
        self._median_size: int | None = None

    def begin_round(self) -> None:
        """Take in clients that joined since the round before."""
        if not self._is_fixed:
            self.refresh()

    @property
    def num_samples(self) -> int:
        """Training samples of all clients."""
        return self._num_samples

    @property
    def median_size(self) -> int:
        """The lower median of the clients' training samples."""
        if self._median_size is None:
            self._median_size = median_low(self._sizes.values())
        return self._median_size

    def without(self, absent: Collection[str]) -> Sequence[str]:
        """Return the clients that are not absent, in name order."""
        return [name for name in self._names if name not in absent] if absent else self._names


class Others(Sequence[str]):
    """Names without a few of them, without copying the rest.

    Args:
        names: Sorted names.
        left_out: The names to leave out.
    """

    def __init__(self, names: Sequence[str], left_out: Collection[str]) -> None:
        self._names = names
        self._gaps = sorted(bisect_left(names, name) for name in left_out)

    def __len__(self) -> int:
        return len(self._names) - len(self._gaps)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[str]: ...
    def __getitem__(self, place: int | slice) -> str | Sequence[str]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        if not 0 <= place < len(self):
            raise IndexError(place)
        for gap in self._gaps:
            if gap > place:
                break
            place += 1
        return self._names[place]


def sample_names(names: Sequence[str], count: int, draw: numpy.random.Generator) -> list[str]:
    """Sample `count` names without replacement; return them in order.

    The same names as `draw.choice(names, count, replace=False)`, without its copy of all names.
    """
    places = draw.choice(len(names), count, replace=False)
    return sorted(names[place] for place in places.tolist())
