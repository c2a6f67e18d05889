"""Domains stored as numpy archives: x_train, y_train and, if there is a split, x_test, y_test.

An array `classes` of text may name the classes. Arrays of text `clients_train` and, with a test
set, `clients_test` name the client of each sample; each client is then a domain of the set.
"""

import math
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import numpy
from numpy.lib import format as numpy_format
from numpy.typing import NDArray

from mpfedcl.core.errors import InvalidInput, explain_faults
from mpfedcl.core.images import resize_images
from mpfedcl.data.samples import (
    ImageFormat,
    Indices,
    SampleFormat,
    Samples,
    Subset,
    VectorFormat,
    describe_samples,
    digest_rows,
    find_not_finite,
    reject_bomb,
)
from mpfedcl.experiment.data_folder import VECTOR_TYPES, is_array_of_vectors, read_array_header

MOST_CLASSES = 65_536
"""A larger label is a mistake in the file; a model with more outputs would not fit into memory."""

_SAMPLES_AT_ONCE = 4096
_BYTES_AT_ONCE = 2**26
_BYTES_NEVER_REJECTED = 2**26
"""Fits into any memory; blank or very regular samples compress better than 100:1."""
_PACKINGS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_NEEDED = ("x_train", "y_train")
_OPTIONAL = ("x_test", "y_test")

OWNER_KEYS = ("clients_train", "clients_test")

_PLAIN_ARCHIVE = "an npz archive of plain arrays"

Opener = Callable[[], IO[bytes]]


