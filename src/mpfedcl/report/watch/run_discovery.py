"""Finding runs below a folder, and which of them are being written right now."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from mpfedcl.report.watch.regular_files import file_signature

_MOST_LEVELS = 6
MOST_FOLDERS = 20_000


@dataclass(frozen=True)
class RunLocation:
    """Where a run is."""

    path: Path
    parts: tuple[str, ...]
    """The names from the watched folder down to it."""

    @property
    def id(self) -> str:
        """What the run is asked for by: a request never names a path."""
        return hashlib.sha256(os.fsencode("/".join(self.parts))).hexdigest()[:20]


def find_runs(root: Path) -> tuple[list[RunLocation], bool]:
    """Return the runs below a folder, and whether there were too many folders to look at all.

    Links are not followed, hidden folders and those of runs not entered.
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
        # Gone since, or not ours to read.
        return []
    return [RunLocation(place.path / name, (*place.parts, name)) for name in sorted(names)]


def find_locked_inodes() -> set[int]:
    """Return the inodes of files that some process has locked, as far as this system tells.

    The kernel's list is read instead of trying the lock: for an instant a try would be in the way
    of whoever starts a run.
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
