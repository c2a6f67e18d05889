"""Photos and drawings as published: CIFAR-10, CIFAR-100, Office-Caltech and DomainNet."""

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy

from mpfedcl.core.errors import InvalidInput, enumerate_names
from mpfedcl.core.images import resize_images
from mpfedcl.data.image_files import is_image_file, read_image_files
from mpfedcl.data.public.archives import (
    DomainArrays,
    DomainFolders,
    OriginalsFolder,
    Part,
    check_labels,
    find_files,
    list_folders,
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


OFFICE_CLASSES = {
    "backpack": ("back_pack",),
    # Of Caltech's two bicycles the touring bike is the one in Office-Caltech.
    "bike": ("touring_bike",),
    "calculator": (),
    "headphones": ("headphone", "head_phones"),
    "keyboard": ("computer_keyboard",),
    "laptop_computer": ("laptop",),
    "monitor": ("computer_monitor",),
    "mouse": ("computer_mouse",),
    "mug": ("coffee_mug",),
    "projector": ("video_projector",),
}
"""The classes, and what else their folders are called."""

OFFICE_FOLDERS = {
    "amazon": ("amazon",),
    "caltech": ("caltech", "caltech10", "caltech256", "caltech-256", "256_objectcategories"),
    "dslr": ("dslr",),
    "webcam": ("webcam",),
}
CALTECH_ARCHIVE = "256_ObjectCategories.tar"

_NUMBER = re.compile(r"^\d+\.")
_CALTECH_101 = re.compile(r"_101$")


def find_office_images(source: OriginalsFolder, domain: str) -> DomainFolders | None:
    """Find the images of a domain; None without its folder."""
    archive = source.find_file(CALTECH_ARCHIVE) if domain == "caltech" else None
    found = source.find_folder(
        OFFICE_FOLDERS[domain],
        _holds_office_classes,
        archive,
        lambda path: name_class(path.parent.name) is not None,
    )
    if found is None:
        if archive is None:
            return None
        raise InvalidInput(f"{archive} must hold class folders such as 003.backpack.")
    folder = _class_folders_of(found)
    classes: dict[str, list[Path]] = {}
    for inner in list_folders(folder):
        name = name_class(inner.name)
        if name is None:
            continue
        if name in classes:
            raise InvalidInput(
                f"{folder} has more than one folder for {name}, {inner.name} among them; it must "
                "have one."
            )
        classes[name] = sorted(path for path in inner.iterdir() if is_image_file(path))
    lacking = [name for name in OFFICE_CLASSES if not classes.get(name)]
    if lacking:
        raise InvalidInput(
            f"{folder} has no images of {', '.join(lacking)}; it must have some of each "
            "of the ten classes."
        )
    # Decoded once and thrown away: a broken file should be named now, not by the first run.
    read_image_files([path for paths in classes.values() for path in paths], image_size=8)
    return DomainFolders({name: classes[name] for name in OFFICE_CLASSES})


def name_class(folder: str) -> str | None:
    """Return the class of a folder such as back_pack, 003.backpack or 127.laptop-101."""
    plain = _NUMBER.sub("", folder.lower()).replace("-", "_").replace(" ", "_")
    plain = _CALTECH_101.sub("", plain)
    for name, others in OFFICE_CLASSES.items():
        if plain == name or plain in others:
            return name
    return None


def _class_folders_of(folder: Path) -> Path:
    """Return the folder with the class folders; Office-31 has amazon/images/back_pack."""
    return folder / "images" if (folder / "images").is_dir() else folder


def _holds_office_classes(folder: Path) -> bool:
    return any(
        name_class(inner.name) is not None for inner in list_folders(_class_folders_of(folder))
    )


DOMAINNET_DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
DOMAINNET_CLASSES = find_specification("domainnet").class_names
_DOMAINNET_SIDE = 64
"""The encoder's input. Image folders have no place for a split, so that arrays are written, and
those in the originals' size would take gigabytes."""


def read_domainnet_domain(source: OriginalsFolder, domain: str) -> DomainArrays | None:
    """Read the ten classes of a domain; None without its images and its split."""
    archive = source.find_file(f"{domain}.zip")
    splits = find_files(source, [f"{domain}_train.txt", f"{domain}_test.txt"])
    if splits is None:
        if archive is None and source.find_folder([domain], _holds_domainnet_classes) is None:
            return None
        raise InvalidInput(
            f"{source.root} has images of {domain} but lacks {domain}_train.txt and "
            f"{domain}_test.txt; the official split must be there."
        )
    # Three files in a hundred are wanted, so that no more is written.
    folder = source.find_folder(
        [domain],
        _holds_domainnet_classes,
        archive,
        lambda path: path.parent.name in DOMAINNET_CLASSES,
    )
    if folder is None:
        raise InvalidInput(
            f"{source.root} has {splits[0].name} but lacks {domain}.zip, or a folder {domain}, "
            "with images of the ten classes; they must be there."
        )
    train, test = (_read_split(path, domain, folder) for path in splits)
    # Each file is decoded once, should a list have it twice.
    positions = {path: number for number, path in enumerate(dict.fromkeys([*train, *test]))}
    size = (_DOMAINNET_SIDE, _DOMAINNET_SIDE)
    decoded = resize_images(read_image_files(list(positions), size[0]), size, is_color=True)

    def select(paths: list[Path]) -> Part:
        labels = [DOMAINNET_CLASSES.index(path.parent.name) for path in paths]
        return decoded[[positions[path] for path in paths]], numpy.array(labels, dtype=numpy.int64)

    return to_arrays(select(train), select(test))


def _holds_domainnet_classes(folder: Path) -> bool:
    return any((folder / name).is_dir() for name in DOMAINNET_CLASSES)


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
