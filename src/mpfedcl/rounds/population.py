"""All clients of a federation, of whom a round asks some: what is known of them in advance."""

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from statistics import median_low
from typing import overload

import numpy


class Population:
    """The clients' names and sizes, so that a round costs what its participants cost.

    Args:
        sizes: Training samples by client name.
        is_fixed: Nobody comes or leaves, so that all clients are walked over once and never again.
    """

    def __init__(self, sizes: Mapping[str, int], *, is_fixed: bool) -> None:
        self._sizes = sizes
        self._is_fixed = is_fixed
        self.refresh()

    def refresh(self) -> None:
        """Look again who there is, where clients come and leave."""
        self._names = sorted(self._sizes)
        self._num_samples = sum(self._sizes.values())
        self._median_size: int | None = None

    def begin_round(self) -> None:
        """Take in who has come since the round before."""
        if not self._is_fixed:
            self.refresh()

    @property
    def num_samples(self) -> int:
        """Training samples of all clients together."""
        return self._num_samples

    @property
    def median_size(self) -> int:
        """The lower median of the clients' training samples."""
        if self._median_size is None:
            self._median_size = median_low(self._sizes.values())
        return self._median_size

    def without(self, absent: Collection[str]) -> Sequence[str]:
        """Return those who are not absent, in name order."""
        return [name for name in self._names if name not in absent] if absent else self._names


class Others(Sequence[str]):
    """Names but for a few of them, without a copy of all.

    Args:
        names: In order.
        left_out: Some of these.
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
    """Draw so many of the names without replacement; return them in order.

    These are the names that `draw.choice(names, count, replace=False)` returns, but for its copy of
    all of them.
    """
    places = draw.choice(len(names), count, replace=False)
    return sorted(names[place] for place in places.tolist())
