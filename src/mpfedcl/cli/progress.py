"""Progress for people at a terminal; silence for files and pipes."""

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
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

_LOST_SECONDS = 5.0
"""After which the interrupt of a second Ctrl-C was lost: torch swallows some in its callbacks."""


def stderr_console() -> Console:
    """Return a console on standard error, so that standard output holds results only."""
    return Console(stderr=True, markup=False, highlight=False, soft_wrap=True)


def stdout_console() -> Console:
    """Return a console on standard output; 100 columns where it is no terminal."""
    width = None if Console().is_terminal else 100
    # Names of files and classes are not markup, and a path that is folded cannot be copied.
    return Console(highlight=False, markup=False, soft_wrap=True, width=width)


class _NoteColumn(ProgressColumn):
    """The note beside a bar: what does not fit of it is cut off, and nothing else is."""

    def render(self, task: Task) -> Text:
        """Return the note on one line."""
        return Text(str(task.fields["note"]), no_wrap=True, overflow="ellipsis")


def progress_bar(console: Console) -> Progress:
    """Return a bar that is drawn only on a terminal."""
    return Progress(
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        BarColumn(bar_width=20),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
        _NoteColumn(),
        console=console,
        disable=not console.is_terminal,
    )


@contextmanager
def stop_after_round(console: Console) -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C ask for a stop after the round under way, the second end at once.

    What is given tells whether a stop was asked for.
    """
    is_asked = False
    # Whatever is written is whole at any moment, so that the process may end at any.
    lost = threading.Timer(_LOST_SECONDS, os._exit, [130])
    lost.daemon = True

    def ask(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_asked
        if is_asked:
            if not lost.is_alive():
                lost.start()
            raise KeyboardInterrupt
        is_asked = True
        console.print("Stopping after the round under way; Ctrl-C again stops at once.")

    before: Any = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: is_asked
    finally:
        lost.cancel()
        signal.signal(signal.SIGINT, before)
