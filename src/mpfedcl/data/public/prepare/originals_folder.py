"""The folder with the originals: where a file of a known name lies in it, and its labels."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.public.prepare.archives import MemberFilter, unpack_archive
from mpfedcl.data.train_test_split import Indices

DEPTH = 2
"""How many folders down the originals are looked for: DIR/MNIST/raw/, DIR/mnist_m/mnist_m/."""


@dataclass(frozen=True)
class OriginalsFolder:
    """The originals that a user has, and a scratch folder for what their archives hold."""

    root: Path
    scratch: Path
    levels: tuple[tuple[Path, ...], ...]
    """The root, the folders in it, and the folders in those."""

    @classmethod
    def open(cls, root: Path, scratch: Path) -> "OriginalsFolder":
        """List the folders of a source."""
        levels: list[tuple[Path, ...]] = [(root,)]
        for _ in range(DEPTH):
            levels.append(tuple(inner for folder in levels[-1] for inner in list_folders(folder)))
        return cls(root, scratch, tuple(levels))

    def find_file(self, *names: str) -> Path | None:
        """Return the file that has one of the names: the highest place, then the first name."""
        for folders in self.levels:
            for name in names:
                found = [folder / name for folder in folders if (folder / name).is_file()]
                if found:
                    return _single(found)
        return None

    def find_folder(self, names: Sequence[str], holds: Callable[[Path], bool]) -> Path | None:
        """Return the highest folder that has one of the names, in any case, and the content."""
        for folders in self.levels:
            found = [folder for folder in folders if folder.name.lower() in names and holds(folder)]
            if found:
                return _single(found)
        return None

    def unpack_archive(self, archive: Path, wanted: MemberFilter) -> "OriginalsFolder":
        """Return the content of an archive as a source of its own."""
        folder = self.scratch / archive.name
        folder.mkdir(parents=True, exist_ok=True)
        return OriginalsFolder.open(unpack_archive(archive, folder, wanted), self.scratch)


def _single(found: list[Path]) -> Path:
    if len(found) > 1:
        raise InvalidInput(
            f"{found[0]} and {found[1]} could both be meant; source must hold one of them, or be "
            "the folder of one."
        )
    return found[0]


def list_folders(folder: Path) -> list[Path]:
    """Return the folders in a folder in order of name, without hidden ones."""
    # Not Path.is_dir, which would ask the disk about each of 60,000 images.
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_dir()]
    return [folder / name for name in sorted(names) if not name.startswith(".")]


def find_train_and_test(source: OriginalsFolder, names: Sequence[str]) -> list[Path] | None:
    """Return the training and the test file, None if neither is there; one is not enough."""
    found = {name: path for name in names if (path := source.find_file(name)) is not None}
    if len(found) == 1:
        (lacking,) = [name for name in names if name not in found]
        raise InvalidInput(
            f"{source.root} has {next(iter(found))} but lacks {lacking}; both must be there."
        )
    return list(found.values()) or None


def find_or_unpack(
    source: OriginalsFolder, names: Sequence[str], archives: Sequence[str], wanted: MemberFilter
) -> list[Path] | None:
    """Return the training and the test file, taken from an archive where they are not there."""
    paths, archive = find_train_and_test(source, names), source.find_file(*archives)
    if paths is None and archive is not None:
        paths = find_train_and_test(source.unpack_archive(archive, wanted), names)
        if paths is None:
            raise InvalidInput(f"{archive} must hold {' and '.join(names)}.")
    return paths


def enumerate_names(names: Iterable[str], most: int = 5) -> str:
    """Return names with commas, at most so many."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def check_labels(
    labels: Any, allowed: range, path: Path, num_images: int, images: Path | None = None
) -> Indices:
    """Return labels as integers; there must be one an image, and each in the allowed range."""
    numbers = numpy.asarray(labels).reshape(-1)
    whole = numbers.astype(numpy.int64) if numbers.dtype.kind in "iuf" else None
    if whole is None or not numpy.array_equal(whole, numbers):
        raise InvalidInput(
            f"{path} has labels of type {numbers.dtype}; they must be whole numbers."
        )
    wrong = whole[(whole < allowed.start) | (whole >= allowed.stop)]
    if len(wrong):
        raise InvalidInput(
            f"{path} has the label {wrong[0]}; labels in it must be {allowed.start} to "
            f"{allowed.stop - 1}."
        )
    if len(whole) != num_images:
        raise InvalidInput(
            f"{images or path} has {num_images:,} images and {path.name} {len(whole):,} labels; "
            "they must be equally many."
        )
    return whole
