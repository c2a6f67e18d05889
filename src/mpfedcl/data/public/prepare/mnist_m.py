"""MNIST-M as published: folders of images and text files that name the label of each."""

from pathlib import Path

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.images import Images, resize_images
from mpfedcl.data.image_files import read_image_files
from mpfedcl.data.public.prepare.originals_folder import (
    OriginalsFolder,
    check_labels,
    enumerate_names,
    find_or_unpack,
)
from mpfedcl.data.samples import DomainImages
from mpfedcl.data.train_test_split import Indices

LABEL_FILES = ("mnist_m_train_labels.txt", "mnist_m_test_labels.txt")
ARCHIVES = ("mnist_m.tar.gz", "mnist_m.tar", "mnist_m.zip")

_LONGEST_LABEL_FILE = 2**26


def read_mnist_m(source: OriginalsFolder) -> DomainImages | None:
    """Read MNIST-M from its folder or its archive; None without them."""
    paths = find_or_unpack(
        source,
        LABEL_FILES,
        ARCHIVES,
        lambda path: path.name in LABEL_FILES or path.suffix.lower() == ".png",
    )
    if paths is None:
        return None
    return DomainImages("mnist_m", *_read_part(paths[0]), *_read_part(paths[1]))


def _read_part(label_file: Path) -> tuple[Images, Indices]:
    """Read the images that a label file names from the folder beside it."""
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
