"""A progress bar that appears only if the work takes a while."""

import sys
import time
from typing import Self

from rich.console import Console
from rich.progress import Progress

_SECONDS_BEFORE_A_BAR = 2.0


class WaitingBar:
    """Shows progress on a terminal once the work has taken two seconds."""

    def __init__(self, title: str, total: int) -> None:
        self._title = title
        self._total = total
        self._done = 0
        self._begin = time.monotonic()
        self._bar: Progress | None = None

    def advance(self, count: int) -> None:
        """Add `count` to the work done."""
        self._done += count
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done)
        elif sys.stderr.isatty() and time.monotonic() - self._begin > _SECONDS_BEFORE_A_BAR:
            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.add_task(self._title, total=self._total, completed=self._done)
            self._bar.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
