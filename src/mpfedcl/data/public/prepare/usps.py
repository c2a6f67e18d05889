"""USPS, 16x16 gray digits: the LIBSVM text files, bzip2 compressed, or one HDF5 file."""

import importlib
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.images import Images
from mpfedcl.data.public.prepare.originals_folder import (
    OriginalsFolder,
    check_labels,
    find_train_and_test,
)
from mpfedcl.data.samples import DomainImages
from mpfedcl.data.train_test_split import Indices

LIBSVM_FILES = ("usps.bz2", "usps.t.bz2")
HDF5_FILE = "usps.h5"

_SIDE = 16
_SLACK = 1e-6
"""What a decimal fraction in a text file may lie beyond the range."""


def read_usps(source: OriginalsFolder) -> DomainImages | None:
    """Read USPS from whichever files are there, the text files first; None without any."""
    paths = find_train_and_test(source, LIBSVM_FILES)
    if paths is not None:
        return DomainImages("usps", *_read_libsvm(paths[0]), *_read_libsvm(paths[1]))
    path = source.find_file(HDF5_FILE)
    return None if path is None else _read_hdf5(path)


def _read_libsvm(path: Path) -> tuple[Images, Indices]:
    """Read labels 1 to 10 for the digits 0 to 9 and pixels from -1 to 1."""
    from sklearn.datasets import load_svmlight_file

    try:
        pixels, labels = load_svmlight_file(path, n_features=_SIDE**2, zero_based=False)
    # Text that is none, streams that end early: ValueError, EOFError, OSError, ...
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise InvalidInput(
            f"{path} cannot be read ({reason}); it must be a whole LIBSVM text file with "
            f"{_SIDE**2} pixels per line, bzip2 compressed."
        ) from None
    images = _scale(pixels.toarray(), -1, 1, path)
    return images, check_labels(labels, range(1, 11), path, len(images)) - 1


def _read_hdf5(path: Path) -> DomainImages:
    """Read the groups train and test, each with data from 0 to 1 and target from 0 to 9."""
    try:
        # Not a dependency: this one file of one data set needs it, and there is a text form.
        h5py = importlib.import_module("h5py")
    except ImportError:
        raise InvalidInput(
            f"{path} is an HDF5 file, and h5py, which reads those, is not installed; it must be "
            f"(pip install h5py), or {' and '.join(LIBSVM_FILES)} must be there instead."
        ) from None
    parts = []
    for group in ("train", "test"):
        pixels, labels = _read_group(h5py, path, group)
        if pixels.ndim < 2 or pixels[:1].size != _SIDE**2:
            raise InvalidInput(
                f"{path}: {group}/data has shape {pixels.shape}; it must be [images, {_SIDE**2}]."
            )
        images = _scale(pixels.reshape(len(pixels), -1), 0, 1, path)
        parts.append((images, check_labels(labels, range(10), path, len(images))))
    return DomainImages("usps", *parts[0], *parts[1])


def _read_group(h5py: Any, path: Path, group: str) -> tuple[NDArray[Any], NDArray[Any]]:
    try:
        with h5py.File(path, "r") as file:
            data, target = file[group]["data"], file[group]["target"]
            return numpy.asarray(data), numpy.asarray(target)
    # h5py raises OSError, KeyError, RuntimeError, ValueError, TypeError on broken or other files.
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise InvalidInput(
            f"{path} cannot be read ({reason}); it must be a whole HDF5 file with {group}/data and "
            f"{group}/target."
        ) from None


def _scale(pixels: NDArray[Any], low: float, high: float, path: Path) -> Images:
    """Return pixels of a range as bytes."""
    if len(pixels) == 0:
        raise InvalidInput(f"{path} has no images; it must have at least one.")
    lowest, highest = float(pixels.min()), float(pixels.max())
    # Written so that not-a-number fails too.
    if not (lowest >= low - _SLACK and highest <= high + _SLACK):
        raise InvalidInput(
            f"{path} has pixels from {lowest:g} to {highest:g}; they must be from {low} to {high}."
        )
    scaled = numpy.rint((pixels - low) / (high - low) * 255)
    return numpy.clip(scaled, 0, 255).astype(numpy.uint8).reshape(-1, _SIDE, _SIDE)
