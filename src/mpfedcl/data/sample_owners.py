"""Whose each sample of an archive is, where it holds those of several clients.

Arrays of text beside the samples say so: `clients_train` and, where there is a test set,
`clients_test`, a name for each sample. Each client is then a domain of the set.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.samples import Subset
from mpfedcl.data.train_test_split import Indices

OWNER_KEYS = ("clients_train", "clients_test")


@dataclass(frozen=True)
class SampleOwners:
    """The clients of an archive in order of name, and the number of each sample's."""

    names: tuple[str, ...]
    train: Indices
    test: Indices | None

    def split(self, subsets: Sequence[Subset]) -> list[tuple[str, list[Subset]]]:
        """Return each client's part of the training subset and, if there is one, of the test."""
        parts = [
            split_by_owner(subset, owners, len(self.names))
            for subset, owners in zip(subsets, (self.train, self.test), strict=False)
            if owners is not None
        ]
        return [(name, list(each)) for name, *each in zip(self.names, *parts, strict=True)]


def read_owners(
    found: Mapping[str, NDArray[Any]], sizes: Mapping[str, int], shown: str
) -> SampleOwners | None:
    """Return whose samples are whose; None where an archive does not say.

    Args:
        found: The arrays of `OWNER_KEYS` that the archive has.
        sizes: The samples of each part that it has, `train` and perhaps `test`.
        shown: How errors name the file.
    """
    wanted = {f"clients_{part}": size for part, size in sizes.items()}
    if not found:
        return None
    for key, size in wanted.items():
        array = found.get(key)
        if array is None or array.dtype.kind != "U" or array.shape != (size,):
            told = "is missing" if array is None else f"has {array.dtype} {list(array.shape)}"
            raise InvalidInput(
                f"{shown}: {key} {told}; it must be a list of {size:,} names as text, one for each "
                f"sample of x_{key.removeprefix('clients_')}."
            )
    names, train = numpy.unique(found["clients_train"], return_inverse=True)
    test = None
    if "clients_test" in wanted:
        test = numpy.minimum(numpy.searchsorted(names, found["clients_test"]), len(names) - 1)
        strange = found["clients_test"][names[test] != found["clients_test"]]
        if len(strange):
            raise InvalidInput(
                f"{shown}: clients_test has {str(strange[0])!r}, who has nothing in x_train; each "
                "client must have a sample to train on."
            )
    return SampleOwners(tuple(str(name) for name in names), train.reshape(-1), test)


def split_by_owner(subset: Subset, owners: Indices, count: int) -> list[Subset]:
    """Return the samples of each of so many owners, in the order that they have."""
    order = numpy.argsort(owners, kind="stable")
    ends = numpy.cumsum(numpy.bincount(owners, minlength=count))[:-1]
    return [subset.select(chosen) for chosen in numpy.split(order, ends)]
