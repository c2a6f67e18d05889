"""The folder with a publisher's files, and the prepared set that is written from them.

Archives are unpacked without trust: names are checked and sizes are bounded. A domain is written
completely or not at all.
"""

import gzip
import os
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy
from numpy.typing import NDArray

from mpfedcl.core.errors import InvalidInput, explain
from mpfedcl.core.files import lock_folder, sync_folder
from mpfedcl.core.images import Images
from mpfedcl.data.samples import Indices

MOST_BYTES_UNPACKED = 16 * 2**30
MOST_FILES_UNPACKED = 1_000_000

MemberFilter = Callable[[PurePosixPath], bool]
"""Returns whether a file is needed, by its path inside the archive."""


def unpack_archive(archive: Path, folder: Path, is_wanted: MemberFilter) -> Path:
    """Write the wanted files of a zip or tar archive below a folder, and return the folder."""
    free = shutil.disk_usage(folder.parent).free
    budget, count = min(MOST_BYTES_UNPACKED, free), 0
    with _explain_faults(archive), _open_members(archive) as members:
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


@contextmanager
def _explain_faults(archive: Path) -> Iterator[None]:
    try:
        yield
    except (InvalidInput, MemoryError):
        raise
    # Damaged, encrypted and unknown archives raise nearly anything.
    except Exception as error:
        # A disk that is full is no fault of the archive.
        if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
            raise
        raise InvalidInput(
            f"{archive} cannot be unpacked ({explain(error)}); it must be a whole zip or tar "
            "archive."
        ) from None


_SLACK = 1e-6
"""How far a decimal fraction in a text file may lie outside its range."""
DEPTH = 2
"""Depth of the search for originals: DIR/MNIST/raw/, DIR/mnist_m/mnist_m/."""


@dataclass(frozen=True)
class OriginalsFolder:
    """The originals that a user has, and a scratch folder for what their archives hold."""

    root: Path
    scratch: Path

    @cached_property
    def levels(self) -> list[list[Path]]:
        """The root, the folders in it, and the folders in those."""
        levels = [[self.root]]
        for _ in range(DEPTH):
            levels.append([inner for folder in levels[-1] for inner in list_folders(folder)])
        return levels

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
        return OriginalsFolder(unpack_archive(archive, folder, wanted), self.scratch)


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


def find_files(
    source: OriginalsFolder,
    names: Sequence[str],
    spellings: Callable[[str], Sequence[str]] = lambda name: (name,),
) -> list[Path] | None:
    """Return files that belong together, in order; None if none of them is there."""
    found = {name: source.find_file(*spellings(name)) for name in names}
    there = [path for path in found.values() if path is not None]
    lacking = [name for name, path in found.items() if path is None]
    if there and lacking:
        raise InvalidInput(
            f"{source.root} has {there[0].name} but lacks {', '.join(lacking)}; all of them must "
            "be there."
        )
    return there or None


def find_or_unpack(
    source: OriginalsFolder,
    names: Sequence[str],
    archives: Sequence[str],
    wanted: MemberFilter | None = None,
) -> list[Path] | None:
    """Return files that belong together; unpack them from an archive if they are not there."""
    paths, archive = find_files(source, names), source.find_file(*archives)
    if paths is None and archive is not None:
        content = source.unpack_archive(archive, wanted or (lambda path: path.name in names))
        paths = find_files(content, names)
        if paths is None:
            raise InvalidInput(f"{archive} must hold {', '.join(names)}.")
    return paths


def to_bytes(pixels: NDArray[Any], low: float, high: float, about: str) -> Images:
    """Return pixels in the range [low, high] as bytes."""
    lowest, highest = float(pixels.min()), float(pixels.max())
    # Written so that NaN fails too.
    if not (lowest >= low - _SLACK and highest <= high + _SLACK):
        raise InvalidInput(
            f"{about} has pixels from {lowest:g} to {highest:g}; they must be from {low} to {high}."
        )
    scaled = numpy.rint((pixels - low) / (high - low) * 255)
    return numpy.clip(scaled, 0, 255).astype(numpy.uint8)


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


SCRATCH = ".preparing"
"""Inside the set's folder, so that a rename out of it never crosses file systems; the reader of
sets passes hidden entries over."""


DomainArrays = dict[str, Any]
"""A domain kept as an archive: its arrays by name, as `npz_archive` reads them."""


@dataclass(frozen=True)
class DomainFolders:
    """A domain kept as image files: the files of each class."""

    classes: Mapping[str, Sequence[Path]]


def to_arrays(train: tuple[Images, Indices], test: tuple[Images, Indices]) -> DomainArrays:
    """Return the images and labels of a domain with an official split."""
    parts = {"train": train, "test": test}
    return {
        **{f"x_{part}": images for part, (images, _) in parts.items()},
        **{f"y_{part}": labels.astype(numpy.uint8) for part, (_, labels) in parts.items()},
    }


@contextmanager
def open_destination(folder: Path) -> Iterator[Path]:
    """Hold the folder of a set and give an empty scratch folder in it."""
    with lock_folder(folder):
        scratch = folder / SCRATCH
        # Whatever an earlier process left there died with it.
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            # A set that came to nothing should read as absent, not as empty.
            with suppress(OSError):
                folder.rmdir()


def is_prepared(folder: Path, domain: str) -> bool:
    """Return whether a domain exists in either layout."""
    return (folder / f"{domain}.npz").is_file() or (folder / domain).is_dir()


def write_domain(
    folder: Path, scratch: Path, name: str, domain: DomainArrays | DomainFolders
) -> None:
    """Write a domain to the scratch folder and rename it into place, replacing an older one."""
    place, old = folder / f"{name}.npz", folder / name
    beside = scratch / f"{name}.new"
    if isinstance(domain, DomainFolders):
        place, old = old, place
        _write_folders(beside, domain)
    else:
        with beside.open("wb") as file:
            # Not compressed: disk is spent once, decompression would be spent by every run.
            numpy.savez(file, **domain)
            file.flush()
            os.fsync(file.fileno())
    # A folder cannot be renamed over another one that holds something, so that it steps aside.
    for number, before in enumerate((old, place)):
        if before.is_dir():
            before.rename(scratch / f"{name}.old.{number}")
    beside.replace(place)
    old.unlink(missing_ok=True)
    sync_folder(folder)


def _write_folders(beside: Path, domain: DomainFolders) -> None:
    for class_name, images in domain.classes.items():
        (beside / class_name).mkdir(parents=True)
        for image in images:
            copy = beside / class_name / image.name
            shutil.copyfile(image, copy)
            with copy.open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(beside / class_name)
    sync_folder(beside)
