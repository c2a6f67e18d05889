"""Progress: a bar on a terminal, occasional lines in files and pipes."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

LINES = 20
"""Maximum number of progress lines of a run in a log."""
_LOST_SECONDS = 5.0
"""Time limit of a second Ctrl-C, after which the process ends: torch swallows some of them."""


def stderr_console() -> Console:
    """Return a console on standard error, so that standard output holds results only."""
    return Console(stderr=True, markup=False, highlight=False, soft_wrap=True)


def stdout_console() -> Console:
    """Return a console on standard output, with 100 columns if it is no terminal."""
    width = None if Console().is_terminal else 100
    # Names of files and classes are no markup, and a wrapped path could not be copied.
    return Console(highlight=False, markup=False, soft_wrap=True, width=width)


class Milestones:
    """Decides when a log gets a line: about twenty times in total."""

    def __init__(self) -> None:
        self._told = 0

    def is_new(self, done: int, total: int) -> bool:
        """Return whether enough is done since the last line for another one."""
        step = max(1, -(-total // LINES))
        is_new = done // step > self._told // step or self._told < done == total
        if is_new or done < self._told:
            self._told = done
        return is_new


class _NoteColumn(ProgressColumn):
    """The note next to a bar, which is cut off if the line is too long."""

    def render(self, task: Task) -> Text:
        """Return the note on one line."""
        return Text(str(task.fields["note"]), no_wrap=True, overflow="ellipsis")


class _LoggedProgress(Progress):
    """A bar that prints lines if it is not on a terminal."""

    def __init__(self, console: Console, unit: str) -> None:
        super().__init__(
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=20),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            _NoteColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._unit = unit
        self._milestones: dict[TaskID, Milestones] = {}
        self._waits: list[str] = []

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        if self._unit and not self.console.is_terminal:
            self._print_line(self.tasks[self.task_ids.index(task_id)])

    def _print_line(self, task: Task) -> None:
        note = " ".join(task.fields["note"].split())
        if task.total is not None:
            done, total = int(task.completed), int(task.total)
            if self._milestones.setdefault(task.id, Milestones()).is_new(done, total):
                told = f"{task.description}: {done:,} of {total:,} {self._unit}"
                self.console.print(f"{told}, {note}" if note else told)
        elif note and note not in self._waits and len(self._waits) < LINES:
            # Nothing is counted yet: the reason of the wait is printed once.
            self._waits.append(note)
            self.console.print(f"{task.description}: {note}")


def progress_bar(console: Console, unit: str = "") -> Progress:
    """Return a progress bar; without a terminal it prints lines, if it has a unit."""
    return _LoggedProgress(console, unit)


@contextmanager
def stop_after_round(console: Console) -> Iterator[Callable[[], bool]]:
    """Stop after the current round on the first Ctrl-C, and at once on the second.

    Yields a function that returns whether a stop was requested.
    """
    is_asked = False
    # Files are written atomically, so the process may end at any moment.
    lost = threading.Timer(_LOST_SECONDS, os._exit, [130])
    lost.daemon = True

    def ask(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_asked
        if is_asked:
            if not lost.is_alive():
                lost.start()
            raise KeyboardInterrupt
        is_asked = True
        console.print("Stopping after the current round; Ctrl-C again stops at once.")

    before: Any = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: is_asked
    finally:
        lost.cancel()
        signal.signal(signal.SIGINT, before)
