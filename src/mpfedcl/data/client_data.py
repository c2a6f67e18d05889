"""The data of all clients in a few arrays: one client's samples are a view, made on demand.

A hundred thousand clients are a hundred thousand names and a few arrays, not as many objects.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self, TypeVar, overload

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpfedcl.data.samples import Indices, Subset

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


def _list_owners(sizes: Indices) -> Indices:
    """Return the place of each sample's client, given samples one client after the other."""
    return numpy.repeat(numpy.arange(len(sizes)), sizes)


def _count_labels(labels: Indices, sizes: Indices, num_classes: int) -> Indices:
    cells = _list_owners(sizes) * num_classes + labels
    counts: Indices = numpy.bincount(cells, minlength=len(sizes) * num_classes)
    return counts.reshape(-1, num_classes)


class SubsetsByClient(ByClient[Subset]):
    """The samples of each client, those of all one after the other.

    Args:
        names: The clients'.
        everything: The samples of all.
        sizes: How many of them each client has.
    """

    def __init__(self, names: Sequence[str], everything: Subset, sizes: Indices) -> None:
        ends = numpy.cumsum(sizes)
        begins = ends - sizes
        super().__init__(names, lambda n: everything.select(slice(begins[n], ends[n])))
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
        """Return the chosen samples; each client keeps its own."""
        kept = numpy.bincount(_list_owners(self.sizes)[chosen], minlength=len(self.names))
        return SubsetsByClient(self.names, self.everything.select(chosen), kept)

    def count_labels(self, num_classes: int) -> Indices:
        """Count the samples [clients, classes]."""
        return _count_labels(self.everything.labels, self.sizes, num_classes)


_NUMBERS_AT_ONCE = 2**22
"""Input values summed together in double precision."""


@dataclass(frozen=True)
class ClientData:
    """One client: its training samples, and its part of the global test set."""

    name: str
    inputs: Tensor
    """[samples, numbers]: pixels standardized by the set's constants or in 0 to 1, or features."""
    labels: Tensor
    """[images], int64."""
    test: Tensor
    """[test images], int64: indices into the global test set; may be empty."""


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
    """int64: indices into the global test set, of which each client has a range."""
    test_begins: Indices
    test_sizes: Indices
    """[clients]: the range of `tests` that is each client's local test set; ranges may overlap."""

    @classmethod
    def join(cls, clients: Sequence[ClientData]) -> "ClientTable":
        """Put the data of several clients together."""
        if isinstance(clients, ClientTable):
            return clients
        sizes = numpy.array([len(each.test) for each in clients], dtype=numpy.int64)
        return cls(
            tuple(each.name for each in clients),
            _cat([each.inputs for each in clients]),
            _cat([each.labels for each in clients]),
            numpy.array([len(each.labels) for each in clients], dtype=numpy.int64),
            _cat([each.test for each in clients]),
            numpy.cumsum(sizes) - sizes,
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
        own = slice(self._ends[place] - int(self.sizes[place]), self._ends[place])
        test = _cut(self.tests, self.test_begins, self.test_sizes, place)
        return ClientData(self.names[place], self.inputs[own], self.labels[own], test)

    def find(self, name: str) -> ClientData:
        """Return a client by name."""
        return self[self._places[name]]

    def select(self, names: Collection[str]) -> Self:
        """Return some clients as a copy, so that the samples of the others can be freed."""
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
        return _count_labels(self.labels.cpu().numpy(), self.sizes, num_classes)

    def input_means(self) -> list[float]:
        """Return the mean of each client's inputs; NaN for clients without samples."""
        width = max(1, self.inputs[:1].numel())
        pieces = torch.split(self.inputs.flatten(1), max(1, _NUMBERS_AT_ONCE // width))
        sums = torch.cat([piece.sum(dim=1, dtype=torch.float64) for piece in pieces])
        totals = numpy.bincount(_list_owners(self.sizes), sums.cpu().numpy(), len(self))
        with numpy.errstate(invalid="ignore"):
            means: list[float] = (totals / (self.sizes * width)).tolist()
        return means

    def local_tests(self) -> ByClient[Tensor]:
        """Return each client's test indices without a reference to the samples."""
        tests, begins, sizes = self.tests, self.test_begins, self.test_sizes
        return ByClient(self.names, lambda place: _cut(tests, begins, sizes, place))

    @cached_property
    def _ends(self) -> list[int]:
        ends: list[int] = numpy.cumsum(self.sizes).tolist()
        return ends

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.names)}


def _cut(tests: Tensor, begins: Indices, sizes: Indices, place: int) -> Tensor:
    begin = int(begins[place])
    return tests[begin : begin + int(sizes[place])]


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


@dataclass(frozen=True)
class FederatedData:
    """All clients in order of name, and the global test set."""

    dataset: str
    class_names: tuple[str, ...]
    clients: Sequence[ClientData]
    """Converted to a `ClientTable`."""
    test_inputs: Tensor
    test_labels: Tensor
    partition: dict[str, Any]
    """The samples of each client in plain values, from `ClientSplit.describe`."""
    holds_arrays: bool = False
    """Whether samples are arrays, and no images."""
    notices: tuple[str, ...] = ()
    """Sentences to show to the user."""
    public: tuple[Tensor, Tensor] | None = None
    """Inputs and labels of training samples held by the server instead of a client."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "clients", ClientTable.join(self.clients))

    @property
    def table(self) -> ClientTable:
        """The clients' samples in a few arrays."""
        assert isinstance(self.clients, ClientTable)
        return self.clients

    @property
    def num_classes(self) -> int:
        """Number of classes of the set, whether or not a client holds them."""
        return len(self.class_names)

    @property
    def input_size(self) -> int:
        """The number of input values of a sample."""
        # By shape, because a client may have no test samples.
        return math.prod(self.test_inputs.shape[1:])

    @property
    def names(self) -> tuple[str, ...]:
        """The clients' names in order."""
        return self.table.names

    @property
    def sizes(self) -> dict[str, int]:
        """The number of training samples of each client, in order of name."""
        return dict(zip(self.names, self.table.sizes.tolist(), strict=True))

    def client(self, name: str) -> ClientData:
        """Return a client by name."""
        return self.table.find(name)

    def with_clients(self, names: Collection[str]) -> Self:
        """Return the data of some clients, with the test images of all."""
        table = self.table.select(names)
        if table is self.table:
            return self
        # A copy: a view would hold on to the samples of all clients.
        return replace(self, clients=table, test_inputs=self.test_inputs.clone())

    def with_one_client(self, name: str, new_name: str | None = None) -> Self:
        """Return one client's data with only its local test set, under a new name if given."""
        client = self.client(name)
        own = replace(
            client, name=new_name or name, test=torch.arange(len(client.test)).to(client.test)
        )
        return replace(
            self,
            clients=(own,),
            test_inputs=self.test_inputs[client.test],
            test_labels=self.test_labels[client.test],
        )

    def label_counts(self) -> Indices:
        """Count the training images [clients, classes]."""
        return self.table.count_labels(self.num_classes)

    def label_counts_by_client(self) -> ByClient[list[int]]:
        """Return the same by name."""
        counts = self.label_counts()
        return ByClient(self.names, lambda place: counts[place].tolist())

    def to(self, device: torch.device | str) -> Self:
        """Return the data on a device."""
        public = self.public
        return replace(
            self,
            clients=self.table.to(device),
            test_inputs=self.test_inputs.to(device),
            test_labels=self.test_labels.to(device),
            public=public and (public[0].to(device), public[1].to(device)),
        )
