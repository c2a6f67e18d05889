"""Files of runs that other processes write: found, and read safely.

Only regular files of limited size are read: a link may lead out of the folder, and opening a pipe
would block.
"""

import os
import re
import stat
from pathlib import Path

from pydantic import ValidationError

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import MOST_BYTES
from mpfedcl.experiment import Experiment
from mpfedcl.rounds.record import RoundRecord

MOST_FOLDERS = 20_000
_MOST_LEVELS = 6
_MOST_SETTINGS = 2**20

Signature = tuple[int, int, int]
"""Inode, size and time of change of a file."""


def file_signature(path: Path) -> Signature | None:
    """Return the signature of a regular file; None if there is none."""
    try:
        status = path.lstat()
    except OSError:
        return None
    is_regular = stat.S_ISREG(status.st_mode)
    return (status.st_ino, status.st_size, status.st_mtime_ns) if is_regular else None


def read_regular_file(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file; links, pipes and large files are rejected."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        with open(path, "rb", opener=lambda name, reading: os.open(name, reading | flags)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InvalidInput(f"{path} cannot be read: it is not a regular file.")
            if status.st_size > most:
                raise InvalidInput(
                    f"{path} has {status.st_size:,} bytes; at most {most:,} are read."
                )
            return file.read(most)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror or error}.") from None


def read_experiment(path: Path) -> Experiment:
    """Return the experiment in a TOML file."""
    try:
        return Experiment.parse_toml(read_regular_file(path, _MOST_SETTINGS).decode(), path)
    except UnicodeDecodeError:
        raise InvalidInput(f"{path} is not text.") from None


def read_records(path: Path) -> tuple[list[RoundRecord], int]:
    """Return the rounds in complete lines, and the number of lines that cannot be read."""
    found: list[RoundRecord] = []
    damaged = 0
    # The last line is empty, or is being written.
    for line in read_regular_file(path).split(b"\n")[:-1]:
        try:
            record = RoundRecord.model_validate_json(line)
        except ValidationError:
            damaged += bool(line.strip())
            continue
        if record.round > (found[-1].round if found else 0):
            found.append(record)
        else:
            damaged += 1
    return found, damaged


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
        listed = Path("/proc/locks").read_text()
    except OSError:
        return set()
    # 1: FLOCK  ADVISORY  WRITE 1234 fd:01:5678 0 EOF
    found = re.findall(r"^\d+: FLOCK .*?:(\d+) \S+ \S+$", listed, re.MULTILINE)
    return set(map(int, found))
