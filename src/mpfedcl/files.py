"""Files that are whole or not there: written beside, flushed to disk, renamed into place."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

from mpfedcl.errors import InvalidInput


def write_atomically(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Replace a file so that a crash at any moment leaves the old one or the new one.

    What is not `durable` is not waited for: it outlives the process, perhaps not a power cut.
    """
    beside = path.with_name(f".{path.name}.tmp")
    try:
        with beside.open("wb") as file:
            file.write(content)
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


def free_folder(wanted: Path) -> Path:
    """Return a folder that does not exist yet: as wanted, else with a number."""
    path, number = wanted, 2
    while path.exists():
        path, number = wanted.with_name(f"{wanted.name}-{number}"), number + 1
    return path


def identify_file(path: Path) -> str:
    """Return what tells a file from others, and from itself before a change, unopened."""
    status = path.stat()
    # The time of change of the entry (ctime) cannot be set back, as the content's (mtime) can.
    parts = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
    return json.dumps([os.fsdecode(path.resolve()), *parts])


def sync_folder(folder: Path) -> None:
    """Make a rename durable: on POSIX the folder has its own buffer."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def wait_for_folder(folder: Path) -> Iterator[None]:
    """Create a folder and keep other mpfedcl processes waiting that want it too."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        # A file system that knows no locks: a rare double start is worth less than working.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Create a folder and keep other mpfedcl processes out of it; a killed one leaves no lock."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidInput(
                f"{folder} is in use by another mpfedcl data fetch or prepare; it must end first."
            ) from None
        except OSError:
            # A file system that knows no locks: a rare double start is worth less than working.
            pass
        yield
    finally:
        os.close(handle)
