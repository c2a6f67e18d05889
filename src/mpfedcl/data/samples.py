"""Samples, images or arrays: their formats, indices, and splits into training and test samples.

Nothing here opens a sample: a `SampleIndex` lists a data set, and its store loads what is needed.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import numpy
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.images import Size, resize_images
from mpfedcl.experiment.data_folder import FLOAT_TYPES, TOKEN_TYPES, list_types

Indices = NDArray[numpy.int64]


def count_training(counts: Indices, test_fraction: float | None) -> Indices:
    """Return how many of `counts` images of a class train: at least one wherever there is one.

    Without a test fraction nothing is held out.
    """
    if test_fraction is None:
        return counts
    rounded: Indices = numpy.rint(counts * (1 - test_fraction)).astype(numpy.int64)
    training: Indices = numpy.minimum(counts, numpy.maximum(1, rounded))
    return training


def split_by_class(
    labels: Indices, test_fraction: float, generator: Generator
) -> tuple[Indices, Indices]:
    """Return the positions that train and those that test, each in ascending order."""
    sizes = numpy.array([len(labels)])
    trains = draw_training(labels, sizes, test_fraction, lambda _: generator)
    return numpy.flatnonzero(trains), numpy.flatnonzero(~trains)


def draw_training(
    labels: Indices, sizes: Indices, test_fraction: float, generator_of: Callable[[int], Generator]
) -> NDArray[numpy.bool_]:
    """Return whether each sample trains or is held out, client by client and class by class.

    Args:
        labels: Those of all clients, one client after the other.
        sizes: How many samples each client has.
        test_fraction: The share of each class that a client holds out.
        generator_of: Each client's own randomness, by its place; its classes use it in their order.
    """
    trains = numpy.ones(len(labels), dtype=bool)
    if not len(labels):
        return trains
    num_classes = int(labels.max()) + 1
    cells = numpy.repeat(numpy.arange(len(sizes)), sizes) * num_classes + labels
    order = numpy.argsort(cells, kind="stable")
    found, begins, counts = numpy.unique(cells[order], return_index=True, return_counts=True)
    # Only drawing goes client by client; a class with a single sample needs no draw.
    several = counts > 1
    ends = begins + counts
    drawn = zip(
        (found[several] // num_classes).tolist(),
        begins[several].tolist(),
        ends[several].tolist(),
        strict=True,
    )
    for place, group in groupby(drawn, key=itemgetter(0)):
        shuffle = generator_of(place).shuffle
        for _, begin, end in group:
            shuffle(order[begin:end])
    last = begins + count_training(counts, test_fraction)
    trains[order] = numpy.arange(len(order)) < numpy.repeat(last, counts)
    return trains


Samples = NDArray[Any]
"""Images as bytes [n, height, width] or [n, height, width, 3], or arrays [n, ...]: floats, or token
ids [n, length]."""


@dataclass(frozen=True)
class ImageFormat:
    """All images of one size and one color mode, as bytes."""

    height: int
    width: int
    is_color: bool
    noun: ClassVar[str] = "image"
    one: ClassVar[str] = "an image"
    dtype: ClassVar[str] = "uint8"

    def __str__(self) -> str:
        return "images"

    @property
    def size(self) -> Size:
        """Height and width."""
        return self.height, self.width

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one image as an array."""
        return (self.height, self.width, 3) if self.is_color else self.size

    @classmethod
    def from_shape(cls, shape: Any) -> Self | None:
        """Return the format of arrays of a shape; None if no image has such a shape."""
        if not _is_shape(shape):
            return None
        if len(shape) == 2 or (len(shape) == 3 and shape[2] == 3):
            return cls(shape[0], shape[1], len(shape) == 3)
        return None

    def accepts(self, found: "ArrayFormat | None") -> bool:
        """Return whether samples of a set can be converted; the format is None for images."""
        return found is None

    def convert(self, images: Samples) -> Samples:
        """Return gray [n, h, w] or RGB [n, h, w, 3] bytes in this format."""
        if images.ndim == 4 and images.shape[3] == 1:
            images = images[..., 0]
        if images.ndim == 4 and not self.is_color:
            images = numpy.stack([numpy.asarray(Image.fromarray(i).convert("L")) for i in images])
        return resize_images(images, self.size, self.is_color)


