"""Photos and drawings as published: CIFAR-10, CIFAR-100 and DomainNet."""

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy

from mpfedcl.core.errors import InvalidInput, enumerate_names
from mpfedcl.core.images import resize_images
from mpfedcl.data.image_files import read_image_files
from mpfedcl.data.public.originals import (
    DomainArrays,
    OriginalsFolder,
    Part,
    check_labels,
    find_files,
    to_arrays,
)
from mpfedcl.experiment.datasets import find_specification

CIFAR_10_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
CIFAR_100_FILES = ("train.bin", "test.bin")
_CIFAR_SIDE = 32
_MOST_CIFAR_BYTES = 2**30


def read_cifar(paths: list[Path], num_labels: Sequence[int]) -> list[Part]:
    """Read files of which the last is the test set; `num_labels` are the values of each label."""
    *train, test = (_read_records(path, num_labels) for path in paths)
    images, labels = (numpy.concatenate(each) for each in zip(*train, strict=True))
    return [(images, labels), test]


def _read_records(path: Path, num_labels: Sequence[int]) -> Part:
    """Read records of label bytes, the last being the class, and 32 x 32 planes of RGB."""
    size, length = path.stat().st_size, len(num_labels) + 3 * _CIFAR_SIDE**2
    if size == 0 or size % length or size > _MOST_CIFAR_BYTES:
        raise InvalidInput(
            f"{path} has {size:,} bytes; it must be whole records of {length:,} bytes, one or more "
            f"and at most {_MOST_CIFAR_BYTES:,} bytes in all."
        )
    records = numpy.fromfile(path, numpy.uint8).reshape(-1, length)
    for column, count in enumerate(num_labels):
        # Superclasses are not kept; one beyond its range shows that the file is another.
        labels = check_labels(records[:, column], range(count), path, len(records))
    planes = records[:, len(num_labels) :].reshape(-1, 3, _CIFAR_SIDE, _CIFAR_SIDE)
    return numpy.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels


DOMAINNET_DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
DOMAINNET_CLASSES = find_specification("domainnet").class_names
_DOMAINNET_SIDE = 64
"""The encoder's input; images in the originals' size would take gigabytes."""


def read_domainnet_domain(source: OriginalsFolder, domain: str) -> DomainArrays | None:
    """Read the ten classes of a domain; None without its images and its split."""
    splits = find_files(source, [f"{domain}_train.txt", f"{domain}_test.txt"])
    archive = source.find_file(f"{domain}.zip")
    if splits is None or archive is None:
        return None
    # Three files in a hundred are wanted, so that no more is written.
    content = source.unpack(archive, lambda path: path.parent.name in DOMAINNET_CLASSES)
    folder = content.root / domain
    train, test = (_read_split(path, domain, folder) for path in splits)
    # Each file is decoded once, should a list have it twice.
    positions = {path: number for number, path in enumerate(dict.fromkeys([*train, *test]))}
    size = (_DOMAINNET_SIDE, _DOMAINNET_SIDE)
    decoded = resize_images(read_image_files(list(positions), size[0]), size, is_color=True)

    def select(paths: list[Path]) -> Part:
        labels = [DOMAINNET_CLASSES.index(path.parent.name) for path in paths]
        return decoded[[positions[path] for path in paths]], numpy.array(labels, dtype=numpy.int64)

    return to_arrays(select(train), select(test))


def _read_split(path: Path, domain: str, folder: Path) -> list[Path]:
    """Return the images of the ten classes that a split file lists, in its order."""
    paths = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            name, _, label = line.strip().rpartition(" ")
            parts = PurePosixPath(name).parts
            # Three plain names, so that no list can make the program read files elsewhere.
            is_plain = len(parts) == 3 and parts[0] == domain and ".." not in parts
            if not is_plain or not label.isdecimal():
                raise InvalidInput(
                    f"{path} has {line.strip()[:80]!r} in line {number}; each line must be "
                    f"{domain}/<class>/<file> and a number."
                )
            if parts[1] in DOMAINNET_CLASSES:
                paths.append(folder.joinpath(*parts[1:]))
    held = {image.parent.name for image in paths}
    lacking = [name for name in DOMAINNET_CLASSES if name not in held]
    if lacking:
        raise InvalidInput(f"{path} lists no images of {', '.join(lacking)}; it must list some.")
    missing = [str(image) for image in paths if not image.is_file()]
    if missing:
        raise InvalidInput(
            f"{path} lists {len(missing):,} images that are not there "
            f"({enumerate_names(missing, 3)}); all of them must be."
        )
    return paths
