"""Reading files that anybody may have put there: plain ones, of bearable size, and no links."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mpfedcl.errors import InvalidInput

MOST_BYTES = 64 * 2**20

Signature = tuple[int, int, int]
"""What tells a file from itself before a change: inode, size, time of change."""


def sign_file(path: Path) -> Signature | None:
    """Return what a plain file is known by; None where there is none."""
    try:
        status = path.lstat()
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def read_plain(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a plain file; links, pipes and giants are refused in a sentence."""
    try:
        with open_plain(path) as handle:
            if (size := os.fstat(handle).st_size) > most:
                raise InvalidInput(f"{path} has {size:,} bytes; at most {most:,} are read.")
            with os.fdopen(os.dup(handle), "rb") as file:
                return file.read(most)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror or error}.") from None


@contextmanager
def open_plain(path: Path) -> Iterator[int]:
    """Open a plain file to read; an OSError says why not."""
    # A link may lead out of the folder; opening a pipe would wait for somebody to write.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{path} is not a plain file")
        yield handle
    finally:
        os.close(handle)
