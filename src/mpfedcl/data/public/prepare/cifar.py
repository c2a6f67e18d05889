"""CIFAR-10 and CIFAR-100 as published in their binary versions: records of labels and pixels."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.images import Images
from mpfedcl.data.public.prepare.originals_folder import OriginalsFolder, check_labels
from mpfedcl.data.samples import DomainImages
from mpfedcl.data.train_test_split import Indices

_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE
_MOST_BYTES = 2**30


@dataclass(frozen=True)
class CifarFiles:
    """The files of one of the two sets, and the labels at the beginning of each record."""

    name: str
    train: tuple[str, ...]
    test: str
    archive: str
    labels: tuple[tuple[str, int], ...]
    """What each label is, and how many there are; the last one is the class."""

    @property
    def looked_for(self) -> str:
        """What a person must bring."""
        return f"{', '.join((*self.train, self.test))}, or {self.archive}"


CIFAR_10 = CifarFiles(
    "cifar10",
    tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    "test_batch.bin",
    "cifar-10-binary.tar.gz",
    (("class", 10),),
)
CIFAR_100 = CifarFiles(
    "cifar100",
    ("train.bin",),
    "test.bin",
    "cifar-100-binary.tar.gz",
    (("superclass", 20), ("class", 100)),
)


def read_cifar(source: OriginalsFolder, files: CifarFiles) -> DomainImages | None:
    """Read a set from its files or its archive; None without them."""
    names = (*files.train, files.test)
    paths, archive = _find(source, names), source.find_file(files.archive)
    if paths is None and archive is not None:
        paths = _find(source.unpack_archive(archive, lambda path: path.name in names), names)
        if paths is None:
            raise InvalidInput(f"{archive} must hold {', '.join(names)}.")
    if paths is None:
        return None
    parts = [_read_records(path, files.labels) for path in paths]
    *train, test = parts
    images, labels = (numpy.concatenate(each) for each in zip(*train, strict=True))
    return DomainImages(files.name, images, labels, *test)


def _find(source: OriginalsFolder, names: Sequence[str]) -> list[Path] | None:
    """Return all files in order, None if none is there; some are not enough."""
    found = {name: path for name in names if (path := source.find_file(name)) is not None}
    lacking = [name for name in names if name not in found]
    if found and lacking:
        raise InvalidInput(
            f"{source.root} has {next(iter(found))} but lacks {', '.join(lacking)}; all must be "
            "there."
        )
    return list(found.values()) or None


def _read_records(path: Path, kinds: Sequence[tuple[str, int]]) -> tuple[Images, Indices]:
    """Read records of label bytes and 32 x 32 red, green and blue planes."""
    size, length = path.stat().st_size, len(kinds) + _PIXELS
    if size == 0 or size % length or size > _MOST_BYTES:
        raise InvalidInput(
            f"{path} has {size:,} bytes; it must be whole records of {length:,} bytes, one or more "
            f"and at most {_MOST_BYTES:,} bytes in all."
        )
    records = numpy.fromfile(path, numpy.uint8).reshape(-1, length)
    for column, (_, count) in enumerate(kinds):
        # Superclasses are not kept; one beyond its range shows that the file is another.
        labels = check_labels(records[:, column], range(count), path, len(records))
    planes = records[:, len(kinds) :].reshape(-1, 3, _SIDE, _SIDE)
    return numpy.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels
