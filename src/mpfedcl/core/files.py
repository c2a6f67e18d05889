"""Atomic writes, bounded reads and folder locks."""

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
"""The size limit of settings and JSON files: a thousand times the largest seen."""
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

    Without `durable`, the file survives the process, but perhaps not a power failure.
    """
    with open_atomically(path, durable=durable) as file:
        file.write(content)


@contextlib.contextmanager
def open_atomically(path: Path, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """Open a file for writing; it replaces `path` when it is complete."""
    # A random name, under which no other user can have prepared a link.
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(beside, flags, 0o666), "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        # Half a file is useless. The system does not name the file when a write fails.
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        error.filename = str(path)
        raise
    if durable:
        sync_folder(path.parent)


def remove_leftovers(folder: Path) -> None:
    """Remove half-written files of killed processes; the caller must hold the folder's lock."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if _LEFTOVER.fullmatch(path.name):
            path.unlink()


def read_bounded(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a file; pipes, devices and files above `most` bytes are rejected."""
    try:
        # Opening a pipe would block, and a device may never end.
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
    """Return a folder that does not exist yet: `wanted`, or `wanted` with a number."""
    path, number = wanted, 2
    while path.exists():
        path, number = wanted.with_name(f"{wanted.name}-{number}"), number + 1
    return path


def identify_file(path: Path, folder: Path | None = None) -> str:
    """Return a text that identifies a file and its version without opening it.

    `folder` is its resolved folder, for callers with many files in few folders.
    """
    status = path.stat()
    # Unlike mtime, ctime cannot be set back.
    parts = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
    resolved = path.resolve() if folder is None else folder / path.name
    return json.dumps([os.fsdecode(resolved), *parts])


def sync_folder(folder: Path) -> None:
    """Make a rename durable: on POSIX folders are buffered separately."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def lock_folder(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Create a folder and lock out other mpfedcl processes, or `wait` until they are done.

    The lock is a hidden file next to the folder; it ends with the process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.resolve()
    path = path.with_name(f".{path.name}.lock")
    # No soft lock, which would outlive a killed process.
    lock = FileLock(path, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(blocking=wait)
    except Timeout:
        raise InvalidInput(
            f"{folder} is already in use by another mpfedcl process; that must end first."
        ) from None
    except OSError:
        # A file system without locks: working matters more than preventing a double start.
        pass
    try:
        yield
    finally:
        lock.release()
