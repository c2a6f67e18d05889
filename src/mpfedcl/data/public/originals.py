"""The folder with a publisher's files: search it, and unpack its archives without trust.

Names in archives are checked and sizes are bounded.
"""

import os
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import numpy

from mpfedcl.core.errors import InvalidInput, explain_faults
from mpfedcl.core.images import Images
from mpfedcl.data.samples import Indices

Part = tuple[Images, Indices]
"""The training or the test samples of a domain: images and labels."""

DomainArrays = dict[str, Any]
"""The arrays of a domain by name, as `npz_archive` reads them."""


def to_arrays(train: Part, test: Part) -> DomainArrays:
    """Return the arrays of a domain with an official split."""
    parts = {"train": train, "test": test}
    return {
        **{f"x_{part}": images for part, (images, _) in parts.items()},
        **{f"y_{part}": labels.astype(numpy.uint8) for part, (_, labels) in parts.items()},
    }


MOST_BYTES_UNPACKED = 16 * 2**30
MOST_FILES_UNPACKED = 1_000_000

MemberFilter = Callable[[PurePosixPath], bool]
"""Returns whether a file is needed, by its path inside the archive."""


def unpack_archive(archive: Path, folder: Path, is_wanted: MemberFilter) -> Path:
    """Write the wanted files of a zip or tar archive below a folder, and return the folder."""
    with explain_faults(archive, "a whole zip or tar archive without names that lead out of it"):
        if archive.suffix.lower() == ".zip":
            with zipfile.ZipFile(archive) as opened:
                # zipfile writes links as plain files, and no more than a member declares.
                members = [
                    each
                    for each in opened.infolist()
                    if not each.is_dir() and is_wanted(PurePosixPath(each.filename))
                ]
                _check_room(archive, folder, [each.file_size for each in members])
                opened.extractall(folder, members)
        else:
            with tarfile.open(archive, "r:*") as tar:
                # Links could point anywhere, and no original has them.
                files = []
                for number, each in enumerate(tar, start=1):
                    # Counted here, because a list of all entries could fill the memory.
                    if number > MOST_FILES_UNPACKED:
                        raise InvalidInput(
                            f"{archive} has too many entries; it must unpack to at most "
                            f"{MOST_FILES_UNPACKED:,} files."
                        )
                    if each.isfile() and is_wanted(PurePosixPath(each.name)):
                        files.append(each)
                _check_room(archive, folder, [each.size for each in files])
                tar.extractall(folder, files, filter="data")
    return folder


def _check_room(archive: Path, folder: Path, sizes: Sequence[int]) -> None:
    """Reject an archive that would fill the disk."""
    most = min(MOST_BYTES_UNPACKED, shutil.disk_usage(folder.parent).free)
    if sum(sizes) > most or len(sizes) > MOST_FILES_UNPACKED:
        raise InvalidInput(
            f"{archive} declares {len(sizes):,} files of {sum(sizes):,} bytes; it must unpack to "
            f"at most {MOST_FILES_UNPACKED:,} files and {most:,} bytes below {folder.parent}."
        )


_DEPTH = 2
"""Depth of the search for originals: DIR/MNIST/raw/, DIR/mnist_m/mnist_m/."""


@dataclass(frozen=True)
class OriginalsFolder:
    """The originals that a user has, and a scratch folder for what their archives hold."""

    root: Path
    scratch: Path

    @cached_property
    def folders(self) -> list[Path]:
        """The root, the folders in it, and the folders in those."""
        levels = [[self.root]]
        for _ in range(_DEPTH):
            levels.append([inner for folder in levels[-1] for inner in list_folders(folder)])
        return list(chain.from_iterable(levels))

    def find_file(self, *names: str) -> Path | None:
        """Return the highest file that has one of the names, the first of them if several."""
        there = [[f / name for name in names if (f / name).is_file()] for f in self.folders]
        return _choose_highest([paths[0] for paths in there if paths])

    def unpack(self, archive: Path, is_wanted: MemberFilter) -> "OriginalsFolder":
        """Return the content of an archive as a source of its own."""
        folder = self.scratch / archive.name
        folder.mkdir(parents=True, exist_ok=True)
        return OriginalsFolder(unpack_archive(archive, folder, is_wanted), self.scratch)


def _choose_highest(found: list[Path]) -> Path | None:
    depth = min((len(path.parts) for path in found), default=0)
    highest = [path for path in found if len(path.parts) == depth]
    if len(highest) > 1:
        raise InvalidInput(
            f"{highest[0]} and {highest[1]} could both be meant; source must hold one of them, or "
            "be the folder of one."
        )
    return highest[0] if highest else None


def list_folders(folder: Path) -> list[Path]:
    """Return the folders in a folder in order of name, without hidden ones."""
    # Not Path.is_dir, which would ask the disk about each of 60,000 images.
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_dir()]
    return [folder / name for name in sorted(names) if not name.startswith(".")]


def find_files(source: OriginalsFolder, names: Sequence[str]) -> list[Path] | None:
    """Return files that belong together, plain or as .gz; None if none of them is there."""
    found = {name: source.find_file(name, f"{name}.gz") for name in names}
    there = [path for path in found.values() if path is not None]
    lacking = [name for name, path in found.items() if path is None]
    if there and lacking:
        raise InvalidInput(
            f"{source.root} has {there[0].name} but lacks {', '.join(lacking)}; all of them must "
            "be there."
        )
    return there or None


def find_or_unpack(
    source: OriginalsFolder, names: Sequence[str], archive_name: str, wanted: MemberFilter
) -> list[Path] | None:
    """Return files that belong together; unpack them from an archive if they are not there."""
    paths, archive = find_files(source, names), source.find_file(archive_name)
    if paths is None and archive is not None:
        paths = find_files(source.unpack(archive, wanted), names)
        if paths is None:
            raise InvalidInput(f"{archive} must hold {', '.join(names)}.")
    return paths


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
