"""Progress for people at a terminal; silence for files and pipes."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def stderr_console() -> Console:
    """Return a console on standard error, so that standard output holds results only."""
    return Console(stderr=True, markup=False, highlight=False, soft_wrap=True)


def stdout_console() -> Console:
    """Return a console on standard output; 100 columns where it is no terminal."""
    # Names of files and classes are not markup, and a path that is folded cannot be copied.
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, soft_wrap=True, width=100)
    return console


def progress_bar(console: Console) -> Progress:
    """Return a bar that is drawn only on a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        disable=not console.is_terminal,
    )


class StopSignal:
    """True once the user has pressed Ctrl-C; a second press ends the program at once."""

    def __init__(self) -> None:
        self.given = False

    def __call__(self) -> bool:
        """Tell whether to stop after the round under way."""
        return self.given


@contextmanager
def stop_after_round(console: Console) -> Iterator[StopSignal]:
    """Let the first Ctrl-C ask for a stop after the round under way."""
    stop = StopSignal()

    def ask(_number: int, _frame: FrameType | None) -> None:
        if stop.given:
            raise KeyboardInterrupt
        stop.given = True
        console.print("Stopping after the round under way; Ctrl-C again stops at once.")

    before: Any = signal.signal(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
