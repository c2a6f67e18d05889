"""The terminal of a command: consoles, JSON on standard output, progress and Ctrl-C."""

import json
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


def print_json(content: Any) -> None:
    """Print a result as JSON on standard output."""
    print(json.dumps(content, indent=2))


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


# Progress: a bar on a terminal, occasional lines in files and pipes


def is_milestone(done: int, total: int, told: int) -> bool:
    """Return whether a log gets a line: about twenty in total; the last one was at `told`."""
    step = max(1, -(-total // LINES))
    return done // step > told // step or told < done == total


class _NoteColumn(ProgressColumn):
    """The note next to a bar; unlike the other columns it gives way if the line is too long."""

    def render(self, task: Task) -> Text:
        """Return the note on one line."""
        return Text(str(task.fields["note"]), no_wrap=True, overflow="ellipsis")


class ProgressBar(Progress):
    """A bar with a note; without a terminal it prints lines, if it has a unit.

    Each task needs the field `note`, which is cut off if the line is too long.
    """

    def __init__(self, console: Console, unit: str = "") -> None:
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
        self._told: dict[TaskID, int] = {}
        self._waits: list[str] = []

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """Change a task, and print a line if it is due."""
        super().update(task_id, **changes)
        if not self._unit or self.console.is_terminal:
            return
        task = self._tasks[task_id]
        note = " ".join(task.fields["note"].split())
        if task.total is not None:
            done, total = int(task.completed), int(task.total)
            if is_milestone(done, total, self._told.get(task.id, 0)):
                self._told[task.id] = done
                told = f"{task.description}: {done:,} of {total:,} {self._unit}"
                self.console.print(f"{told}, {note}" if note else told)
        elif note and note not in self._waits and len(self._waits) < LINES:
            # Nothing is counted yet: the reason of the wait is printed once.
            self._waits.append(note)
            self.console.print(f"{task.description}: {note}")
