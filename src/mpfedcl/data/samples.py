"""Image sets: what is there, known before an image is opened, and images in memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy
from numpy.typing import NDArray

from mpfedcl.data.train_test_split import Indices
from mpfedcl.images import Images, Size


class SampleStore(Protocol):
    """Images that are opened only when asked for, by their number."""

    def __len__(self) -> int: ...

    def identify(self, rows: Indices) -> list[str]:
        """Return what tells each image apart from others, and from itself before a change."""

    def inspect_images(self) -> tuple[set[Size], bool]:
        """Return the sizes of all images, and whether any has colour."""

    def load(self, rows: Indices, size: Size, is_colour: bool) -> Images:
        """Return images in one size and colour mode."""


@dataclass(frozen=True)
class JoinedSampleStore:
    """Several stores, one after the other."""

    stores: Sequence[SampleStore]

    def __len__(self) -> int:
        return sum(len(store) for store in self.stores)

    def identify(self, rows: Indices) -> list[str]:
        """Ask each store for its own."""
        names = numpy.empty(len(rows), dtype=object)
        for store, positions, within in self._split_by_store(rows):
            names[positions] = store.identify(within)
        return [str(name) for name in names]

    def inspect_images(self) -> tuple[set[Size], bool]:
        """Join what the stores see."""
        seen = [store.inspect_images() for store in self.stores]
        return set().union(*(sizes for sizes, _ in seen)), any(colour for _, colour in seen)

    def load(self, rows: Indices, size: Size, is_colour: bool) -> Images:
        """Load each store's images into their places."""
        shape = (len(rows), *size, *((3,) if is_colour else ()))
        images = numpy.empty(shape, dtype=numpy.uint8)
        for store, positions, within in self._split_by_store(rows):
            images[positions] = store.load(within, size, is_colour)
        return images

    def _split_by_store(self, rows: Indices) -> list[tuple[SampleStore, Indices, Indices]]:
        """Return for each store that is needed the positions in `rows`, and its own numbers."""
        found, begin = [], 0
        for store in self.stores:
            end = begin + len(store)
            positions = numpy.flatnonzero((rows >= begin) & (rows < end))
            if len(positions):
                found.append((store, positions, rows[positions] - begin))
            begin = end
        return found


@dataclass(frozen=True)
class Subset:
    """Some images of a set: their numbers in its store, and their labels."""

    rows: Indices
    labels: Indices

    def select(self, chosen: Indices | NDArray[numpy.bool_]) -> "Subset":
        """Return some of them, by position."""
        return Subset(self.rows[chosen], self.labels[chosen])

    @staticmethod
    def join(subsets: Sequence["Subset"]) -> "Subset":
        """Return all of several subsets."""
        return Subset(
            numpy.concatenate([subset.rows for subset in subsets]),
            numpy.concatenate([subset.labels for subset in subsets]),
        )


@dataclass(frozen=True)
class DomainIndex:
    """A domain's images, unopened; the test subset is None where the set has no official split."""

    name: str
    train: Subset
    test: Subset | None = None


@dataclass(frozen=True)
class SampleIndex:
    """A data set before any image is opened: domains in order of name, labels, classes."""

    name: str
    class_names: tuple[str, ...]
    domains: tuple[DomainIndex, ...]
    store: SampleStore


@dataclass(frozen=True)
class DomainImages:
    """The images of one domain; the test part is None where the set has no official split."""

    name: str
    train_images: Images
    train_labels: Indices
    test_images: Images | None = None
    test_labels: Indices | None = None


@dataclass(frozen=True)
class ImageSet:
    """A data set in memory: domains in order of name, all images of one size and colour mode."""

    name: str
    domains: tuple[DomainImages, ...]
    class_names: tuple[str, ...]
