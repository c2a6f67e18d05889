"""Domains kept as numpy archives: x_train, y_train and, where there is a split, x_test, y_test."""

import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import numpy
from numpy.lib import format as numpy_format
from numpy.typing import NDArray

from mpfedcl.data.train_test_split import Indices
from mpfedcl.errors import InvalidInput
from mpfedcl.images import Images, Size, resize_images

MOST_CLASSES = 65_536
"""A label beyond it is a mistake in the file, and a model with so many outputs would not fit."""

_IMAGES_AT_ONCE = 4096
_NEEDED = ("x_train", "y_train")
_OPTIONAL = ("x_test", "y_test")

Opener = Callable[[], IO[bytes]]


@dataclass(frozen=True)
class ArchiveImageStore:
    """The images of one array of an archive; only its header is read until they are asked for."""

    open: Opener
    key: str
    shape: tuple[int, ...]
    shown: str
    """How errors name the file."""
    identity: str
    """What tells this file from others, and from itself before a change."""

    def __len__(self) -> int:
        return self.shape[0]

    def identify(self, rows: Indices) -> list[str]:
        """Return the file's identity and the image's place in it."""
        return [f"{self.identity}|{self.key}|{row}" for row in rows]

    def inspect_images(self) -> tuple[set[Size], bool]:
        """All images of an array are alike."""
        return {(self.shape[1], self.shape[2])}, _is_colour(self.shape)

    def load(self, rows: Indices, size: Size, is_colour: bool) -> Images:
        """Read the images that are wanted out of the array, and resize them."""
        with _open_archive(self.open, self.shown) as archive:
            images = _read_rows(archive, self.key, rows, self.shown)
        if not _is_colour(images.shape):
            images = images.reshape(images.shape[:3])
        return resize_images(images, size, is_colour)


@dataclass(frozen=True)
class DomainArchive:
    """One domain's archive, labels read and images left where they are."""

    train: ArchiveImageStore
    train_labels: Indices
    test: ArchiveImageStore | None
    test_labels: Indices | None


def open_archive(
    opener: Opener, shown: str, identity: str, num_classes: int | None
) -> DomainArchive:
    """Read an archive's labels and check all that can be wrong with it but the pixels."""
    with _open_archive(opener, shown) as archive:
        found = {name.removesuffix(".npy") for name in archive.namelist()}
        _check_keys(found, shown)
        shapes = {
            key: _read_shape(archive, key, shown) for key in ("x_train", "x_test") if key in found
        }
        labels = {
            key: _check_labels(_read_array(archive, key, shown), f"{shown}: {key}", num_classes)
            for key in ("y_train", "y_test")
            if key in found
        }
    stores = {
        key: ArchiveImageStore(opener, key, shape, shown, identity) for key, shape in shapes.items()
    }
    if shapes["x_train"][:1] == (0,):
        raise InvalidInput(f"{shown}: x_train has 0 images; it must have at least 1.")
    _check_image_shape(shapes["x_train"], f"{shown}: x_train")
    _check_lengths(shapes["x_train"][0], labels["y_train"], shown, "train")
    if "x_test" not in shapes or (shapes["x_test"][:1] == (0,) and len(labels["y_test"]) == 0):
        return DomainArchive(stores["x_train"], labels["y_train"], None, None)
    _check_image_shape(shapes["x_test"], f"{shown}: x_test")
    _check_lengths(shapes["x_test"][0], labels["y_test"], shown, "test")
    return DomainArchive(stores["x_train"], labels["y_train"], stores["x_test"], labels["y_test"])


def open_unlabelled_samples(opener: Opener, shown: str, identity: str) -> ArchiveImageStore:
    """Open images that need no labels: the array x_test, else x, else x_train."""
    with _open_archive(opener, shown) as archive:
        found = {name.removesuffix(".npy") for name in archive.namelist()}
        key = next((each for each in ("x_test", "x", "x_train") if each in found), None)
        if key is None:
            listed = ", ".join(sorted(found)) or "nothing"
            raise InvalidInput(f"{shown} has {listed}; it must have x_test, x or x_train.")
        shape = _read_shape(archive, key, shown)
    _check_image_shape(shape, f"{shown}: {key}")
    return ArchiveImageStore(opener, key, shape, shown, identity)


