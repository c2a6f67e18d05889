"""All clients' samples in one tensor, one client after the other: what is one client's is a view.

The samples are in memory once, however many clients there are, and a client's `ClientData` is made
when it is asked for.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self, overload

import numpy
import torch
from torch import Tensor

from mpfedcl.data.by_client import ByClient
from mpfedcl.data.train_test_split import Indices

_NUMBERS_AT_ONCE = 2**22
"""Of inputs that are added up together in double precision."""


@dataclass(frozen=True)
class ClientData:
    """One client: its training images, and which images of the global test set set are its own."""

    name: str
    inputs: Tensor
    """[samples, numbers]: pixels standardized by the set's constants or in 0 to 1, or features."""
    labels: Tensor
    """[images], int64."""
    test: Tensor
    """[test images], int64: indices into the global test set set; may be empty."""


@dataclass(frozen=True, eq=False)
class ClientTable(Sequence[ClientData]):
    """The clients in order of name, each made when it is asked for."""

    names: tuple[str, ...]
    inputs: Tensor
    """[samples of all, numbers]: each client's, one client after the other."""
    labels: Tensor
    """[samples of all], int64."""
    sizes: Indices
    """[clients]: how many of the samples are each client's."""
    tests: Tensor
    """int64: indices into the global test set set, of which each client has a range."""
    test_begins: Indices
    test_sizes: Indices
    """[clients]: the range of `tests` that is each client's local test set; ranges may overlap."""

    @classmethod
    def join(cls, clients: Sequence[ClientData]) -> "ClientTable":
        """Put the data of several clients together."""
        if isinstance(clients, ClientTable):
            return clients
        ends = numpy.cumsum([len(each.test) for each in clients])
        sizes = numpy.array([len(each.test) for each in clients], dtype=numpy.int64)
        return cls(
            tuple(each.name for each in clients),
            _cat([each.inputs for each in clients]),
            _cat([each.labels for each in clients]),
            numpy.array([len(each.labels) for each in clients], dtype=numpy.int64),
            _cat([each.test for each in clients]),
            ends - sizes,
            sizes,
        )

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, place: int) -> ClientData: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[ClientData, ...]: ...
    def __getitem__(self, place: int | slice) -> ClientData | tuple[ClientData, ...]:
        """Return a client by its place, or several."""
        if isinstance(place, slice):
            return tuple(self[each] for each in range(*place.indices(len(self))))
        place = range(len(self))[place]
        begin, end = self._ends[place], self._ends[place + 1]
        return ClientData(
            self.names[place], self.inputs[begin:end], self.labels[begin:end], self._test(place)
        )

    def __iter__(self) -> Iterator[ClientData]:
        return (self[place] for place in range(len(self)))

    def find(self, name: str) -> ClientData:
        """Return a client by name."""
        return self[self._places[name]]

    def select(self, names: Collection[str]) -> Self:
        """Return some clients, in memory of their own: the samples of the others can go."""
        wanted = set(names)
        chosen = numpy.array([name in wanted for name in self.names], dtype=bool)
        if chosen.all():
            return self
        rows = torch.from_numpy(numpy.flatnonzero(numpy.repeat(chosen, self.sizes)))
        rows = rows.to(self.inputs.device)
        return replace(
            self,
            names=tuple(name for name in self.names if name in wanted),
            inputs=self.inputs[rows],
            labels=self.labels[rows],
            sizes=self.sizes[chosen],
            test_begins=self.test_begins[chosen],
            test_sizes=self.test_sizes[chosen],
        )

    def to(self, device: torch.device | str) -> Self:
        """Return the data on a device."""
        return replace(
            self,
            inputs=self.inputs.to(device),
            labels=self.labels.to(device),
            tests=self.tests.to(device),
        )

    def count_labels(self, num_classes: int) -> Indices:
        """Count the training samples [clients, classes]."""
        cells = self._owners * num_classes + self.labels.cpu().numpy()
        counts: Indices = numpy.bincount(cells, minlength=len(self) * num_classes)
        return counts.reshape(-1, num_classes)

    def input_means(self) -> list[float]:
        """Return the mean of each client's inputs; NaN where it has none."""
        width = max(1, self.inputs[:1].numel())
        pieces = torch.split(self.inputs.flatten(1), max(1, _NUMBERS_AT_ONCE // width))
        sums = torch.cat([piece.sum(dim=1, dtype=torch.float64) for piece in pieces])
        totals = numpy.bincount(self._owners, sums.cpu().numpy(), len(self))
        with numpy.errstate(invalid="ignore"):
            means: list[float] = (totals / (self.sizes * width)).tolist()
        return means

    def local_tests(self) -> ByClient[Tensor]:
        """Return each client's test, without holding on to the samples."""
        tests, begins, sizes = self.tests, self.test_begins, self.test_sizes
        return ByClient(self.names, lambda place: _cut(tests, begins, sizes, place))

    def sole_testers(self, num_tests: int) -> Indices:
        """Return of each test sample the place of the one client that has it; -1: not one."""
        size, ends = len(self.tests) + 1, self.test_begins + self.test_sizes
        rows = self.tests.cpu().numpy()

        def add_up(weights: Indices) -> Indices:
            # A client's weight comes in where its range begins, and goes out where it ends.
            comes = numpy.bincount(self.test_begins, weights, size)
            goes = numpy.bincount(ends, weights, size)
            return numpy.bincount(rows, numpy.cumsum(comes - goes)[:-1], num_tests).astype(int)

        places = numpy.arange(len(self))
        return numpy.where(add_up(numpy.ones_like(places)) == 1, add_up(places), -1)

    def _test(self, place: int) -> Tensor:
        return _cut(self.tests, self.test_begins, self.test_sizes, place)

    @property
    def _owners(self) -> Indices:
        return numpy.repeat(numpy.arange(len(self)), self.sizes)

    @cached_property
    def _ends(self) -> list[int]:
        ends: list[int] = numpy.concatenate([[0], numpy.cumsum(self.sizes)]).tolist()
        return ends

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.names)}


def _cut(tests: Tensor, begins: Indices, sizes: Indices, place: int) -> Tensor:
    begin = int(begins[place])
    return tests[begin : begin + int(sizes[place])]


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
