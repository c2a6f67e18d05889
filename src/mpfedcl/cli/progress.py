"""Progress: a bar on a terminal, occasional lines in files and pipes."""

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
        self._milestones: dict[TaskID, Milestones] = {}
        self._waits: list[str] = []

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """Change a task, and print a line if it is due."""
        super().update(task_id, **changes)
        if self._unit and not self.console.is_terminal:
            self._print_line(self._tasks[task_id])

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