@dataclass(frozen=True)
class ArrayFormat:
    """Arrays of one shape that a model takes as they are: floats in one precision, or token ids."""

    shape: tuple[int, ...]
    """Of one sample: [numbers], [channels, length], [channels, height, width], ..."""
    dtype: str = "float32"
    """int64 for token ids [length]."""

    def __str__(self) -> str:
        unit = "token id" if self.holds_tokens else "number"
        size = " x ".join(f"{side:,}" for side in self.shape)
        return f"{self.noun}s of {size} {unit}{'' if size == '1' else 's'}"

    @property
    def holds_tokens(self) -> bool:
        """Whether the numbers are token ids."""
        return self.dtype == "int64"

    @property
    def noun(self) -> str:
        """The word for one sample."""
        if self.holds_tokens:
            return "sequence"
        return "vector" if len(self.shape) == 1 else "array"

    @property
    def one(self) -> str:
        """The noun with its article."""
        return f"{'an' if self.noun == 'array' else 'a'} {self.noun}"

    @classmethod
    def from_shape(cls, shape: Any, dtype: str) -> Self | None:
        """Return the format of arrays of a shape; None if it is no shape."""
        return cls(tuple(shape), dtype) if _is_shape(shape) and len(shape) else None

    def accepts(self, found: "ArrayFormat | None") -> bool:
        """Return whether samples of a set can be converted; the format is None for images."""
        if found is None or found.holds_tokens != self.holds_tokens:
            return False
        return found.shape == self.shape

    def convert(self, arrays: Samples) -> Samples:
        """Return arrays [n, ...] in this precision, as they are otherwise."""
        types = TOKEN_TYPES if self.holds_tokens else FLOAT_TYPES
        if arrays.dtype.name not in types or arrays.shape[1:] != self.shape:
            raise InvalidInput(
                f"{self.one} is an array {arrays.dtype} {list(arrays.shape[1:])}; it must be "
                f"{list_types(types)} {list(self.shape)}."
            )
        if found := find_not_finite(arrays):
            raise InvalidInput(f"{self.one} has {found}; {self.say_finite()}.")
        return arrays.astype(self.dtype)

    def say_finite(self) -> str:
        """Return what is allowed, for an error."""
        return f"{self.noun}s must be finite numbers of at most 3.4e38"


SampleFormat = ImageFormat | ArrayFormat
_SIZE_IF_SIZES_DIFFER = 28


def choose_format(
    formats: AbstractSet[SampleFormat], image_size: int | None, dtype: str = "float32"
) -> SampleFormat:
    """Return one format for samples of several; RGB if any image has color.

    Images get the size asked for, else the one that all have, else 28 x 28.
    """
    arrays = [each for each in formats if isinstance(each, ArrayFormat)]
    images = [each for each in formats if isinstance(each, ImageFormat)]
    if not arrays:
        sizes = {each.size for each in images}
        side = image_size or _SIZE_IF_SIZES_DIFFER
        size = sizes.pop() if image_size is None and len(sizes) == 1 else (side, side)
        return ImageFormat(*size, any(each.is_color for each in images))
    if image_size is not None:
        raise InvalidInput(
            f"dataset.image_size is {image_size}; it must be left out, because the samples are "
            f"{arrays[0]}."
        )
    return arrays[0] if arrays[0].holds_tokens else ArrayFormat(arrays[0].shape, dtype)


def find_not_finite(samples: Samples, first_row: int = 0) -> str | None:
    """Describe the first value that is not finite in float32; None if there is none.

    float32 decides in every precision: beyond its range no sum of squares is finite.
    """
    with numpy.errstate(over="ignore"):
        faults = numpy.argwhere(~numpy.isfinite(samples.astype(numpy.float32, copy=False)))
    if not len(faults):
        return None
    row, *within = faults[0].tolist()
    return f"{samples[row, *within]:g} at {[first_row + row, *within]}"


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list | tuple) and all(type(n) is int and n > 0 for n in shape)


def digest_rows(rows: Indices, *texts: str) -> str:
    """Return a digest of rows, in order, of a source that the texts identify."""
    told = hashlib.sha256(json.dumps(texts).encode())
    told.update(numpy.ascontiguousarray(rows, dtype="<i8").data)
    return told.hexdigest()


_MOST_TIMES_UNPACKED = 100