@contextmanager
def _open_archive(opener: Opener, shown: str) -> Iterator[zipfile.ZipFile]:
    try:
        file = opener()
    except OSError as error:
        raise InvalidInput(
            f"{shown} cannot be read ({error.strerror or error}); it must be a readable npz file."
        ) from None
    with file, _explain_faults(shown):
        if file.read(len(numpy_format.MAGIC_PREFIX)) == numpy_format.MAGIC_PREFIX:
            raise InvalidInput(
                f"{shown} is a single array; it must be an npz archive (numpy.savez)."
            )
        with zipfile.ZipFile(file) as archive:
            yield archive


def _read_shape(archive: zipfile.ZipFile, key: str, shown: str) -> tuple[int, ...]:
    """Read the header of an array of images: its shape, once its type is seen to be right.

    An empty list may be of any type: numpy writes one as float.
    """
    with _explain_faults(f"{shown}: {key}"), archive.open(f"{key}.npy") as member:
        shape, _, dtype = _read_header(member)
    if dtype != numpy.uint8 and shape[:1] != (0,):
        raise InvalidInput(f"{shown}: {key} has dtype {dtype}; it must be uint8 (0 to 255).")
    return shape


def _read_rows(archive: zipfile.ZipFile, key: str, rows: Indices, shown: str) -> Images:
    """Read some images of an array, piece by piece: a set may be larger than the memory."""
    with _explain_faults(f"{shown}: {key}"), archive.open(f"{key}.npy") as member:
        shape, is_fortran, _ = _read_header(member)
        if is_fortran:
            return numpy.asarray(_read_array(archive, key, shown)[rows])
        order = numpy.argsort(rows, kind="stable")
        images = numpy.empty((len(rows), *shape[1:]), dtype=numpy.uint8)
        for begin in range(0, shape[0], _IMAGES_AT_ONCE):
            end = min(begin + _IMAGES_AT_ONCE, shape[0])
            content = member.read((end - begin) * images[:0].strides[0])
            piece = numpy.frombuffer(content, dtype=numpy.uint8).reshape(-1, *shape[1:])
            if len(piece) != end - begin:
                raise ValueError("it ends too soon")
            first, last = numpy.searchsorted(rows[order], (begin, end))
            chosen = order[first:last]
            images[chosen] = piece[rows[chosen] - begin]
    return images


def _read_header(member: IO[bytes]) -> tuple[tuple[int, ...], bool, numpy.dtype[Any]]:
    version = numpy_format.read_magic(member)
    if version == (1, 0):
        shape, is_fortran, dtype = numpy_format.read_array_header_1_0(member)
    else:
        shape, is_fortran, dtype = numpy_format.read_array_header_2_0(member)
    return tuple(shape), is_fortran, dtype


def _read_array(archive: zipfile.ZipFile, key: str, shown: str) -> NDArray[Any]:
    with _explain_faults(f"{shown}: {key}"), archive.open(f"{key}.npy") as member:
        array: NDArray[Any] = numpy_format.read_array(member, allow_pickle=False)
    return array


@contextmanager
def _explain_faults(shown: str) -> Iterator[None]:
    """Turn whatever broken bytes make numpy and zipfile raise into one sentence."""
    try:
        yield
    except InvalidInput:
        raise
    except MemoryError:
        raise InvalidInput(
            f"{shown} does not fit into memory; it must be a smaller npz archive."
        ) from None
    # A damaged archive raises anything from zlib.error to NotImplementedError.
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        if "pickle" in reason.lower():
            reason = "it holds pickled Python objects, and pickles are never read"
        raise InvalidInput(
            f"{shown} cannot be read ({reason}); it must be an npz archive of plain arrays."
        ) from None


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


def _is_colour(shape: tuple[int, ...]) -> bool:
    return len(shape) == 4 and shape[3] == 3


def _check_image_shape(shape: tuple[int, ...], shown: str) -> None:
    is_grey = len(shape) == 3 or (len(shape) == 4 and shape[3] == 1)
    if not (is_grey or _is_colour(shape)) or 0 in shape[1:]:
        raise InvalidInput(
            f"{shown} has shape {shape}; it must be [images, height, width] or "
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


def _check_lengths(num_images: int, labels: Indices, shown: str, part: str) -> None:
    if num_images != len(labels):
        raise InvalidInput(
            f"{shown}: x_{part} has {num_images:,} images and y_{part} {len(labels):,} labels; "
            "they must be equally many."
        )
