"""FEMNIST as LEAF's scripts write it: JSON files of writers with their 28 x 28 characters.

    {"users": ["f0000_14", ...], "num_samples": [...],
     "user_data": {"f0000_14": {"x": [[784 numbers from 0 to 1], ...], "y": [0 to 61, ...]}, ...}}

Either the folders `train` and `test`, as `preprocess.sh -t sample` splits each writer's samples, or
the folder `all_data` without a split.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.images import Images
from mpfedcl.data.public.prepare.originals_folder import OriginalsFolder, check_labels
from mpfedcl.data.samples import DomainImages
from mpfedcl.data.train_test_split import Indices

NUM_CLASSES = 62
LOOKED_FOR = (
    "the folders train and test with *.json as LEAF's data/femnist/preprocess.sh -t sample writes "
    "them, or the folder all_data"
)
_SIDE = 28
_SLACK = 1e-6
"""What a decimal fraction in a text file may lie beyond the range."""

_Samples = dict[str, tuple[Images, Indices]]
"""Images and labels by writer."""


def read_femnist(source: OriginalsFolder) -> DomainImages | None:
    """Read the writers' samples; None without the folders."""
    train, test, whole = (
        source.find_folder([name], _holds_json) for name in ("train", "test", "all_data")
    )
    if train is None and test is None:
        return None if whole is None else _join(_read_folder(whole), None, whole)
    if train is None or test is None:
        lacking = "train" if train is None else "test"
        raise InvalidInput(
            f"{source.root} has no folder {lacking} with *.json; both train and test must be there "
            "(LEAF's preprocess.sh -t sample writes them)."
        )
    return _join(_read_folder(train), _read_folder(test), test)


def _holds_json(folder: Path) -> bool:
    return any(folder.glob("*.json"))


def _join(train: _Samples, test: _Samples | None, where: Path) -> DomainImages:
    """Return all writers' samples one after the other, in order of name."""
    strange = sorted(set(test or ()) - set(train))
    if strange:
        raise InvalidInput(
            f"{where} has the writer {strange[0]!r}, who has nothing to train on; each "
            "writer's own samples must be split (LEAF's preprocess.sh -t sample, not -t user)."
        )
    images, labels, clients = _flatten(train)
    domain = DomainImages("femnist", images, labels, train_clients=clients)
    if not test:
        return domain
    images, labels, clients = _flatten(test)
    return replace(domain, test_images=images, test_labels=labels, test_clients=clients)


def _flatten(samples: _Samples) -> tuple[Images, Indices, Any]:
    names = sorted(samples)
    images, labels = zip(*(samples[name] for name in names), strict=True)
    counts = [len(each) for each in labels]
    return (
        numpy.concatenate(images),
        numpy.concatenate(labels),
        numpy.repeat(numpy.array(names), counts),
    )


def _read_folder(folder: Path) -> _Samples:
    found: _Samples = {}
    # One file after the other: as numbers of Python a file takes several times its own size.
    for path in sorted(folder.glob("*.json")):
        for name, samples in _read_file(path).items():
            if name in found:
                raise InvalidInput(
                    f"{path} has the writer {name!r} again; each must be in one file of {folder}."
                )
            found[name] = samples
    if not found:
        raise InvalidInput(f"{folder} has no writers; its *.json must have at least one.")
    return found


def _read_file(path: Path) -> _Samples:
    try:
        content = json.loads(path.read_bytes())
        users = content["users"]
        data = {str(name): content["user_data"][name] for name in users}
        parts = {name: (each["x"], each["y"]) for name, each in data.items()}
    except (ValueError, KeyError, TypeError, RecursionError, MemoryError) as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise InvalidInput(
            f"{path} cannot be read ({reason}); it must be a whole file of LEAF with users and "
            "user_data, x and y of each."
        ) from None
    # A writer without samples is no client.
    return {name: _read_writer(path, name, *each) for name, each in parts.items() if each[1]}


def _read_writer(path: Path, name: str, x: Any, y: Any) -> tuple[Images, Indices]:
    try:
        pixels = numpy.asarray(x, dtype=numpy.float64)
        labels = numpy.asarray(y)
    except (ValueError, TypeError, OverflowError):
        pixels, labels = numpy.empty(0), numpy.empty(0)
    if pixels.ndim != 2 or pixels.shape[1] != _SIDE**2:
        raise InvalidInput(
            f"{path}: x of the writer {name!r} has shape {pixels.shape}; it must be "
            f"[images, {_SIDE**2}] numbers."
        )
    # Written so that not-a-number fails too.
    if not (pixels.min() >= -_SLACK and pixels.max() <= 1 + _SLACK):
        raise InvalidInput(
            f"{path}: x of the writer {name!r} has pixels from {pixels.min():g} to "
            f"{pixels.max():g}; they must be from 0 to 1."
        )
    images = numpy.clip(numpy.rint(pixels * 255), 0, 255).astype(numpy.uint8)
    checked = check_labels(labels, range(NUM_CLASSES), path, len(images))
    return images.reshape(-1, _SIDE, _SIDE), checked
