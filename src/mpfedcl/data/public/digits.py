"""Digits and characters as published: MNIST, MNIST-M, SVHN, SynthDigits, USPS and FEMNIST."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy

from mpfedcl.core.errors import InvalidInput, enumerate_names, explain_faults
from mpfedcl.core.images import Images, resize_images
from mpfedcl.data.image_files import read_image_files
from mpfedcl.data.public.originals import (
    DomainArrays,
    OriginalsFolder,
    check_labels,
    find_files,
    find_or_unpack,
    to_arrays,
    to_bytes,
)
from mpfedcl.data.samples import Indices

MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)

_UNSIGNED_BYTES = 8
_MOST_IDX_BYTES = 4 * 2**30


def read_mnist(source: OriginalsFolder) -> DomainArrays | None:
    """Read MNIST from its four files; None if none of them is there."""
    paths = find_files(source, MNIST_FILES, _spell_mnist)
    if paths is None:
        return None
    return to_arrays(_read_pair(*paths[:2]), _read_pair(*paths[2:]))


def _spell_mnist(name: str) -> list[str]:
    # Some copies spell train-images.idx3-ubyte.
    dotted = name.replace("-idx", ".idx")
    return [name, f"{name}.gz", dotted, f"{dotted}.gz"]


def _read_pair(images: Path, labels: Path) -> tuple[Images, Indices]:
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


MNIST_M_LABELS = ("mnist_m_train_labels.txt", "mnist_m_test_labels.txt")
MNIST_M_ARCHIVES = ("mnist_m.tar.gz", "mnist_m.tar", "mnist_m.zip")

_LONGEST_LABEL_FILE = 2**26


def read_mnist_m(source: OriginalsFolder) -> DomainArrays | None:
    """Read MNIST-M from its folder or its archive; None without them."""
    paths = find_or_unpack(
        source,
        MNIST_M_LABELS,
        MNIST_M_ARCHIVES,
        lambda path: path.name in MNIST_M_LABELS or path.suffix.lower() == ".png",
    )
    if paths is None:
        return None
    return to_arrays(_read_listed_images(paths[0]), _read_listed_images(paths[1]))


def _read_listed_images(label_file: Path) -> tuple[Images, Indices]:
    """Read the images that a label file lists from the folder next to it."""
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
        if not words:
            continue
        # A bare name, so that no list can make the program read files elsewhere.
        if len(words) != 2 or not words[1].isdecimal() or Path(words[0]).name != words[0]:
            raise InvalidInput(
                f"{path} has {line[:80]!r} in line {number}; each line must be an image's name "
                "and its label."
            )
        if words[0] in labels:
            raise InvalidInput(f"{path} names {words[0]} twice; each image must have one label.")
        labels[words[0]] = int(words[1])
    if not labels:
        raise InvalidInput(f"{path} is empty; it must name the images and their labels.")
    return labels


SVHN_FILES = ("train_32x32.mat", "test_32x32.mat")
SYNTH_FILES = ("synth_train_32x32.mat", "synth_test_32x32.mat")
SYNTH_ARCHIVE = "SynthDigits.zip"


def read_svhn(source: OriginalsFolder) -> DomainArrays | None:
    """Read the cropped digits of SVHN, in which label 10 is the digit 0; None without the files."""
    paths = find_files(source, SVHN_FILES)
    if paths is None:
        return None
    train, test = (_read_matlab(path, range(1, 11)) for path in paths)
    return to_arrays((train[0], train[1] % 10), (test[0], test[1] % 10))


def read_synth(source: OriginalsFolder) -> DomainArrays | None:
    """Read SynthDigits from its files or its zip archive; None without them."""
    paths = find_or_unpack(source, SYNTH_FILES, [SYNTH_ARCHIVE])
    if paths is None:
        return None
    return to_arrays(_read_matlab(paths[0], range(10)), _read_matlab(paths[1], range(10)))


def _read_matlab(path: Path, allowed_labels: range) -> tuple[Images, Indices]:
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


USPS_FILES = ("usps.bz2", "usps.t.bz2")

_USPS_SIDE = 16


def read_usps(source: OriginalsFolder) -> DomainArrays | None:
    """Read USPS from its LIBSVM files; None without them."""
    paths = find_files(source, USPS_FILES)
    if paths is None:
        return None
    return to_arrays(_read_libsvm(paths[0]), _read_libsvm(paths[1]))


def _read_libsvm(path: Path) -> tuple[Images, Indices]:
    """Read labels 1 to 10 for the digits 0 to 9 and pixels from -1 to 1."""
    from sklearn.datasets import load_svmlight_file

    wanted = f"a whole LIBSVM text file with {_USPS_SIDE**2} pixels per line, bzip2 compressed"
    with explain_faults(path, wanted):
        pixels, labels = load_svmlight_file(path, n_features=_USPS_SIDE**2, zero_based=False)
    if not pixels.shape[0]:
        raise InvalidInput(f"{path} has no images; it must have at least one.")
    images = to_bytes(pixels.toarray(), -1, 1, str(path)).reshape(-1, _USPS_SIDE, _USPS_SIDE)
    return images, check_labels(labels, range(1, 11), path, len(images)) - 1


NUM_CLASSES = 62
FEMNIST_FILES = (
    "the folders train and test with *.json as LEAF's data/femnist/preprocess.sh -t sample writes "
    "them, or the folder all_data"
)
_FEMNIST_SIDE = 28

_Samples = dict[str, tuple[Images, Indices]]
"""Images and labels by writer."""


def read_femnist(source: OriginalsFolder) -> DomainArrays | None:
    """Read the writers' samples; None without the folders."""
    train, test, whole = (
        source.find_folder([name], _holds_json) for name in ("train", "test", "all_data")
    )
    if train is None and test is None:
        return None if whole is None else _join_writers("train", _read_writers(whole))
    if train is None or test is None:
        lacking = "train" if train is None else "test"
        raise InvalidInput(
            f"{source.root} has no folder {lacking} with *.json; both train and test must be there "
            "(LEAF's preprocess.sh -t sample writes them)."
        )
    trained, tested = _read_writers(train), _read_writers(test)
    strange = sorted(tested.keys() - trained.keys())
    if strange:
        raise InvalidInput(
            f"{test} has the writer {strange[0]!r}, which has no training samples; each writer's "
            "own samples must be split (LEAF's preprocess.sh -t sample, not -t user)."
        )
    return _join_writers("train", trained) | _join_writers("test", tested)


