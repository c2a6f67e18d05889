"""Files of runs that other processes write: found, read safely, and read on as they grow.

Only regular files of limited size are read: a link may lead out of the folder, and opening a pipe
would block.
"""

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.rounds.record import RoundRecord

MOST_BYTES = 64 * 2**20
MOST_LINE_BYTES = 16 * 2**20
"""A record of ten thousand clients takes two million bytes; a longer line is damage."""
_PIECE_BYTES = 2**20
_MOST_BYTES_AT_ONCE = 64 * 2**20
"""Bytes read before other runs have their turn."""
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


def read_regular_file(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file; links, pipes and large files are rejected."""
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
    """Open a regular file for reading, or raise an OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{path} is not a regular file")
        yield handle
    finally:
        os.close(handle)


# Records that grow


class IncrementalRecords:
    """Reads records as they are added; a line that cannot be read is counted and left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reset()

    def _reset(self) -> None:
        self._inode: int | None = None
        self._offset = 0
        self._rest = b""
        self._is_skipping = False
        self._last = 0
        self.damaged = 0

    def read_new(self) -> tuple[bool, list[RoundRecord]]:
        """Return the new rounds, and whether they start again from the first."""
        signature = file_signature(self._path)
        inode, size = signature[:2] if signature else (None, 0)
        # A resumed run replaces or shortens the file.
        is_new = inode != self._inode or size < self._offset
        began = is_new and self._inode is not None
        if is_new:
            self._reset()
        if inode is None or size == self._offset:
            return began, []
        found: list[RoundRecord] = []
        try:
            with open_regular_file(self._path) as handle:
                self._inode = os.fstat(handle).st_ino
                os.lseek(handle, self._offset, os.SEEK_SET)
                begun_at = self._offset
                while self._offset - begun_at < _MOST_BYTES_AT_ONCE:
                    piece = os.read(handle, _PIECE_BYTES)
                    if not piece:
                        break
                    self._offset += len(piece)
                    found += self._parse_lines(piece)
        except OSError:
            # Deleted or replaced meanwhile: the next read starts again.
            self._inode = None
        return began, found

    def _parse_lines(self, piece: bytes) -> list[RoundRecord]:
        *whole, rest = piece.split(b"\n")
        found = []
        for line in whole:
            if self._is_skipping:
                self._is_skipping = False
            elif (record := self._parse(self._rest + line)) is not None:
                found.append(record)
            self._rest = b""
        if not self._is_skipping:
            self._rest += rest
        if len(self._rest) > MOST_LINE_BYTES:
            self._rest, self._is_skipping = b"", True
            self.damaged += 1
        return found

    def _parse(self, line: bytes) -> RoundRecord | None:
        if not line.strip():
            return None
        try:
            record = RoundRecord.model_validate_json(line)
        except ValidationError:
            self.damaged += 1
            return None
        if record.round <= self._last:
            self.damaged += 1
            return None
        self._last = record.round
        return record


# Finding runs


@dataclass(frozen=True)
class RunLocation:
    """Place of a run below the watched folder."""

    path: Path
    parts: tuple[str, ...]
    """Names of the folders from the watched one down to the run."""

    @property
    def id(self) -> str:
        """Identifier in requests, which never name a path."""
        return hashlib.sha256(os.fsencode("/".join(self.parts))).hexdigest()[:20]


def find_runs(root: Path) -> tuple[list[RunLocation], bool]:
    """Return the runs below a folder, and whether there were too many folders to visit all.

    Links are not followed; hidden folders and those inside runs are not visited.
    """
    found: list[RunLocation] = []
    level = [RunLocation(root, ())]
    seen = 0
    for _ in range(_MOST_LEVELS + 1):
        below: list[RunLocation] = []
        for place in level:
            seen += 1
            if seen > MOST_FOLDERS:
                return found, True
            if file_signature(place.path / "experiment.toml") is not None:
                found.append(place)
            else:
                below += _folders_in(place)
        level = below
    return found, False


def _folders_in(place: RunLocation) -> list[RunLocation]:
    try:
        with os.scandir(place.path) as entries:
            names = [
                entry.name
                for entry in entries
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
            ]
    except OSError:
        # Deleted meanwhile, or without permission.
        return []
    return [RunLocation(place.path / name, (*place.parts, name)) for name in sorted(names)]


def find_locked_inodes() -> set[int]:
    """Return the inodes of files that some process has locked, if this system lists them.

    Trying the lock instead could disturb a run that starts at this moment.
    """
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return set()
    found = set()
    for line in lines:
        # 1: FLOCK  ADVISORY  WRITE 1234 fd:01:5678 0 EOF
        words = line.split()
        if len(words) >= 6 and words[1] == "FLOCK" and words[5].count(":") == 2:
            inode = words[5].rpartition(":")[2]
            found |= {int(inode)} if inode.isdigit() else set()
    return found
