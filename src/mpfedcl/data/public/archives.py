"""The folder with a publisher's files: search it, and unpack its archives without trust.

Names in archives are checked and sizes are bounded.
"""

import os
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
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
"""A domain kept as an archive: its arrays by name, as `npz_archive` reads them."""


@dataclass(frozen=True)
class DomainFolders:
    """A domain kept as image files: the files of each class."""

    classes: Mapping[str, Sequence[Path]]


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
    free = shutil.disk_usage(folder.parent).free
    budget, count = min(MOST_BYTES_UNPACKED, free), 0
    with explain_faults(archive, "a whole zip or tar archive"), _open_members(archive) as members:
        for name, size, content in members:
            path = _check_name(archive, name)
            if not is_wanted(path):
                continue
            budget, count = budget - size, count + 1
            if budget < 0 or count > MOST_FILES_UNPACKED:
                raise InvalidInput(
                    f"{archive} declares more than {MOST_FILES_UNPACKED:,} files, "
                    f"{MOST_BYTES_UNPACKED:,} bytes or the {free:,} free bytes of "
                    f"{folder.parent}; it must unpack to less."
                )
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with content() as source, target.open("wb") as file:
                shutil.copyfileobj(source, file)
            if target.stat().st_size != size:
                raise InvalidInput(
                    f"{archive} holds {name!r} in another size than the {size:,} bytes it "
                    "declares; it must be a whole archive."
                )
    return folder


def _check_name(archive: Path, name: str) -> PurePosixPath:
    """Return the path of a member; reject an archive that reaches out of its folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or ":" in name:
        raise InvalidInput(
            f"{archive} holds {name!r}, which leads out of the folder it is unpacked to; all names "
            "in it must be relative and without '..'."
        )
    return path


@contextmanager
def _open_members(archive: Path) -> Iterator[Iterator[tuple[str, int, Callable[[], Any]]]]:
    """Give name, declared size and a way to open each regular file.

    Links could point anywhere, and no original has them.
    """
    if archive.suffix.lower() == ".zip":
        with zipfile.ZipFile(archive) as opened:
            yield (
                (member.filename, member.file_size, partial(opened.open, member))
                for member in opened.infolist()
                if not member.is_dir()
                and stat.S_IFMT(member.external_attr >> 16) in (0, stat.S_IFREG)
            )
    else:
        with tarfile.open(archive, "r:*") as tar:
            yield (
                (member.name, member.size, partial(tar.extractfile, member))
                for member in tar
                if member.isfile() and not member.issparse()
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

    def find_folder(
        self,
        names: Sequence[str],
        holds: Callable[[Path], bool],
        archive: Path | None = None,
        is_wanted: MemberFilter = lambda _: True,
    ) -> Path | None:
        """Return the highest folder that has one of the names, in any case, and the content.

        Without one, the archive is unpacked, if there is any.
        """
        named = [folder for folder in self.folders if folder.name.lower() in names]
        found = _choose_highest([folder for folder in named if holds(folder)])
        if found is not None or archive is None:
            return found
        return self.unpack(archive, is_wanted).find_folder(names, holds)

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
    """Return files that belong together, in order; None if none of them is there."""
    found = {name: source.find_file(*_spell(name)) for name in names}
    there = [path for path in found.values() if path is not None]
    lacking = [name for name, path in found.items() if path is None]
    if there and lacking:
        raise InvalidInput(
            f"{source.root} has {there[0].name} but lacks {', '.join(lacking)}; all of them must "
            "be there."
        )
    return there or None


def _spell(name: str) -> list[str]:
    if "-idx" not in name:
        return [name]
    # Copies of MNIST may be unpacked, and some spell train-images.idx3-ubyte.
    dotted = name.replace("-idx", ".idx")
    return [name, f"{name}.gz", dotted, f"{dotted}.gz"]


def find_or_unpack(
    source: OriginalsFolder,
    names: Sequence[str],
    archives: Sequence[str],
    wanted: MemberFilter | None = None,
) -> list[Path] | None:
    """Return files that belong together; unpack them from an archive if they are not there."""
    paths, archive = find_files(source, names), source.find_file(*archives)
    if paths is None and archive is not None:
        content = source.unpack(archive, wanted or (lambda path: path.name in names))
        paths = find_files(content, names)
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
