"""Domains stored as numpy archives: x_train, y_train and, if there is a split, x_test, y_test.

An array `classes` of text may name the classes. Arrays of text `clients_train` and, with a test
set, `clients_test` name the client of each sample; each client is then a domain of the set.
"""

import math
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from numpy.lib import format as numpy_format
from numpy.typing import NDArray

from mpfedcl.core.errors import InvalidInput, explain_faults
from mpfedcl.core.files import identify_file
from mpfedcl.core.images import resize_images
from mpfedcl.data.samples import (
    ArrayFormat,
    DomainIndex,
    ImageFormat,
    Indices,
    SampleFormat,
    Samples,
    Subset,
    digest_rows,
    find_not_finite,
    reject_bomb,
)
from mpfedcl.experiment.data_folder import (
    FLOAT_TYPES,
    TOKEN_TYPES,
    holds_no_images,
    list_types,
    read_array_header,
)

MOST_CLASSES = 65_536
"""A larger label is a mistake in the file; a model with more outputs would not fit into memory."""

_BYTES_AT_ONCE = 2**26
_BYTES_NEVER_REJECTED = 2**26
"""Fits into any memory; blank or very regular samples compress better than 100:1."""
_PACKINGS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_NEEDED = ("x_train", "y_train")
_OPTIONAL = ("x_test", "y_test")
_PLAIN_ARCHIVE = "an npz archive of plain arrays"


@dataclass(frozen=True)
class ArchiveStore:
    """The samples of one array of an archive; only its header is read until they are asked for."""

    path: Path
    key: str
    shape: tuple[int, ...]
    array_format: ArrayFormat | None = None
    """None for images."""

    def __len__(self) -> int:
        return self.shape[0]

    def __str__(self) -> str:
        return f"{self.path}: {self.key}"

    @property
    def noun(self) -> str:
        """The word for the samples."""
        return f"{(self.array_format or ImageFormat).noun}s"

    def sign(self, rows: Indices) -> str:
        """Sign the file, the array and the places in it."""
        return digest_rows(rows, identify_file(self.path), self.key)

    def inspect(self) -> set[SampleFormat]:
        """All samples of an array are alike."""
        if self.array_format is not None:
            return {self.array_format}
        return {ImageFormat(self.shape[1], self.shape[2], _is_color(self.shape))}

    def load(self, rows: Indices, wanted: SampleFormat) -> Samples:
        """Read the samples that are wanted out of the array, and convert them."""
        with _open_archive(self.path) as archive:
            samples = _read_rows(archive, self, rows, wanted.dtype)
        if isinstance(wanted, ArrayFormat):
            return samples
        if not _is_color(samples.shape):
            samples = samples.reshape(samples.shape[:3])
        return resize_images(samples, wanted.size, wanted.is_color)

    def contents(self) -> Iterator[bytes]:
        """Yield the bytes of each sample, after its type and shape."""
        with _open_archive(self.path) as archive:
            for _, piece in _read_pieces(archive, self):
                header = f"{piece.dtype} {piece.shape[1:]} ".encode()
                for sample in piece:
                    yield header + sample.tobytes()


def open_archive(
    path: Path, num_classes: int | None, name: str = "", first_row: int = 0
) -> tuple[list[ArchiveStore], list[DomainIndex], tuple[str, ...]]:
    """Read the labels and owners of an archive, and check everything except the samples.

    Returns the stores of the training samples and, if there is a test set, of the test samples; a
    domain for each client in order of name, or one; and the class names, if the file has them.

    Args:
        path: The file.
        num_classes: The number of classes of the set, if it is known.
        name: The domain's name if the file names no clients.
        first_row: The number of the file's first sample in the set.
    """
    with _open_archive(path) as archive:
        found = _list_keys(archive)
        _check_keys(found, path)
        parts = ["train", "test"] if "x_test" in found else ["train"]
        stores = [_open_store(archive, f"x_{part}", path) for part in parts]
        names = _read_class_names(archive, path) if "classes" in found else ()
        # A file that names its classes has labels among these, whatever others have.
        num_classes = len(names) or num_classes
        labels = [_read_labels(archive, f"y_{part}", path, num_classes) for part in parts]
        if len(stores) == 2 and len(stores[1]) == len(labels[1]) == 0:
            del stores[1], labels[1]
        if not len(stores[0]):
            raise InvalidInput(f"{stores[0]} has 0 {stores[0].noun}; it must have at least 1.")
        subsets = []
        for store, own in zip(stores, labels, strict=True):
            if len(store) != len(own):
                raise InvalidInput(
                    f"{store} has {len(store):,} {store.noun} and {store.key.replace('x_', 'y_')} "
                    f"{len(own):,} labels; they must be equally many."
                )
            refuse_mixture(store, stores[0])
            subsets.append(Subset(numpy.arange(first_row, first_row + len(store)), own))
            first_row += len(store)
        domains = [DomainIndex(name, *subsets)]
        if found.intersection(("clients_train", "clients_test")):
            clients, owners = _read_owners(archive, found, stores)
            split = [s.split(own, len(clients)) for s, own in zip(subsets, owners, strict=True)]
            domains = [DomainIndex(*each) for each in zip(clients, *split, strict=True)]
    return stores, domains, names


