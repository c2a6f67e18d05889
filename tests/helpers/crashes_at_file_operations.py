"""The end of a process at any file operation, as often as a test likes."""

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Crash(BaseException):
    """The end of a process, as far as files can tell."""


class FileOperations:
    """Counts what is done to files below a folder, and lets nothing more happen after a number."""

    EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")

    def __init__(self) -> None:
        self.folder: str | None = None
        self.left = math.inf
        self.seen: list[str] = []

    @contextmanager
    def watch(self, folder: Path, allowed: float = math.inf) -> Iterator[list[str]]:
        self.folder, self.left, self.seen = str(folder), allowed, []
        try:
            yield self.seen
        finally:
            self.folder = None

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None or event not in self.EVENTS:
            return
        if event == "open" and is_read(*arguments[1:]):
            return
        # Where a folder is removed with all in it, names are relative to an open folder.
        is_relative = event in ("os.remove", "os.rmdir") and arguments[1] != -1
        if not (is_relative or str(arguments[0]).startswith(self.folder)):
            return
        # A dead process does nothing more, so cleanup code must not run either.
        if self.left <= 0:
            raise Crash
        self.left -= 1
        self.seen.append(f"{event} {Path(str(arguments[0])).name}")


def is_read(mode: str | None, flags: int) -> bool:
    return mode in ("r", "rb") or (mode is None and not flags & (os.O_WRONLY | os.O_RDWR))


OPERATIONS = FileOperations()
sys.addaudithook(OPERATIONS)