def reject_bomb(path: Path, unpacked: int, never_rejected: int) -> None:
    """Reject a file that would fill the memory; small ones may unpack to any multiple."""
    num_bytes = path.stat().st_size
    if unpacked > max(never_rejected, _MOST_TIMES_UNPACKED * num_bytes):
        raise InvalidInput(
            f"{path} has {num_bytes:,} bytes and would unpack to {unpacked:,}; above "
            f"{never_rejected:,} bytes a file must unpack to at most {_MOST_TIMES_UNPACKED} times "
            "its size."
        )


class SampleStore(Protocol):
    """Samples that are opened only when asked for, by their number."""

    def __len__(self) -> int: ...

    def sign(self, rows: Indices) -> str:
        """Return a digest that changes with any of the samples, and with their order."""

    def inspect(self) -> set[SampleFormat]:
        """Return the formats that the samples have."""

    def load(self, rows: Indices, wanted: SampleFormat) -> Samples:
        """Return samples in one format, which is one of images for images, of arrays for these."""


@dataclass(frozen=True)
class JoinedSampleStore:
    """Several stores, one after the other."""

    stores: Sequence[SampleStore]

    def __len__(self) -> int:
        return sum(len(store) for store in self.stores)

    def sign(self, rows: Indices) -> str:
        """Combine the digests of the stores and the order of the rows."""
        signed = [store.sign(within) for store, _, within in self._split_by_store(rows)]
        return digest_rows(rows, *signed)

    def inspect(self) -> set[SampleFormat]:
        """Join what the stores have."""
        return set().union(*(store.inspect() for store in self.stores))

    def load(self, rows: Indices, wanted: SampleFormat) -> Samples:
        """Load each store's samples into their places."""
        parts = self._split_by_store(rows)
        if len(parts) == 1:
            # As they are: a copy would take as much memory again.
            ((store, _, within),) = parts
            return store.load(within, wanted)
        samples = numpy.empty((len(rows), *wanted.shape), dtype=wanted.dtype)
        for store, positions, within in parts:
            samples[positions] = store.load(within, wanted)
        return samples

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
    """Some samples of a set: their numbers in its store, and their labels."""

    rows: Indices
    labels: Indices

    def select(self, chosen: Indices | NDArray[numpy.bool_] | slice) -> "Subset":
        """Return some of them, by position."""
        return Subset(self.rows[chosen], self.labels[chosen])

    def split(self, owners: Indices, count: int) -> list["Subset"]:
        """Return the samples of each of `count` owners, in their order."""
        order = numpy.argsort(owners, kind="stable")
        ends = numpy.cumsum(numpy.bincount(owners, minlength=count))[:-1]
        return [self.select(chosen) for chosen in numpy.split(order, ends)]

    @staticmethod
    def join(subsets: Sequence["Subset"]) -> "Subset":
        """Return all of several subsets."""
        return Subset(
            numpy.concatenate([subset.rows for subset in subsets]),
            numpy.concatenate([subset.labels for subset in subsets]),
        )


@dataclass(frozen=True)
class DomainIndex:
    """A domain's samples, unopened; the test subset is None if there is no official split."""

    name: str
    train: Subset
    test: Subset | None = None


@dataclass(frozen=True)
class SampleIndex:
    """A data set before any sample is opened: domains in order of name, labels, classes."""

    name: str
    class_names: tuple[str, ...]
    domains: tuple[DomainIndex, ...]
    store: SampleStore
    array_format: ArrayFormat | None = None
    """Of the samples, the same for all; None for images."""
    names_classes: bool = True
    """Whether the classes have names of their own; else they are the numbers from 0."""
    notices: tuple[str, ...] = ()
    """Sentences to show to the user."""

    @property
    def noun(self) -> str:
        """The word for one sample."""
        return (self.array_format or ImageFormat).noun

    def __str__(self) -> str:
        return str(self.array_format or "images")


def name_classes(domains: Sequence[DomainIndex]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return "0", "1", ... up to the largest label, padded so that they sort as numbers do.

    Also return a notice if the labels seem to be counted from 1.
    """
    subsets = (each for domain in domains for each in (domain.train, domain.test))
    present = numpy.unique(numpy.concatenate([s.labels for s in subsets if s is not None]))
    largest = int(present[-1])
    names = tuple(str(label).zfill(len(str(largest))) for label in range(largest + 1))
    if len(present) < 2 or not numpy.array_equal(present, numpy.arange(1, largest + 1)):
        return names, ()
    return names, (
        f"The labels are 1 to {largest:,} and never 0, so class {names[0]} is empty: labels count "
        "from 0. Subtract 1 from them, unless class 0 exists and only has no samples here.",
    )
