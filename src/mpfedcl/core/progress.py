"""A bar for work that turns out to be long; quick work stays silent."""

import sys
import time
from typing import Self

from rich.console import Console
from rich.progress import Progress

_SECONDS_BEFORE_A_BAR = 2.0


class WaitingBar:
    """Shows how far the work is, on a terminal only, and only once it has taken a while."""

    def __init__(self, title: str, total: int) -> None:
        self._title = title
        self._total = total
        self._done = 0
        self._begin = time.monotonic()
        self._bar: Progress | None = None

    def advance(self, count: int) -> None:
        """Note that so much more is done."""
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
