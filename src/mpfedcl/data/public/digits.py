"""Digits as published: MNIST, MNIST-M, SVHN, SynthDigits and USPS."""

import gzip
import math
from pathlib import Path

import numpy

from mpfedcl.core.errors import InvalidInput, enumerate_names, explain_faults
from mpfedcl.core.images import Images, resize_images
from mpfedcl.data.image_files import read_image_files
from mpfedcl.data.public.originals import Part, check_labels

MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)

_UNSIGNED_BYTES = 8
_MOST_IDX_BYTES = 4 * 2**30


def read_mnist(paths: list[Path]) -> list[Part]:
    """Read MNIST from its four files."""
    return [_read_pair(*paths[:2]), _read_pair(*paths[2:])]


def _read_pair(images: Path, labels: Path) -> Part:
    pixels = _read_idx(images, num_axes=3)
    numbers = _read_idx(labels, num_axes=1)
    return pixels, check_labels(numbers, range(10), labels, len(pixels), images)


def _read_idx(path: Path, num_axes: int) -> Images:
    """Read an idx file of unsigned bytes: magic, sizes of the axes, then the bytes."""
    with (
        explain_faults(path, "a whole idx file, plain or gzipped"),
        gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file,
    ):
        magic = file.read(4)
        if magic != bytes((0, 0, _UNSIGNED_BYTES, num_axes)):
            raise InvalidInput(
                f"{path} begins with {magic.hex() or 'nothing'}; an idx file of unsigned bytes "
                f"with {num_axes} axes must begin with 0000080{num_axes}."
            )
        header = file.read(4 * num_axes)
        shape = tuple(int(size) for size in numpy.frombuffer(header[: len(header) // 4 * 4], ">u4"))
        wanted = math.prod(shape)
        if len(shape) < num_axes or 0 in shape or wanted > _MOST_IDX_BYTES:
            raise InvalidInput(
                f"{path} declares the sizes {shape}; it must declare {num_axes} sizes above 0, "
                f"at most {_MOST_IDX_BYTES:,} bytes in total."
            )
        # One more byte shows whether the file is too long.
        content = file.read(wanted + 1)
    if len(content) != wanted:
        found = f"{len(content):,}" if len(content) < wanted else "more"
        raise InvalidInput(f"{path} holds {found} bytes after its header; it must hold {wanted:,}.")
    return numpy.frombuffer(content, numpy.uint8).reshape(shape)


MNIST_M_FILES = ("mnist_m_train_labels.txt", "mnist_m_test_labels.txt")
_LONGEST_LABEL_FILE = 2**26


def read_listed_images(label_file: Path) -> Part:
    """Read the images that a label file of MNIST-M lists from the folder next to it."""
    folder = label_file.with_name(label_file.name.removesuffix("_labels.txt"))
    labels = _read_labels(label_file)
    paths = [folder / name for name in labels]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise InvalidInput(
            f"{label_file} names {len(missing):,} images that are not there "
            f"({enumerate_names(missing, 3)}); all of them must be in {folder}."
        )
    images = read_image_files(paths, None)
    images = resize_images(images, (images.shape[1], images.shape[2]), is_color=True)
    return images, check_labels(list(labels.values()), range(10), label_file, len(images))


def _read_labels(path: Path) -> dict[str, int]:
    """Return labels by name of image, from lines of a name and a number."""
    if path.stat().st_size > _LONGEST_LABEL_FILE:
        raise InvalidInput(
            f"{path} has more than {_LONGEST_LABEL_FILE:,} bytes; it must be a list."
        )
    labels: dict[str, int] = {}
    for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), start=1):
        words = line.split()
        # A bare name, so that no list can make the program read files elsewhere.
        is_entry = len(words) == 2 and words[1].isdecimal() and Path(words[0]).name == words[0]
        if not is_entry or words[0] in labels:
            raise InvalidInput(
                f"{path} has {line[:80]!r} in line {number}; each line must be an image's name "
                "and its label, and each image must have one line."
            )
        labels[words[0]] = int(words[1])
    return labels


def read_svhn(path: Path) -> Part:
    """Read cropped digits of SVHN, in which label 10 is the digit 0."""
    images, labels = _read_matlab(path, range(1, 11))
    return images, labels % 10


def read_synth(path: Path) -> Part:
    """Read digits of SynthDigits."""
    return _read_matlab(path, range(10))


def _read_matlab(path: Path, allowed_labels: range) -> Part:
    from scipy.io import loadmat, whosmat

    wanted = "a whole MATLAB file of version 7 or earlier (save -v7)"
    with explain_faults(path, wanted):
        declared = whosmat(path)
    sizes = {name: (tuple(shape), kind) for name, shape, kind in declared}
    for name in ("X", "y"):
        if name not in sizes:
            listed = ", ".join(sorted(sizes)) or "nothing"
            raise InvalidInput(
                f"{path} lacks {name}: it has {listed}, and must have X and y and be whole."
            )
    shape, kind = sizes["X"]
    # Declared sizes come first, so that no array of another kind is ever unpacked.
    if len(shape) != 4 or shape[:3] != (32, 32, 3) or shape[3] == 0 or kind != "uint8":
        raise InvalidInput(
            f"{path}: X has shape {shape} and type {kind}; it must be [32, 32, 3, images] uint8."
        )
    with explain_faults(path, wanted):
        content = loadmat(path, variable_names=["X", "y"])
    # A view: the file's order of axes is changed while it is written, not in memory.
    images: Images = content["X"].transpose(3, 0, 1, 2)
    return images, check_labels(content["y"], allowed_labels, path, len(images))


_USPS_SIDE = 16


def read_usps(path: Path) -> Part:
    """Read labels 1 to 10 for the digits 0 to 9 and pixels from -1 to 1, in LIBSVM format."""
    from sklearn.datasets import load_svmlight_file

    wanted = f"a whole LIBSVM text file with {_USPS_SIDE**2} pixels per line, bzip2 compressed"
    with explain_faults(path, wanted):
        pixels, labels = load_svmlight_file(path, n_features=_USPS_SIDE**2, zero_based=False)
    if not pixels.shape[0]:
        raise InvalidInput(f"{path} has no images; it must have at least one.")
    dense = pixels.toarray()
    # Written so that NaN fails too. Decimal fractions may lie slightly outside.
    if not (dense.min() >= -1 - 1e-6 and dense.max() <= 1 + 1e-6):
        raise InvalidInput(
            f"{path} has pixels from {dense.min():g} to {dense.max():g}; they must be from -1 to 1."
        )
    images = numpy.clip(numpy.rint((dense + 1) / 2 * 255), 0, 255).astype(numpy.uint8)
    checked = check_labels(labels, range(1, 11), path, len(images)) - 1
    return images.reshape(-1, _USPS_SIDE, _USPS_SIDE), checked