def open_unlabeled_samples(path: Path) -> ArchiveStore:
    """Open samples that need no labels: the array x_test, else x, else x_train."""
    with _open_archive(path) as archive:
        found = _list_keys(archive)
        key = next((each for each in ("x_test", "x", "x_train") if each in found), None)
        if key is None:
            listed = ", ".join(sorted(found)) or "nothing"
            raise InvalidInput(f"{path} has {listed}; it must have x_test, x or x_train.")
        store = _open_store(archive, key, path)
    if len(store.shape) < 2:
        raise InvalidInput(f"{store} has shape {store.shape}; it must be images or arrays.")
    return store


def refuse_mixture(store: ArchiveStore, other: ArchiveStore) -> None:
    """Reject samples that cannot be used together."""
    if store.array_format != other.array_format:
        raise InvalidInput(
            f"{store} has {store.array_format or 'images'}, and {other} has "
            f"{other.array_format or 'images'}; a set must have only images, or only arrays of one "
            "shape."
        )


@contextmanager
def _open_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    with explain_faults(path, _PLAIN_ARCHIVE), path.open("rb") as file:
        if file.read(len(numpy_format.MAGIC_PREFIX)) == numpy_format.MAGIC_PREFIX:
            raise InvalidInput(
                f"{path} is a single array; it must be an npz archive (numpy.savez)."
            )
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                if member.compress_type not in _PACKINGS:
                    # Others may claim gigabytes of memory before they give a byte.
                    raise InvalidInput(
                        f"{path}: {member.filename[:80]!r} is packed in an unusual way; it must be "
                        "stored or deflated (numpy.savez or numpy.savez_compressed)."
                    )
            # zipfile unpacks no more than is declared.
            unpacked = sum(member.file_size for member in archive.infolist())
            reject_bomb(path, unpacked, _BYTES_NEVER_REJECTED)
            yield archive


def _list_keys(archive: zipfile.ZipFile) -> set[str]:
    return {name.removesuffix(".npy") for name in archive.namelist()}


def _open_store(archive: zipfile.ZipFile, key: str, path: Path) -> ArchiveStore:
    """Read the header of an array of samples, and check its type and shape."""
    with explain_faults(f"{path}: {key}", _PLAIN_ARCHIVE), archive.open(f"{key}.npy") as member:
        shape, _, dtype = read_array_header(member)
    found = None
    if holds_no_images(shape, dtype):
        found = ArrayFormat(shape[1:], "int64" if dtype.name in TOKEN_TYPES else "float32")
    store, about = ArchiveStore(path, key, shape, found), f"{path}: {key} has"
    if shape and not shape[0]:
        # An empty list may be of any type: numpy writes one as float.
        return store
    if found is None and (dtype != numpy.uint8 or not shape):
        raise InvalidInput(
            f"{about} dtype {dtype} and shape {shape}; it must be {list_types(FLOAT_TYPES)} "
            f"[samples, ...], token ids, {list_types(TOKEN_TYPES)} [samples, length], or images, "
            "uint8 [images, height, width] or [images, height, width, 3]."
        )
    if found is not None and 0 in shape:
        raise InvalidInput(f"{about} shape {shape}; {found.noun}s must have at least 1 number.")
    is_image = len(shape) == 3 or (len(shape) == 4 and shape[3] in (1, 3))
    if found is None and (not is_image or 0 in shape):
        raise InvalidInput(
            f"{about} shape {shape}; it must be [images, height, width] or "
            "[images, height, width, channels] with 1 or 3 channels."
        )
    return store


def _read_rows(archive: zipfile.ZipFile, store: ArchiveStore, rows: Indices, dtype: str) -> Samples:
    """Read some samples of an array, piece by piece: a set may be larger than the memory."""
    order = numpy.argsort(rows, kind="stable")
    ascending = rows[order]
    samples = numpy.empty((len(rows), *store.shape[1:]), dtype)
    with explain_faults(store, _PLAIN_ARCHIVE):
        for begin, piece in _read_pieces(archive, store):
            if store.array_format and (found := find_not_finite(piece, begin)):
                raise InvalidInput(f"{store} has {found}; {store.array_format.say_finite()}.")
            first, last = numpy.searchsorted(ascending, (begin, begin + len(piece)))
            samples[order[first:last]] = piece[ascending[first:last] - begin]
    return samples


