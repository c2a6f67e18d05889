"""Find the data folder, encoder weights and the type of npz files, without torch."""

import io
import os
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from mpfedcl.experiment.settings import DatasetSettings

if TYPE_CHECKING:
    import numpy

WEIGHTS_VARIABLE = "MPFEDCL_WEIGHTS"
SAFETENSORS = (".safetensors",)
TORCH = (".pth", ".pt")
"""Suffixes of files of weights."""


def find_data_folder(dataset: DatasetSettings) -> tuple[Path, str]:
    """Return the folder of the named data sets, and the setting that names it."""
    if dataset.root is not None:
        return dataset.root.expanduser(), "dataset.root"
    if os.environ.get("MPFEDCL_DATA"):
        return Path(os.environ["MPFEDCL_DATA"]).expanduser(), "$MPFEDCL_DATA"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "mpfedcl", "the cache folder"


def encoder_data_folders(dataset: DatasetSettings) -> list[Path]:
    """Return the data folders in or next to which weights may be."""
    # For `folder` the root is the data set itself, and weights are usually in the data folder.
    return [find_data_folder(each)[0] for each in (dataset, DatasetSettings())]


def weights_places(*data_folders: Path) -> list[Path]:
    """Return the folders that are searched for weights: in and next to each data folder."""
    return [
        place / "weights"
        for folder in data_folders
        for place in (folder, (folder / "..").resolve())
    ]


def list_weights(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the files of ResNet-18 weights in a folder."""
    return sorted(path for suffix in suffixes for path in folder.glob(f"resnet18*{suffix}"))


def has_weights(dataset: DatasetSettings) -> bool:
    """Return whether files of encoder weights exist, or $MPFEDCL_WEIGHTS names one."""
    places = weights_places(*encoder_data_folders(dataset))
    return bool(os.environ.get(WEIGHTS_VARIABLE)) or any(
        list_weights(place, SAFETENSORS + TORCH) for place in places
    )


FLOAT_TYPES = ("float16", "float32", "float64")
TOKEN_TYPES = ("int32", "int64")
"""Types of arrays that a model takes as they are; other integers would be pixels or a mistake."""
_MOST_HEADER_BYTES = 2**16
"""Numpy accepts headers of at most 10,000 characters."""


def read_array_header(
    member: IO[bytes],
) -> "tuple[tuple[int, ...], bool, numpy.dtype[Any]]":
    """Return the shape, whether the order is Fortran's, and the type."""
    # Imported late: settings are checked without numpy.
    from numpy.lib import format as numpy_format

    version = numpy_format.read_magic(member)
    if version == (1, 0):
        shape, is_fortran, dtype = numpy_format.read_array_header_1_0(member)
    else:
        shape, is_fortran, dtype = numpy_format.read_array_header_2_0(member)
    return tuple(shape), is_fortran, dtype


def list_types(types: tuple[str, ...]) -> str:
    """Return what is allowed, for an error."""
    return f"{', '.join(types[:-1])} or {types[-1]}"


def holds_no_images(shape: tuple[int, ...], dtype: "numpy.dtype[Any]") -> bool:
    """Return whether samples [n, ...] are floats of any shape, or token ids [n, length]."""
    return (len(shape) >= 2 and dtype.name in FLOAT_TYPES) or (
        len(shape) == 2 and dtype.name in TOKEN_TYPES
    )


def holds_arrays(path: Path, domains: Collection[str] = ()) -> bool:
    """Return whether an npz file, or the first domain of a folder, holds arrays, not images."""
    try:
        entries = sorted(path.iterdir()) if path.is_dir() else [path]
        file = next(
            each
            for each in entries
            if each.suffix.lower() == ".npz" and each.is_file() and each.name[0] != "."
            if not domains or each.stem in domains
        )
        with zipfile.ZipFile(file) as archive, archive.open("x_train.npy") as member:
            # A header may claim any length.
            shape, _, dtype = read_array_header(io.BytesIO(member.read(_MOST_HEADER_BYTES)))
    # The reader reports any error.
    except Exception:
        return False
    return holds_no_images(shape, dtype)