@dataclass(frozen=True)
class SampleOwners:
    """The clients of an archive in order of name, and the index of each sample's client."""

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
    """Return the owners of the samples; None if the archive does not name them.

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
                f"{shown}: clients_test has {str(strange[0])!r}, which has no sample in x_train; "
                "each client must have a sample to train on."
            )
    return SampleOwners(tuple(str(name) for name in names), train.reshape(-1), test)


def split_by_owner(subset: Subset, owners: Indices, count: int) -> list[Subset]:
    """Return the samples of each of `count` owners, in their order."""
    order = numpy.argsort(owners, kind="stable")
    ends = numpy.cumsum(numpy.bincount(owners, minlength=count))[:-1]
    return [subset.select(chosen) for chosen in numpy.split(order, ends)]


@dataclass(frozen=True)
class ArchiveStore:
    """The samples of one array of an archive; only its header is read until they are asked for."""

    open: Opener
    key: str
    shape: tuple[int, ...]
    shown: str
    """The name of the file in errors."""
    identity: str
    """Identifies the file and its version."""
    vector_width: int | None = None
    """Values per vector; None for images."""

    def __len__(self) -> int:
        return self.shape[0]

    def __str__(self) -> str:
        return describe_samples(self.vector_width)

    def sign(self, rows: Indices) -> str:
        """Sign the file, the array and the places in it."""
        return digest_rows(rows, self.identity, self.key)

    def inspect(self) -> set[SampleFormat]:
        """All samples of an array are alike."""
        if self.vector_width is not None:
            return {VectorFormat(self.vector_width)}
        return {ImageFormat(self.shape[1], self.shape[2], _is_color(self.shape))}

    def load(self, rows: Indices, wanted: SampleFormat) -> Samples:
        """Read the samples that are wanted out of the array, and convert them."""
        with _open_archive(self.open, self.shown) as archive:
            samples = _read_rows(archive, self.key, rows, self.shown, wanted.dtype)
        if isinstance(wanted, VectorFormat):
            return samples
        if not _is_color(samples.shape):
            samples = samples.reshape(samples.shape[:3])
        return resize_images(samples, wanted.size, wanted.is_color)


@dataclass(frozen=True)
class DomainArchive:
    """The archive of one domain: labels are read, samples are not."""

    train: ArchiveStore
    train_labels: Indices
    test: ArchiveStore | None
    test_labels: Indices | None
    class_names: tuple[str, ...] = ()
    """The class names in order; empty if the file has only numeric labels."""
    owners: SampleOwners | None = None
    """The owners of the samples if the file holds several clients."""


def open_archive(
    opener: Opener, shown: str, identity: str, num_classes: int | None
) -> DomainArchive:
    """Read the labels of an archive and check everything except the samples."""
    with _open_archive(opener, shown) as archive:
        found = {name.removesuffix(".npy") for name in archive.namelist()}
        _check_keys(found, shown)
        stores = {
            key: _open_store(archive, key, opener, shown, identity)
            for key in ("x_train", "x_test")
            if key in found
        }
        names = _read_class_names(archive, shown) if "classes" in found else ()
        # A file that names its classes has labels among these, whatever others have.
        num_classes = len(names) or num_classes
        labels = {
            key: _check_labels(_read_array(archive, key, shown), f"{shown}: {key}", num_classes)
            for key in ("y_train", "y_test")
            if key in found
        }
        texts = {key: _read_array(archive, key, shown) for key in OWNER_KEYS if key in found}
    train, test = stores["x_train"], stores.get("x_test")
    if train.shape[:1] == (0,):
        noun = "images" if train.vector_width is None else "vectors"
        raise InvalidInput(f"{shown}: x_train has 0 {noun}; it must have at least 1.")
    _check_shape(train)
    _check_lengths(train, labels["y_train"], "train")
    if test is None or (test.shape[:1] == (0,) and len(labels["y_test"]) == 0):
        owners = read_owners(texts, {"train": len(train)}, shown)
        return DomainArchive(train, labels["y_train"], None, None, names, owners)
    _check_shape(test)
    _check_lengths(test, labels["y_test"], "test")
    refuse_mixture(test, train)
    owners = read_owners(texts, {"train": len(train), "test": len(test)}, shown)
    return DomainArchive(train, labels["y_train"], test, labels["y_test"], names, owners)


def open_unlabeled_samples(opener: Opener, shown: str, identity: str) -> ArchiveStore:
    """Open samples that need no labels: the array x_test, else x, else x_train."""
    with _open_archive(opener, shown) as archive:
        found = {name.removesuffix(".npy") for name in archive.namelist()}
        key = next((each for each in ("x_test", "x", "x_train") if each in found), None)
        if key is None:
            listed = ", ".join(sorted(found)) or "nothing"
            raise InvalidInput(f"{shown} has {listed}; it must have x_test, x or x_train.")
        store = _open_store(archive, key, opener, shown, identity)
    _check_shape(store)
    return store


def refuse_mixture(store: ArchiveStore, other: ArchiveStore) -> None:
    """Reject samples that cannot be used together."""
    if store.vector_width != other.vector_width:
        raise InvalidInput(
            f"{store.shown}: {store.key} has {store}, and {other.shown}: {other.key} has {other}; "
            "a set must have only images, or only vectors of one width."
        )


@contextmanager
def _open_archive(opener: Opener, shown: str) -> Iterator[zipfile.ZipFile]:
    with explain_faults(shown, _PLAIN_ARCHIVE), opener() as file:
        if file.read(len(numpy_format.MAGIC_PREFIX)) == numpy_format.MAGIC_PREFIX:
            raise InvalidInput(
                f"{shown} is a single array; it must be an npz archive (numpy.savez)."
            )
        with zipfile.ZipFile(file) as archive:
            _check_members(archive, file.seek(0, os.SEEK_END), shown)
            yield archive


def _check_members(archive: zipfile.ZipFile, num_bytes: int, shown: str) -> None:
    """Reject an archive that would fill the memory; zipfile unpacks no more than is declared."""
    odd = [m.filename for m in archive.infolist() if m.compress_type not in _PACKINGS]
    if odd:
        # Others may claim gigabytes of memory before they give a byte.
        raise InvalidInput(
            f"{shown}: {odd[0][:80]!r} is packed in an unusual way; it must be stored or deflated "
            "(numpy.savez or numpy.savez_compressed)."
        )
    unpacked = sum(member.file_size for member in archive.infolist())
    reject_bomb(shown, num_bytes, unpacked, _BYTES_NEVER_REJECTED)


def _open_store(
    archive: zipfile.ZipFile, key: str, opener: Opener, shown: str, identity: str
) -> ArchiveStore:
    """Read the header of an array of samples: its shape, once its type is seen to be right.

    An empty list may be of any type: numpy writes one as float.
    """
    with explain_faults(f"{shown}: {key}", _PLAIN_ARCHIVE), archive.open(f"{key}.npy") as member:
        shape, _, dtype = read_array_header(member)
    width = shape[1] if is_array_of_vectors(shape, dtype) else None
    if width is None and dtype != numpy.uint8 and shape[:1] != (0,):
        about, types = f"{shown}: {key} has dtype {dtype}", " or ".join(VECTOR_TYPES)
        if len(shape) > 2:
            raise InvalidInput(f"{about}; it must be uint8 (0 to 255).")
        raise InvalidInput(
            f"{about} and shape {shape}; it must be vectors, {types} [vectors, numbers], or "
            "images, uint8 [images, height, width] or [images, height, width, 3]."
        )
    return ArchiveStore(opener, key, shape, shown, identity, width)


def _read_rows(
    archive: zipfile.ZipFile, key: str, rows: Indices, shown: str, dtype: str
) -> Samples:
    """Read some samples of an array, piece by piece: a set may be larger than the memory."""
    order = numpy.argsort(rows, kind="stable")
    ascending = rows[order]
    samples: Samples | None = None
    with explain_faults(f"{shown}: {key}", _PLAIN_ARCHIVE):
        for begin, piece in _read_pieces(archive, key, shown):
            if dtype in VECTOR_TYPES and (found := find_not_finite(piece, begin)):
                raise InvalidInput(
                    f"{shown}: {key} has {found}; vectors must be finite numbers of at most 3.4e38."
                )
            if samples is None:
                samples = numpy.empty((len(rows), *piece.shape[1:]), dtype)
            first, last = numpy.searchsorted(ascending, (begin, begin + len(piece)))
            samples[order[first:last]] = piece[ascending[first:last] - begin]
    assert samples is not None
    return samples


def _read_pieces(archive: zipfile.ZipFile, key: str, shown: str) -> Iterator[tuple[int, Samples]]:
    """Yield an array in pieces of some samples, each with the number of its first one."""
    with archive.open(f"{key}.npy") as member:
        shape, is_fortran, dtype = read_array_header(member)
        if is_fortran or not math.prod(shape):
            yield 0, _read_array(archive, key, shown)
            return
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        at_once = max(1, min(_SAMPLES_AT_ONCE, _BYTES_AT_ONCE // row_bytes))
        for begin in range(0, shape[0], at_once):
            count = min(at_once, shape[0] - begin)
            content = member.read(count * row_bytes)
            if len(content) != count * row_bytes:
                raise ValueError("it ends too soon")
            yield begin, numpy.frombuffer(content, dtype).reshape(count, *shape[1:])


def _read_array(archive: zipfile.ZipFile, key: str, shown: str) -> NDArray[Any]:
    with explain_faults(f"{shown}: {key}", _PLAIN_ARCHIVE), archive.open(f"{key}.npy") as member:
        array: NDArray[Any] = numpy_format.read_array(member, allow_pickle=False)
    return array


def _check_keys(found: set[str], shown: str) -> None:
    needed = list(_NEEDED)
    if found.intersection(_OPTIONAL):
        needed.extend(_OPTIONAL)
    missing = [key for key in needed if key not in found]
    if missing:
        listed = ", ".join(sorted(found)) or "nothing"
        raise InvalidInput(
            f"{shown} lacks {', '.join(missing)}: it has {listed} and needs {', '.join(_NEEDED)} "
            f"and, for a test set, {', '.join(_OPTIONAL)}."
        )


def _read_class_names(archive: zipfile.ZipFile, shown: str) -> tuple[str, ...]:
    found = _read_array(archive, "classes", shown)
    names = tuple(str(name) for name in found.tolist()) if found.ndim == 1 else ()
    sound = found.dtype.kind == "U" and len(set(names)) == len(names) <= MOST_CLASSES
    if not sound or not all(name and name.isprintable() for name in names) or not names:
        raise InvalidInput(
            f"{shown}: classes has dtype {found.dtype} and shape {found.shape}; it must be a list "
            "of different names, one or more, as text."
        )
    return names


def _is_color(shape: tuple[int, ...]) -> bool:
    return len(shape) == 4 and shape[3] == 3


def _check_shape(store: ArchiveStore) -> None:
    shape, about = store.shape, f"{store.shown}: {store.key} has shape {store.shape}"
    if store.vector_width == 0:
        raise InvalidInput(f"{about}; vectors must have at least 1 number.")
    is_gray = len(shape) == 3 or (len(shape) == 4 and shape[3] == 1)
    if store.vector_width is None and (not (is_gray or _is_color(shape)) or 0 in shape[1:]):
        raise InvalidInput(
            f"{about}; it must be [images, height, width] or "
            "[images, height, width, channels] with 1 or 3 channels."
        )


def _check_labels(labels: NDArray[Any], shown: str, num_classes: int | None) -> Indices:
    if labels.dtype.kind not in "iu" and labels.size:
        raise InvalidInput(f"{shown} has dtype {labels.dtype}; labels must be integers from 0.")
    if labels.ndim != 1:
        raise InvalidInput(f"{shown} has shape {labels.shape}; labels must be one list [images].")
    if len(labels):
        largest = (num_classes or MOST_CLASSES) - 1
        for label in (labels.min(), labels.max()):
            if not 0 <= label <= largest:
                raise InvalidInput(
                    f"{shown} has the label {label}; labels must be 0 to {largest:,}."
                )
    checked: Indices = labels.astype(numpy.int64)
    return checked


def _check_lengths(store: ArchiveStore, labels: Indices, part: str) -> None:
    if len(store) != len(labels):
        noun = "images" if store.vector_width is None else "vectors"
        told = f"x_{part} has {len(store):,} {noun} and y_{part} {len(labels):,} labels"
        raise InvalidInput(f"{store.shown}: {told}; they must be equally many.")
