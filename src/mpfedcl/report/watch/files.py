"""Files of runs that other processes write: found, read safely, and read on as they grow.

Only regular files of limited size are read: a link may lead out of the folder, and opening a pipe
would block.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.rounds.record import RoundRecord

MOST_BYTES = 64 * 2**20
MOST_FOLDERS = 20_000
_MOST_LEVELS = 6

Signature = tuple[int, int, int]
"""Inode, size and time of change of a file."""


def file_signature(path: Path) -> Signature | None:
    """Return the signature of a regular file; None if there is none."""
    try:
        status = path.lstat()
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


@contextmanager
def open_regular_file(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading, or raise an OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path} is not a regular file")
    with os.fdopen(handle, "rb") as file:
        yield file


def read_regular_file(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file; links, pipes and large files are rejected."""
    try:
        with open_regular_file(path) as file:
            if (size := os.fstat(file.fileno()).st_size) > most:
                raise InvalidInput(f"{path} has {size:,} bytes; at most {most:,} are read.")
            return file.read(most)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror or error}.") from None


def parse_experiment(content: bytes, path: Path) -> Experiment:
    """Return the experiment in the content of a TOML file; errors name the path."""
    try:
        return Experiment.parse_toml(content.decode(), path)
    except UnicodeDecodeError:
        raise InvalidInput(f"{path} is not text.") from None


class IncrementalRecords:
    """Reads records as they are added; a line that cannot be read is counted and left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reset()

    def _reset(self) -> None:
        self._inode: int | None = None
        self._offset = 0
        self._last = 0
        self.damaged = 0

    def read_new(self) -> tuple[bool, list[RoundRecord]]:
        """Return whether the rounds start again from the first, and the new rounds."""
        signature = file_signature(self._path)
        inode, size = signature[:2] if signature else (None, 0)
        # A resumed run replaces or shortens the file.
        is_new = inode != self._inode or size < self._offset
        began = is_new and self._inode is not None
        if is_new:
            self._reset()
        if inode is None or size == self._offset:
            return began, []
        try:
            with open_regular_file(self._path) as file:
                self._inode = os.fstat(file.fileno()).st_ino
                file.seek(self._offset)
                content = file.read(MOST_BYTES)
        except OSError:
            # Deleted or replaced meanwhile: the next read starts again.
            self._inode = None
            return began, []
        whole, newline, rest = content.rpartition(b"\n")
        if len(rest) == MOST_BYTES:
            # No run writes such a line. Its end counts as another damaged line.
            self.damaged += 1
            self._offset += len(rest)
        self._offset += len(whole) + len(newline)
        found = [self._parse(line) for line in whole.split(b"\n") if line.strip()]
        return began, [record for record in found if record is not None]

    def _parse(self, line: bytes) -> RoundRecord | None:
        try:
            record = RoundRecord.model_validate_json(line)
        except ValidationError:
            record = None
        if record is None or record.round <= self._last:
            self.damaged += 1
            return None
        self._last = record.round
        return record


def find_runs(root: Path) -> tuple[list[Path], bool]:
    """Return the runs below a folder, and whether there were too many folders to visit all.

    Links are not followed; hidden folders and those inside runs are not visited.
    """
    found: list[Path] = []
    for number, (folder, inside, _) in enumerate(os.walk(root)):
        if number >= MOST_FOLDERS:
            return found, True
        path = Path(folder)
        is_run = file_signature(path / "experiment.toml") is not None
        if is_run:
            found.append(path)
        if is_run or len(path.relative_to(root).parts) >= _MOST_LEVELS:
            inside.clear()
        inside[:] = sorted(name for name in inside if not name.startswith("."))
    return found, False


def find_locked_inodes() -> set[int]:
    """Return the inodes of files that some process has locked, if this system lists them.

    Trying the lock instead could disturb a run that starts at this moment.
    """
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return set()
    # 1: FLOCK  ADVISORY  WRITE 1234 fd:01:5678 0 EOF
    rows = [line.split() for line in lines]
    inodes = [row[5].rpartition(":")[2] for row in rows if len(row) > 5 and row[1] == "FLOCK"]
    return {int(inode) for inode in inodes if inode.isdigit()}
