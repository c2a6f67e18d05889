"""MNIST as published: four files in the idx format, gzipped or plain."""

import gzip
import math
import zlib
from pathlib import Path

import numpy

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.images import Images
from mpfedcl.data.public.prepare.originals_folder import OriginalsFolder, check_labels
from mpfedcl.data.samples import DomainImages
from mpfedcl.data.train_test_split import Indices

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)

_UNSIGNED_BYTES = 8
_MOST_BYTES = 4 * 2**30


def read_mnist(source: OriginalsFolder) -> DomainImages | None:
    """Read MNIST from its four files; None if none of them is there."""
    # Some copies spell train-images.idx3-ubyte.
    dotted = [name.replace("-idx", ".idx") for name in FILES]
    found = [
        source.find_file(name, f"{name}.gz", other, f"{other}.gz")
        for name, other in zip(FILES, dotted, strict=True)
    ]
    there = [path for path in found if path is not None]
    if not there:
        return None
    if len(there) < len(found):
        lacking = [name for name, path in zip(FILES, found, strict=True) if path is None]
        raise InvalidInput(
            f"{source.root} has {there[0].name} but lacks {', '.join(lacking)} (plain or .gz); all "
            "four must be there."
        )
    train_images, train_labels, test_images, test_labels = there
    return DomainImages(
        "mnist",
        *_read_pair(train_images, train_labels),
        *_read_pair(test_images, test_labels),
    )


def _read_pair(images: Path, labels: Path) -> tuple[Images, Indices]:
    pixels = _read_array(images, num_axes=3)
    numbers = _read_array(labels, num_axes=1)
    return pixels, check_labels(numbers, range(10), labels, len(pixels), images)


def _read_array(path: Path, num_axes: int) -> Images:
    """Read an idx file of unsigned bytes: magic, sizes of the axes, then the bytes."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            magic = file.read(4)
            if magic != bytes((0, 0, _UNSIGNED_BYTES, num_axes)):
                raise InvalidInput(
                    f"{path} begins with {magic.hex() or 'nothing'}; an idx file of unsigned bytes "
                    f"with {num_axes} axes must begin with 0000080{num_axes}."
                )
            header = file.read(4 * num_axes)
            shape = tuple(
                int(size) for size in numpy.frombuffer(header[: len(header) // 4 * 4], ">u4")
            )
            wanted = math.prod(shape)
            if len(shape) < num_axes or 0 in shape or wanted > _MOST_BYTES:
                raise InvalidInput(
                    f"{path} declares the sizes {shape}; it must declare {num_axes} sizes above 0, "
                    f"at most {_MOST_BYTES:,} bytes in all."
                )
            # One byte more tells whether the file ends where it should.
            content = file.read(wanted + 1)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidInput(
            f"{path} cannot be read ({reason}); it must be a whole idx file, plain or gzipped."
        ) from None
    if len(content) != wanted:
        found = f"{len(content):,}" if len(content) < wanted else "more"
        raise InvalidInput(f"{path} holds {found} bytes after its header; it must hold {wanted:,}.")
    return numpy.frombuffer(content, numpy.uint8).reshape(shape)
