"""What the header of an array in an npz file tells: images or vectors, before anything is read."""

import io
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy

VECTOR_TYPES = ("float32", "float64")
_MOST_HEADER_BYTES = 2**16
"""Numpy itself takes headers of at most 10,000 characters."""


def read_array_header(
    member: IO[bytes],
) -> "tuple[tuple[int, ...], bool, numpy.dtype[Any]]":
    """Return shape, whether the first axis runs fastest (Fortran), and type."""
    # Here, because settings are checked long before numpy is needed.
    from numpy.lib import format as numpy_format

    version = numpy_format.read_magic(member)
    if version == (1, 0):
        shape, is_fortran, dtype = numpy_format.read_array_header_1_0(member)
    else:
        shape, is_fortran, dtype = numpy_format.read_array_header_2_0(member)
    return tuple(shape), is_fortran, dtype


def is_array_of_vectors(shape: tuple[int, ...], dtype: "numpy.dtype[Any]") -> bool:
    """Tell whether an array holds a vector in each row, and no images."""
    return len(shape) == 2 and dtype.name in VECTOR_TYPES


def holds_vectors(path: Path, domains: Collection[str] = ()) -> bool:
    """Tell whether an npz file, or the first of a folder's domains, holds vectors to train on."""
    try:
        entries = sorted(path.iterdir()) if path.is_dir() else [path]
        file = next(
            each
            for each in entries
            if each.suffix.lower() == ".npz" and each.is_file() and each.name[0] != "."
            if not domains or each.stem in domains
        )
        with zipfile.ZipFile(file) as archive, archive.open("x_train.npy") as member:
            # Unpacked no further: a header may claim to be of any length.
            shape, _, dtype = read_array_header(io.BytesIO(member.read(_MOST_HEADER_BYTES)))
    # Whatever is wrong there is for the reader to say.
    except Exception:
        return False
    return is_array_of_vectors(shape, dtype)
