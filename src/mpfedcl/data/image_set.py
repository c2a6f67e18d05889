"""Image sets: what is there, known before an image is opened, and images in memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy
from numpy.typing import NDArray

from mpfedcl.data.split import Indices
from mpfedcl.images import Images, Size


class ImageStore(Protocol):
    """Images that are opened only when asked for, by their number."""

    def __len__(self) -> int: ...

    def identify(self, rows: Indices) -> list[str]:
        """Return what tells each image apart from others, and from itself before a change."""
        ...

    def look(self) -> tuple[set[Size], bool]:
        """Return the sizes of all images, and whether any has colour."""
        ...

    def load(self, rows: Indices, size: Size, is_colour: bool) -> Images:
        """Return images in one size and colour mode."""
        ...


@dataclass(frozen=True)
class JoinedStore:
    """Several stores, one after the other."""

    stores: Sequence[ImageStore]

    def __len__(self) -> int:
        return sum(len(store) for store in self.stores)

    def identify(self, rows: Indices) -> list[str]:
        """Ask each store for its own."""
        names = numpy.empty(len(rows), dtype=object)
        for store, positions, within in self._deal(rows):
            names[positions] = store.identify(within)
        return [str(name) for name in names]

    def look(self) -> tuple[set[Size], bool]:
        """Join what the stores see."""
        seen = [store.look() for store in self.stores]
        return set().union(*(sizes for sizes, _ in seen)), any(colour for _, colour in seen)

    def load(self, rows: Indices, size: Size, is_colour: bool) -> Images:
        """Load each store's images into their places."""
        shape = (len(rows), *size, *((3,) if is_colour else ()))
        images = numpy.empty(shape, dtype=numpy.uint8)
        for store, positions, within in self._deal(rows):
            images[positions] = store.load(within, size, is_colour)
        return images

    def _deal(self, rows: Indices) -> list[tuple[ImageStore, Indices, Indices]]:
        """Return for each store that is needed the positions in `rows`, and its own numbers."""
        dealt, begin = [], 0
        for store in self.stores:
            end = begin + len(store)
            positions = numpy.flatnonzero((rows >= begin) & (rows < end))
            if len(positions):
                dealt.append((store, positions, rows[positions] - begin))
            begin = end
        return dealt


@dataclass(frozen=True)
class Part:
    """Some images of a set: their numbers in its store, and their labels."""

    rows: Indices
    labels: Indices

    def take(self, chosen: Indices | NDArray[numpy.bool_]) -> "Part":
        """Return some of them, by position."""
        return Part(self.rows[chosen], self.labels[chosen])

    @staticmethod
    def join(parts: Sequence["Part"]) -> "Part":
        """Return all of several parts."""
        return Part(
            numpy.concatenate([part.rows for part in parts]),
            numpy.concatenate([part.labels for part in parts]),
        )


@dataclass(frozen=True)
class ListedDomain:
    """A domain's parts; the test part is None where the set has no official split."""

    name: str
    train: Part
    test: Part | None = None


@dataclass(frozen=True)
class Listing:
    """A data set before any image is opened: domains in order of name, labels, classes."""

    name: str
    class_names: tuple[str, ...]
    domains: tuple[ListedDomain, ...]
    store: ImageStore


@dataclass(frozen=True)
class Domain:
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
    domains: tuple[Domain, ...]
    class_names: tuple[str, ...]
