"""Domains kept as numpy archives: x_train, y_train and, where there is a split, x_test, y_test."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy
from numpy.typing import NDArray

from mpfedcl.data.imageset import Domain, Images
from mpfedcl.data.split import Indices
from mpfedcl.errors import InvalidInput

MOST_CLASSES = 65_536
"""A label beyond it is a mistake in the file, and a model with so many outputs would not fit."""

_NEEDED = ("x_train", "y_train")
_OPTIONAL = ("x_test", "y_test")


def read_archive(name: str, file: IO[bytes], shown: str, num_classes: int | None) -> Domain:
    """Read a domain from an open npz file; `shown` is how errors name the file."""
    with _explain_faults(shown):
        archive = numpy.load(file, allow_pickle=False)
    if not isinstance(archive, numpy.lib.npyio.NpzFile):
        raise InvalidInput(f"{shown} is a single array; it must be an npz archive (numpy.savez).")
    with archive:
        _check_keys(set(archive.files), shown)
        arrays = {}
        for key in (*_NEEDED, *_OPTIONAL):
            if key in archive.files:
                with _explain_faults(f"{shown}: {key}"):
                    arrays[key] = archive[key]
    train_images = _check_images(arrays["x_train"], f"{shown}: x_train")
    train_labels = _check_labels(arrays["y_train"], f"{shown}: y_train", num_classes)
    _check_lengths(train_images, train_labels, shown, "train")
    if len(train_images) == 0:
        raise InvalidInput(f"{shown}: x_train has 0 images; it must have at least 1.")
    if "x_test" not in arrays or len(arrays["x_test"]) == len(arrays["y_test"]) == 0:
        return Domain(name, train_images, train_labels)
    test_images = _check_images(arrays["x_test"], f"{shown}: x_test")
    test_labels = _check_labels(arrays["y_test"], f"{shown}: y_test", num_classes)
    _check_lengths(test_images, test_labels, shown, "test")
    return Domain(name, train_images, train_labels, test_images, test_labels)


def read_archive_file(path: Path, num_classes: int | None) -> Domain:
    """Read the domain that the file `<domain>.npz` holds."""
    try:
        with path.open("rb") as file:
            return read_archive(path.stem, file, str(path), num_classes)
    except OSError as error:
        raise InvalidInput(
            f"{path} cannot be read ({error.strerror or error}); it must be a readable npz archive."
        ) from None


@contextmanager
def _explain_faults(shown: str) -> Iterator[None]:
    """Turn whatever broken bytes make numpy and zipfile raise into one sentence."""
    try:
        yield
    except PermissionError:
        raise
    except MemoryError:
        raise InvalidInput(
            f"{shown} does not fit into memory; it must be a smaller npz archive."
        ) from None
    # A damaged archive raises anything from zlib.error to NotImplementedError.
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        if "allow_pickle" in reason or "pickle" in reason.lower():
            reason = "it holds pickled Python objects or is no archive, and pickles are never read"
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


def _check_images(images: Any, shown: str) -> Images:
    if not isinstance(images, numpy.ndarray):
        raise InvalidInput(f"{shown} is no array; it must be a uint8 array of images.")
    if images.dtype != numpy.uint8:
        raise InvalidInput(f"{shown} has dtype {images.dtype}; it must be uint8 (0 to 255).")
    shape = images.shape
    is_grey = len(shape) == 3 or (len(shape) == 4 and shape[3] == 1)
    is_colour = len(shape) == 4 and shape[3] == 3
    if not (is_grey or is_colour) or 0 in shape[1:]:
        raise InvalidInput(
            f"{shown} has shape {shape}; it must be [images, height, width] or "
            "[images, height, width, channels] with 1 or 3 channels."
        )
    return images.reshape(shape[:3]) if is_grey else images


def _check_labels(labels: Any, shown: str, num_classes: int | None) -> Indices:
    if not isinstance(labels, numpy.ndarray) or labels.dtype.kind not in "iu":
        found = getattr(labels, "dtype", "no array")
        raise InvalidInput(f"{shown} has dtype {found}; labels must be integers from 0.")
    if labels.ndim != 1:
        raise InvalidInput(f"{shown} has shape {labels.shape}; labels must be one list [images].")
    if len(labels):
        largest = (num_classes or MOST_CLASSES) - 1
        for label in (labels.min(), labels.max()):
            if not 0 <= label <= largest:
                raise InvalidInput(
                    f"{shown} has the label {label}; labels must be 0 to {largest:,}."
                )
    checked: NDArray[numpy.int64] = labels.astype(numpy.int64)
    return checked


def _check_lengths(images: Images, labels: Indices, shown: str, part: str) -> None:
    if len(images) != len(labels):
        raise InvalidInput(
            f"{shown}: x_{part} has {len(images):,} images and y_{part} {len(labels):,} labels; "
            "they must be equally many."
        )