def _holds_json(folder: Path) -> bool:
    return any(folder.glob("*.json"))


def _join_writers(part: str, samples: _Samples) -> DomainArrays:
    """Return all writers' samples one after the other, in order of name."""
    names = sorted(samples)
    images, labels = zip(*(samples[name] for name in names), strict=True)
    return {
        f"x_{part}": numpy.concatenate(images),
        f"y_{part}": numpy.concatenate(labels).astype(numpy.uint8),
        f"clients_{part}": numpy.repeat(numpy.array(names), [len(each) for each in labels]),
    }


def _read_writers(folder: Path) -> _Samples:
    found: _Samples = {}
    # One file after the other: as numbers of Python a file takes several times its own size.
    for path in sorted(folder.glob("*.json")):
        for name, samples in _read_leaf_file(path).items():
            if name in found:
                raise InvalidInput(
                    f"{path} has the writer {name!r} again; each must be in one file of {folder}."
                )
            found[name] = samples
    if not found:
        raise InvalidInput(f"{folder} has no writers; its *.json must have at least one.")
    return found


def _read_leaf_file(path: Path) -> _Samples:
    with explain_faults(path, "a whole file of LEAF with users and user_data, x and y of each"):
        content = json.loads(path.read_bytes())
        data = {str(name): content["user_data"][name] for name in content["users"]}
        parts = {name: (each["x"], each["y"]) for name, each in data.items()}
    # A writer without samples is no client.
    return {name: _read_writer(path, name, *each) for name, each in parts.items() if each[1]}


def _read_writer(path: Path, name: str, x: Any, y: Any) -> tuple[Images, Indices]:
    try:
        pixels = numpy.asarray(x, dtype=numpy.float64)
        labels = numpy.asarray(y)
    except (ValueError, TypeError, OverflowError):
        pixels, labels = numpy.empty(0), numpy.empty(0)
    if pixels.ndim != 2 or pixels.shape[1] != _FEMNIST_SIDE**2:
        raise InvalidInput(
            f"{path}: x of the writer {name!r} has shape {pixels.shape}; it must be "
            f"[images, {_FEMNIST_SIDE**2}] numbers."
        )
    images = to_bytes(pixels, 0, 1, f"{path}: x of the writer {name!r}")
    checked = check_labels(labels, range(NUM_CLASSES), path, len(images))
    return images.reshape(-1, _FEMNIST_SIDE, _FEMNIST_SIDE), checked
