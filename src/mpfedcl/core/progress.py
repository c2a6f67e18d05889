"""Progress of long work: a bar on a terminal or in a notebook, lines in files and pipes."""

import html
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Literal, Self

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

from mpfedcl.core.errors import InvalidInput

LINES = 20
"""Maximum number of progress lines of a run in a log."""
_SECONDS_BEFORE_A_BAR = 2.0


def stderr_console() -> Console:
    """Return a console on standard error, so that standard output holds results only."""
    return Console(stderr=True, markup=False, highlight=False, soft_wrap=True)


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


class NotebookBar:
    """A bar with a note in the output of a notebook's cell."""

    def __init__(self) -> None:
        self._handle: Any = None

    def update(self, title: str, done: int, total: int, note: str) -> None:
        """Show the bar, in place of the one before."""
        told = f"{title}: {done:,} of {total:,} rounds" + (f", {note}" if note else "")
        # A notebook without a browser shows the text.
        shown = {
            "text/plain": told,
            "text/html": f'<progress value="{done}" max="{total}"></progress> {html.escape(told)}',
        }
        if self._handle is None:
            display = import_module("IPython.display").display
            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)


Show = Callable[[str, int, int, str], None]
"""Shows progress: a title, the number of rounds that are done, their total, and a note."""


@contextmanager
def show_rounds(progress: bool | Literal["auto"]) -> Iterator[Show]:
    """Yield a function that shows rounds on a terminal or in a notebook.

    "auto" shows nothing elsewhere, True prints lines there; False shows nothing anywhere.
    """
    if progress not in (True, False, "auto"):
        raise InvalidInput(f"progress is {progress!r}; it must be True, False or 'auto'.")
    console = stderr_console()
    if progress and _is_in_notebook():
        yield NotebookBar().update
    elif progress is True or (progress and console.is_terminal):
        with ProgressBar(console, "rounds") as bar:
            task = bar.add_task("starting", total=None, note="")

            def show(title: str, done: int, total: int, note: str) -> None:
                bar.update(task, description=title, total=total, completed=done, note=note)

            yield show
    else:
        yield lambda *_: None


def _is_in_notebook() -> bool:
    """Return whether a kernel runs this program: a terminal's IPython has none."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


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
