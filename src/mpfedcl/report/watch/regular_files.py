"""Reading files that anybody may have put there: regular ones, of limited size, and no links."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment

MOST_BYTES = 64 * 2**20

Signature = tuple[int, int, int]
"""What tells a file from itself before a change: inode, size, time of change."""


def file_signature(path: Path) -> Signature | None:
    """Return what a regular file is known by; None where there is none."""
    try:
        status = path.lstat()
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def read_regular_file(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file; links, pipes and large files are refused."""
    try:
        with open_regular_file(path) as handle:
            if (size := os.fstat(handle).st_size) > most:
                raise InvalidInput(f"{path} has {size:,} bytes; at most {most:,} are read.")
            with os.fdopen(os.dup(handle), "rb") as file:
                return file.read(most)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror or error}.") from None


def parse_experiment(content: bytes, path: Path) -> Experiment:
    """Return the experiment in the content of a TOML file; errors name the path."""
    try:
        return Experiment.parse_toml(content.decode(), path)
    except UnicodeDecodeError:
        raise InvalidInput(f"{path} is not text.") from None


@contextmanager
def open_regular_file(path: Path) -> Iterator[int]:
    """Open a regular file to read; an OSError says why not."""
    # A link may lead out of the folder; opening a pipe would wait for somebody to write.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{path} is not a regular file")
        yield handle
    finally:
        os.close(handle)
