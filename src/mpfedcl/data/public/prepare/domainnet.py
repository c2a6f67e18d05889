"""DomainNet: zip archives or folders of images, and text files with the official split."""

from pathlib import Path, PurePosixPath

import numpy

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.images import Images, resize_images
from mpfedcl.data.image_files import read_image_files
from mpfedcl.data.public.prepare.originals_folder import (
    OriginalsFolder,
    enumerate_names,
    find_train_and_test,
)
from mpfedcl.data.samples import DomainImages
from mpfedcl.data.train_test_split import Indices
from mpfedcl.experiment.datasets import find_specification

DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
CLASSES = find_specification("domainnet").class_names
SIDE = 64
"""The encoder's input. Image folders have no place for a split, so that arrays are written, and
those in the originals' size would take gigabytes."""


def read_domainnet_domain(source: OriginalsFolder, domain: str) -> DomainImages | None:
    """Read the ten classes of a domain; None without its images and its split."""
    folder = source.find_folder([domain], _holds_classes)
    archive = source.find_file(f"{domain}.zip")
    splits = find_train_and_test(source, [f"{domain}_train.txt", f"{domain}_test.txt"])
    if splits is None:
        if folder is None and archive is None:
            return None
        raise InvalidInput(
            f"{source.root} has images of {domain} but lacks {domain}_train.txt and "
            f"{domain}_test.txt; the official split must be there."
        )
    if folder is None and archive is not None:
        # Three files in a hundred are wanted, so that no more is written.
        content = source.unpack_archive(archive, lambda path: path.parent.name in CLASSES)
        folder = content.find_folder([domain], _holds_classes)
    if folder is None:
        raise InvalidInput(
            f"{source.root} has {splits[0].name} but lacks {domain}.zip, or a folder {domain}, "
            "with images of the ten classes; they must be there."
        )
    train, test = (_read_split(path, domain, folder) for path in splits)
    # Each file is decoded once, should a list have it twice.
    positions = {path: number for number, path in enumerate(dict.fromkeys([*train, *test]))}
    decoded = resize_images(read_image_files(list(positions), SIDE), (SIDE, SIDE), is_color=True)
    images: Images = decoded[[positions[path] for path in (*train, *test)]]
    ends = len(train)
    return DomainImages(domain, images[:ends], _number(train), images[ends:], _number(test))


def _holds_classes(folder: Path) -> bool:
    return any((folder / name).is_dir() for name in CLASSES)


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
            if parts[1] in CLASSES:
                paths.append(folder.joinpath(*parts[1:]))
    held = {image.parent.name for image in paths}
    lacking = [name for name in CLASSES if name not in held]
    if lacking:
        raise InvalidInput(f"{path} lists no images of {', '.join(lacking)}; it must list some.")
    missing = [str(image) for image in paths if not image.is_file()]
    if missing:
        raise InvalidInput(
            f"{path} lists {len(missing):,} images that are not there "
            f"({enumerate_names(missing, 3)}); all of them must be."
        )
    return paths


def _number(paths: list[Path]) -> Indices:
    return numpy.array([CLASSES.index(path.parent.name) for path in paths], dtype=numpy.int64)