def _read_pieces(archive: zipfile.ZipFile, store: ArchiveStore) -> Iterator[tuple[int, Samples]]:
    """Yield an array in pieces of some samples, each with the number of its first one."""
    with archive.open(f"{store.key}.npy") as member:
        shape, is_fortran, dtype = read_array_header(member)
        if is_fortran or not math.prod(shape):
            yield 0, _read_array(archive, store.key, store.path)
            return
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        at_once = max(1, _BYTES_AT_ONCE // row_bytes)
        for begin in range(0, shape[0], at_once):
            count = min(at_once, shape[0] - begin)
            content = member.read(count * row_bytes)
            if len(content) != count * row_bytes:
                raise ValueError("it ends too soon")
            yield begin, numpy.frombuffer(content, dtype).reshape(count, *shape[1:])


def _read_array(archive: zipfile.ZipFile, key: str, path: Path) -> NDArray[Any]:
    with explain_faults(f"{path}: {key}", _PLAIN_ARCHIVE), archive.open(f"{key}.npy") as member:
        array: NDArray[Any] = numpy_format.read_array(member, allow_pickle=False)
    return array


def _check_keys(found: set[str], path: Path) -> None:
    needed = [*_NEEDED, *(_OPTIONAL if found.intersection(_OPTIONAL) else ())]
    missing = [key for key in needed if key not in found]
    if missing:
        listed = ", ".join(sorted(found)) or "nothing"
        raise InvalidInput(
            f"{path} lacks {', '.join(missing)}: it has {listed} and needs {', '.join(_NEEDED)} "
            f"and, for a test set, {', '.join(_OPTIONAL)}."
        )


def _read_class_names(archive: zipfile.ZipFile, path: Path) -> tuple[str, ...]:
    found = _read_array(archive, "classes", path)
    names = tuple(str(name) for name in found.tolist()) if found.ndim == 1 else ()
    sound = found.dtype.kind == "U" and len(set(names)) == len(names) <= MOST_CLASSES
    if not sound or not all(name and name.isprintable() for name in names) or not names:
        raise InvalidInput(
            f"{path}: classes has dtype {found.dtype} and shape {found.shape}; it must be a list "
            "of different names, one or more, as text."
        )
    return names


def _read_owners(
    archive: zipfile.ZipFile, found: set[str], stores: Sequence[ArchiveStore]
) -> tuple[list[str], list[Indices]]:
    """Return the clients in order of name, and the index of each sample's client."""
    texts = []
    for store in stores:
        key = store.key.replace("x_", "clients_")
        array = _read_array(archive, key, store.path) if key in found else None
        if array is None or array.dtype.kind != "U" or array.shape != (len(store),):
            told = "is missing" if array is None else f"has {array.dtype} {list(array.shape)}"
            raise InvalidInput(
                f"{store.path}: {key} {told}; it must be a list of {len(store):,} names as text, "
                f"one for each sample of {store.key}."
            )
        texts.append(array)
    names = numpy.unique(texts[0])
    strange = numpy.setdiff1d(texts[-1], names)
    if len(strange):
        raise InvalidInput(
            f"{stores[0].path}: clients_test has {str(strange[0])!r}, which has no sample in "
            "x_train; each client must have a sample to train on."
        )
    return [str(name) for name in names], [numpy.searchsorted(names, each) for each in texts]


def _is_color(shape: tuple[int, ...]) -> bool:
    return len(shape) == 4 and shape[3] == 3


def _read_labels(
    archive: zipfile.ZipFile, key: str, path: Path, num_classes: int | None
) -> Indices:
    labels, about = _read_array(archive, key, path), f"{path}: {key}"
    if labels.dtype.kind not in "iu" and labels.size:
        raise InvalidInput(f"{about} has dtype {labels.dtype}; labels must be integers from 0.")
    if labels.ndim != 1:
        raise InvalidInput(f"{about} has shape {labels.shape}; labels must be one list [images].")
    largest = (num_classes or MOST_CLASSES) - 1
    for label in (labels.min(), labels.max()) if len(labels) else ():
        if not 0 <= label <= largest:
            raise InvalidInput(f"{about} has the label {label}; labels must be 0 to {largest:,}.")
    checked: Indices = labels.astype(numpy.int64)
    return checked
