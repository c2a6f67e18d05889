"""Tables that fit 100 columns, for the terminal and for Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from mpfedcl.methods import READINGS
from mpfedcl.readings import TESTS

READING_TITLES = {
    "personal_classifier": "personal, classifier",
    "personal_prototype": "personal, prototype",
    "averaged_classifier": "averaged, classifier",
    "averaged_prototype": "averaged, prototype",
}
WIDTH = 100


class Grid:
    """A table as rows of text, shown either way."""

    def __init__(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        self.title = title
        self.columns = list(columns)
        self.rows = [list(row) for row in rows]

    def show(self, console: Console) -> None:
        """Print to a terminal or a file; the first column is left-aligned, the rest right."""
        table = Table(title=self.title, title_justify="left", box=box.SIMPLE_HEAD)
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="left" if index == 0 else "right")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)

    def markdown(self) -> str:
        """Return the table in Markdown."""
        rule = ["---"] + ["---:"] * (len(self.columns) - 1)
        lines = [self.columns, rule, *self.rows]
        return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def percent(value: float | None) -> str:
    """Return an accuracy with one decimal, a dash where there is none."""
    return "–" if value is None else f"{value:.1f}"


def mean_and_deviation(values: Sequence[float | None]) -> str:
    """Return mean(std) over seeds, std with ddof = 0 as in the paper's tables."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return "–"
    mean = sum(known) / len(known)
    deviation = (sum((value - mean) ** 2 for value in known) / len(known)) ** 0.5
    return f"{mean:.1f}({deviation:.1f})"


def readings_grid(title: str, readings: Mapping[str, Mapping[str, float | None]]) -> Grid:
    """Return one run's four readings on both tests."""
    rows = [
        [READING_TITLES[reading], *(percent(readings[test][reading]) for test in TESTS)]
        for reading in READINGS
    ]
    return Grid(title, ["accuracy %, last round", *(f"{test} test" for test in TESTS)], rows)


def clients_grid(title: str, summary: Mapping[str, Any]) -> Grid:
    """Return one run's headline accuracy by client."""
    rows = [[name, percent(value)] for name, value in summary["accuracy_per_client"].items()]
    return Grid(title, ["client", "accuracy %"], rows)
