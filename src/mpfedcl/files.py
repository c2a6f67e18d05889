"""Files that are whole or not there: written beside, flushed to disk, renamed into place."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

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


def unused_folder(wanted: Path) -> Path:
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
