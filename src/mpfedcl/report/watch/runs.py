"""The runs below a folder that other processes write: found, read again when they have changed."""

import hashlib
import os
import re
import stat
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.json_files import Json
from mpfedcl.experiment.descriptions import describe_data
from mpfedcl.report.run import RunRecords, measure_spread
from mpfedcl.rounds.record import RoundRecord

State = Literal["running", "finished", "stopped", "damaged"]
MOST_FOLDERS = 20_000
MOST_OPEN = 24
"""Runs whose records, and pages whose figures, are kept in memory."""
_MOST_LEVELS = 6
_SECONDS_BETWEEN_SEARCHES = 1.0
"""Between two searches for runs; the running ones are read at every request."""
_QUIET_SECONDS = 5.0
"""A run without a lock and without a new round for this long counts as stopped."""
_FILES = (
    "experiment.toml",
    "rounds.jsonl",
    "summary.json",
    "partition.json",
    "confusion.json",
    "pool.safetensors",
)


class FileVersion(NamedTuple):
    """What changes when a file is written."""

    inode: int
    size: int
    changed: int
    """In nanoseconds."""


Version = tuple[FileVersion | None, ...]
"""The versions of a run's files; None for a file that does not exist."""


def find_version(path: Path) -> FileVersion | None:
    """Return the version of a file; None if there is none.

    Links and pipes are rejected: a link may lead out of the watched folder.
    """
    try:
        status = path.lstat()
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        raise InvalidInput(f"{path.name} is not a regular file.")
    return FileVersion(status.st_ino, status.st_size, status.st_mtime_ns)


@lru_cache(MOST_OPEN)
def read_records(path: Path, version: Version) -> RunRecords:
    """Return the records of a run in a version; those of a run that has begun have no round."""
    rounds = version[_FILES.index("rounds.jsonl")]
    return RunRecords.read(path, with_rounds=rounds is not None and rounds.size > 0)


class WatchedRun:
    """A run, and what the list shows of it."""

    def __init__(self, path: Path, root: Path) -> None:
        self.path = path
        *above, name = path.relative_to(root).parts or (path.resolve().name,)
        self.name, self.folder = name, "/".join(above)
        # Requests name a run by this, never by its path.
        self.id = hashlib.sha256(os.fsencode(path.relative_to(root))).hexdigest()[:20]
        self.version: Version = ()
        self.state: State = "stopped"
        self.trouble = ""
        """Why the run cannot be read, if it cannot."""
        self.seen: Json = {}
        """What the list shows of the records."""

    @property
    def records(self) -> RunRecords:
        """The records in the version that was found."""
        return read_records(self.path, self.version)

    def refresh(self, locked: set[int]) -> None:
        """Read the files if they have changed; `locked` are the inodes of locked files."""
        try:
            version = tuple(find_version(self.path / name) for name in _FILES)
            if version != self.version:
                self.version, self.trouble = version, ""
                self.seen = self._describe()
            self.state = "damaged" if self.trouble else self._find_state(locked)
        # A damaged run must not affect the others.
        except Exception as error:
            kind = "" if isinstance(error, InvalidInput) else f"{type(error).__name__}: "
            self.trouble = f"{kind}{error}".replace(f"{self.path}/", "")
            self.state = "damaged"

    def _find_state(self, locked: set[int]) -> State:
        if self.version[_FILES.index("summary.json")]:
            return "finished"
        lock = find_version(self.path / ".lock")
        if lock and lock.inode in locked:
            return "running"
        # Locks of another machine or container are not visible, but growth is.
        records = self.version[_FILES.index("rounds.jsonl")]
        since = time.time() - records.changed / 1e9 if records else float("inf")
        is_growing = since < max(_QUIET_SECONDS, 3 * self.seen["seconds"])
        return "running" if is_growing else "stopped"

    def _describe(self) -> Json:
        experiment, rounds = self.records.experiment, self.records.rounds
        # Written before the first round, only by runs over a network.
        is_network = (self.path / "federation.json").exists()
        data, split = describe_data(experiment, {"network": is_network}, with_seed=False)
        return {
            "method": experiment.method,
            "about": f"{data}, {split}, seed {experiment.seed}",
            "planned": experiment.rounds,
            "round": rounds[-1].round if rounds else 0,
            "seconds": sum(rounds[-1].seconds.values()) if rounds else 0.0,
            "metric": experiment.metric,
            "value": _last_value(rounds, experiment.metric),
            "counts": {
                "updates rejected": sum(len(each.clients.rejected) for each in rounds),
                "answers missing": sum(len(each.clients.missing) for each in rounds),
                "damaged lines": self.records.damaged,
            },
        }

    @property
    def changed(self) -> float:
        """The time of the last change of a file, in seconds."""
        return max((each.changed / 1e9 for each in self.version if each), default=0.0)


def _last_value(rounds: Sequence[RoundRecord], metric: str) -> float | None:
    """Return the primary metric on the local test sets in the last round that has it."""
    if metric != "accuracy":
        values = (each.metric["local_test"] for each in reversed(rounds) if each.metric)
        return next((each for each in values if each is not None), None)
    spreads = (measure_spread(each) for each in reversed(rounds))
    return next((each.mean for each in spreads if each is not None), None)


class WatchedRuns:
    """All runs below a folder, read once however many pages are open. For one thread only."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runs: dict[str, WatchedRun] = {}
        self.is_too_large = False
        """Whether there were too many folders to visit all."""
        self.searched_at = float("-inf")
        self._search_seconds = 0.0

    def refresh(self) -> None:
        """Read what is new: of all runs if it is time to search again, else of running ones."""
        began = time.monotonic()
        # A folder that takes long to search is searched less often.
        pause = max(_SECONDS_BETWEEN_SEARCHES, 20 * self._search_seconds)
        is_due = began - self.searched_at >= pause
        if is_due:
            paths, self.is_too_large = find_runs(self.root)
            found = {run.id: run for run in (WatchedRun(path, self.root) for path in paths)}
            self.runs = {name: self.runs.get(name, run) for name, run in found.items()}
            self.searched_at, self._search_seconds = began, time.monotonic() - began
        locked = find_locked_inodes()
        for run in self.runs.values():
            if is_due or run.state == "running":
                run.refresh(locked)


def find_runs(root: Path) -> tuple[list[Path], bool]:
    """Return the runs below a folder, and whether there were too many folders to visit all.

    Links are not followed; hidden folders and those inside runs are not visited.
    """
    found: list[Path] = []
    for number, (folder, inside, files) in enumerate(os.walk(root)):
        if number >= MOST_FOLDERS:
            return found, True
        path = Path(folder)
        # Pipes and links are listed with the files.
        is_run = "experiment.toml" in files and _is_regular(path / "experiment.toml")
        if is_run:
            found.append(path)
        if is_run or len(path.relative_to(root).parts) >= _MOST_LEVELS:
            inside.clear()
        inside[:] = sorted(name for name in inside if not name.startswith("."))
    return found, False


def _is_regular(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


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
