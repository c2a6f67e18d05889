"""Files that are whole or not there: written beside, flushed to disk, renamed into place."""

import contextlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout

from mpfedcl.core.errors import InvalidInput

FORMAT = 2
"""The version of the files that runs write; files of another version are rejected."""
MOST_BYTES = 2**28
"""Of a file of settings or of plain values: a thousand times what any run has written."""
_LEFTOVER = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")


def check_format(found: object, path: Path) -> None:
    """Reject a file of another format than this version writes."""
    if type(found) is not int or found != FORMAT:
        raise InvalidInput(
            f"{path} has format {found!r}; this mpfedcl reads format {FORMAT}: another version "
            "wrote it."
        )


def write_atomically(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Replace a file so that a crash at any moment leaves the old one or the new one.

    What is not `durable` is not waited for: it outlives the process, perhaps not a power cut.
    """
    with open_atomically(path, durable=durable) as file:
        file.write(content)


@contextlib.contextmanager
def open_atomically(path: Path, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """Open a file to write it; it takes its place when it is whole, as in `write_atomically`."""
    beside, handle = _create_beside(path)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        # On a full disk half a file helps nobody. The system names no file where a write fails.
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        error.filename = str(path)
        raise
    if durable:
        sync_folder(path.parent)


def _create_beside(path: Path) -> tuple[Path, int]:
    """Create a file beside another, under a name that nobody can have prepared a link at."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return beside, os.open(beside, flags, 0o666)
    except OSError as error:
        error.filename = str(path)
        raise


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes have left half written. Who calls keeps others out."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if _LEFTOVER.fullmatch(path.name):
            path.unlink()


def read_bounded(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a file; pipes, devices and what is too large are refused."""
    try:
        # Opening a pipe would wait for somebody to write, and a device may never end.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror or error}.") from None
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidInput(f"{path} cannot be read: it is not a regular file.")
        if status.st_size > most:
            raise InvalidInput(f"{path} has {status.st_size:,} bytes; at most {most:,} are read.")
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read(status.st_size)
    finally:
        os.close(handle)


def unused_folder(wanted: Path) -> Path:
    """Return a folder that does not exist yet: as wanted, else with a number."""
    path, number = wanted, 2
    while path.exists():
        path, number = wanted.with_name(f"{wanted.name}-{number}"), number + 1
    return path


def identify_file(path: Path, folder: Path | None = None) -> str:
    """Return what tells a file from others, and from itself before a change, unopened.

    `folder` is where it lies, resolved, for whoever asks of many files in few folders.
    """
    status = path.stat()
    # The time of change of the entry (ctime) cannot be set back, as the content's (mtime) can.
    parts = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
    resolved = path.resolve() if folder is None else folder / path.name
    return json.dumps([os.fsdecode(resolved), *parts])


def sync_folder(folder: Path) -> None:
    """Make a rename durable: on POSIX the folder has its own buffer."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def lock_folder(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Create a folder and keep other mpfedcl processes out of it, or `wait` until they are done.

    The lock is a hidden file beside the folder; a killed process leaves none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.resolve()
    path = path.with_name(f".{path.name}.lock")
    # Not the library's other kind of lock, which would outlive a process that is killed.
    lock = FileLock(path, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(blocking=wait)
    except Timeout:
        raise InvalidInput(
            f"{folder} is already in use by another mpfedcl process; that must end first."
        ) from None
    except OSError:
        # A file system that knows no locks: a rare double start is worth less than working.
        pass
    try:
        yield
    finally:
        lock.release()
