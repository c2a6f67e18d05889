"""Samples, be they images or vectors: what is there, known before a sample is opened."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy
from numpy.typing import NDArray

from mpfedcl.core.images import Images
from mpfedcl.data.sample_format import (
    ImageFormat,
    SampleFormat,
    Samples,
    VectorFormat,
    describe_samples,
)
from mpfedcl.data.train_test_split import Indices


def digest_rows(rows: Indices, *texts: str) -> str:
    """Return a digest of some rows, in order, of what the texts tell."""
    told = hashlib.sha256(json.dumps(texts).encode())
    told.update(numpy.ascontiguousarray(rows, dtype="<i8").data)
    return told.hexdigest()


class SampleStore(Protocol):
    """Samples that are opened only when asked for, by their number."""

    def __len__(self) -> int: ...

    def identify(self, rows: Indices) -> list[str]:
        """Return what tells each sample apart from others, and from itself before a change."""

    def sign(self, rows: Indices) -> str:
        """Return one short text for all that `identify` tells, and for the order of the rows."""

    def inspect(self) -> set[SampleFormat]:
        """Return the formats that the samples have."""

    def load(self, rows: Indices, wanted: SampleFormat) -> Samples:
        """Return samples in one format, which is one of images for images, of vectors for these."""


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

    def sign(self, rows: Indices) -> str:
        """Ask each store for its own; the rows' order says which sample is whose."""
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
    vector_width: int | None = None
    """Numbers of a sample, the same for all; None where samples are images."""
    names_classes: bool = True
    """Whether the classes have names of their own; else they are the numbers from 0."""
    notices: tuple[str, ...] = ()
    """What whoever uses the samples should know of them, a sentence each."""

    @property
    def noun(self) -> str:
        """What one sample is."""
        return ImageFormat.noun if self.vector_width is None else VectorFormat.noun

    def __str__(self) -> str:
        return describe_samples(self.vector_width)


@dataclass(frozen=True)
class DomainImages:
    """The images of one domain; the test part is None where the set has no official split."""

    name: str
    train_images: Images
    train_labels: Indices
    test_images: Images | None = None
    test_labels: Indices | None = None
    train_clients: NDArray[numpy.str_] | None = None
    """Whose each training image is, where the domain holds several clients'; else None."""
    test_clients: NDArray[numpy.str_] | None = None


@dataclass(frozen=True)
class ImageSet:
    """A data set in memory: domains in order of name, all images of one size and color mode."""

    name: str
    domains: tuple[DomainImages, ...]
    class_names: tuple[str, ...]
