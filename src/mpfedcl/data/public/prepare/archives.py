"""Archives taken apart without trusting them: names are checked, sizes are bounded."""

import gzip
import lzma
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any

from mpfedcl.core.errors import InvalidInput

MOST_BYTES_UNPACKED = 16 * 2**30
MOST_FILES_UNPACKED = 1_000_000

_FAULTS = (
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    NotImplementedError,
    RuntimeError,
    gzip.BadGzipFile,
)
"""What the readers of archives raise on broken, encrypted or unknown ones."""

MemberFilter = Callable[[PurePosixPath], bool]
"""Tells by its path inside the archive whether a file is wanted."""


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
                _copy(source, file, size, archive, name)
    return folder


def _check_name(archive: Path, name: str) -> PurePosixPath:
    """Return the path of a member; refuse an archive that reaches out of its folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or ":" in name:
        raise InvalidInput(
            f"{archive} holds {name!r}, which leads out of the folder it is unpacked to; all names "
            "in it must be relative and without '..'."
        )
    return path


def _copy(source: IO[bytes], file: IO[bytes], size: int, archive: Path, name: str) -> None:
    """Copy exactly the declared number of bytes."""
    left = size
    while piece := source.read(min(2**20, left + 1)):
        left -= len(piece)
        if left < 0:
            break
        file.write(piece)
    if left != 0:
        raise InvalidInput(
            f"{archive} holds {name!r} in another size than the {size:,} bytes it declares; it "
            "must be a whole archive."
        )


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
    except _FAULTS as error:
        # tarfile adds a line for each compression that it tried in vain.
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".:")
        raise InvalidInput(
            f"{archive} cannot be unpacked ({reason}); it must be a whole zip or tar archive."
        ) from None
