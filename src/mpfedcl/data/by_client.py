"""What belongs to each client, kept in a few arrays: a client's own is cut out when asked for.

A hundred thousand clients are then a hundred thousand names and a few arrays, not as many objects.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TypeVar

import numpy
from numpy.typing import NDArray

from mpfedcl.data.samples import Subset
from mpfedcl.data.train_test_split import Indices

Value = TypeVar("Value")


class ByClient(Mapping[str, Value]):
    """A value for each client, found by the client's place among the names."""

    def __init__(self, names: Sequence[str], find: Callable[[int], Value]) -> None:
        self.names = tuple(names)
        self._find = find

    def __getitem__(self, name: str) -> Value:
        return self._find(self._places[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.names)}


class SubsetsByClient(ByClient[Subset]):
    """The samples of each client, those of all one after the other.

    Args:
        names: The clients'.
        everything: The samples of all.
        sizes: How many of them each client has.
    """

    def __init__(self, names: Sequence[str], everything: Subset, sizes: Indices) -> None:
        super().__init__(names, self._cut_out)
        self.everything = everything
        self.sizes = sizes

    @classmethod
    def join(cls, subsets: Mapping[str, Subset]) -> "SubsetsByClient":
        """Put the samples of several clients one after the other, in order of name."""
        names = sorted(subsets)
        ordered = [subsets[name] for name in names]
        sizes = numpy.array([len(subset.labels) for subset in ordered], dtype=numpy.int64)
        return cls(names, Subset.join(ordered), sizes)

    def keep(self, chosen: NDArray[numpy.bool_]) -> "SubsetsByClient":
        """Return some of the samples [of all]; each client keeps those of its own."""
        kept = numpy.bincount(self.owners[chosen], minlength=len(self.names))
        return SubsetsByClient(self.names, self.everything.select(chosen), kept)

    @property
    def owners(self) -> Indices:
        """The place of each sample's client among the names."""
        return numpy.repeat(numpy.arange(len(self.names)), self.sizes)

    def count_labels(self, num_classes: int) -> Indices:
        """Count the samples [clients, classes]."""
        cells = self.owners * num_classes + self.everything.labels
        counts: Indices = numpy.bincount(cells, minlength=len(self.names) * num_classes)
        return counts.reshape(-1, num_classes)

    def _cut_out(self, place: int) -> Subset:
        return self.everything.select(slice(self._ends[place], self._ends[place + 1]))

    @cached_property
    def _ends(self) -> list[int]:
        ends: list[int] = numpy.concatenate([[0], numpy.cumsum(self.sizes)]).tolist()
        return ends


class RangesByClient(ByClient[Indices]):
    """Consecutive numbers for each client."""

    def __init__(self, names: Sequence[str], begins: Indices, sizes: Indices) -> None:
        super().__init__(names, self._count_up)
        self.begins = begins
        self.sizes = sizes

    @classmethod
    def same_for_all(cls, names: Sequence[str], size: int) -> "RangesByClient":
        """Give everybody the numbers from 0 on."""
        return cls(names, *(numpy.full(len(names), each) for each in (0, size)))

    def _count_up(self, place: int) -> Indices:
        begin = int(self.begins[place])
        return numpy.arange(begin, begin + int(self.sizes[place]))
