"""Tables for the terminal and Markdown.

A table of the report is {caption, columns, rows, notes} with cells {text, mark?, note?, strong?}.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from textwrap import fill
from types import MappingProxyType
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mpfedcl.core.json_files import Json
from mpfedcl.experiment.names import metric_title
from mpfedcl.methods import PREDICTORS
from mpfedcl.report.wording import (
    MARKS,
    ONE_TEST,
    PREDICTOR_TITLES,
    TEST_TITLES,
    explain_prior,
    metric_value,
    percent,
    tests_differ,
)

_BETWEEN = 3
"""Characters between two columns; as many are at the two edges together, less one."""
_WIDTH = 100
_MOST_CLIENTS = 20
METRIC_NOTE = (
    "On local test sets over the samples of all clients together, on the global test set the mean "
    "over clients. NLL, Brier score and ECE: smaller is better. *: the primary metric."
)
_NUMBER = re.compile(r"[-·]\*?|[▲≈+-]?[\d,]+(\.\d+)?(\([\d.]+\))?(✗\d+)?\*?")


@dataclass
class TextTable:
    """A table as rows of text, with a note below it."""

    title: str
    columns: Sequence[str]
    rows: list[list[str]]
    note: str = ""

    def show(self, console: Console) -> None:
        """Print to a terminal or a file, numbers to the right.

        A table too wide for its numbers to be whole is printed in parts, each with the first
        column.
        """
        # A title of the table's own would be folded to the table's width.
        console.print(self.title, style="bold")
        numeric = self._numeric_columns()
        for part in self._column_parts(console.width + 1):
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            for place in part:
                table.add_column(self.columns[place], justify="right" if numeric[place] else "left")
            for row in self.rows:
                table.add_row(*(Text(row[place]) for place in part))
            console.print(table)
        if self.note:
            lines = [fill(line, console.width) for line in self.note.splitlines()]
            console.print("\n".join(lines) + "\n")

    def markdown(self) -> str:
        """Return the table in Markdown, its note below it."""
        rule = ["---:" if numeric else "---" for numeric in self._numeric_columns()]
        lines = [self.columns, rule, *self.rows]
        table = "".join("| " + " | ".join(line) + " |\n" for line in lines)
        return f"{table}\n{self.note}\n" if self.note else table

    def text(self) -> str:
        """Return the table as lines of at most 100 columns."""
        plain: Any = {"markup": False, "highlight": False, "color_system": None}
        # In a notebook a console would otherwise print, whatever its file is.
        plain["force_jupyter"] = False
        written = StringIO()
        self.show(Console(file=written, width=_WIDTH, **plain))
        return written.getvalue().rstrip()

    def _column_parts(self, room: int) -> list[list[int]]:
        """Return the columns of each part: all of them if the longest words fit.

        Otherwise there are as few parts as possible, with about equally many columns.
        """
        texts = zip(self.columns, *self.rows, strict=True)
        words = [[len(word) for cell in column for word in cell.split()] for column in texts]
        widths = [max(each, default=0) + _BETWEEN for each in words]
        others = range(1, len(widths))
        for number in others:
            size = -(-len(others) // number)
            parts = [[0, *others[start : start + size]] for start in range(0, len(others), size)]
            if all(sum(widths[place] for place in part) <= room for part in parts):
                return parts
        return [[0, place] for place in others] or [[0]]

    def _numeric_columns(self) -> list[bool]:
        """Return for each column whether all its cells are numbers, or marks for none."""
        places = range(len(self.columns))
        return [all(_NUMBER.fullmatch(row[place]) for row in self.rows) for place in places]


def text_table(table: Json, title: str = "", *, noted: str = "") -> TextTable:
    """Return a table of the report as rows of text.

    A star marks what is strong. Notes of the first column become a column `noted`.
    """
    rows = [[_cell_text(cell) for cell in row] for row in table["rows"]]
    columns = list(table["columns"])
    if noted:
        columns.append(noted)
        for row, cells in zip(rows, table["rows"], strict=True):
            row.append(cells[0].get("note", ""))
    heading = "\n".join(each for each in (title, table["caption"]) if each)
    return TextTable(heading, columns, rows, "\n".join(each for each in table["notes"] if each))


def _cell_text(cell: Json) -> str:
    mark = MARKS[cell["mark"]] if cell.get("mark") else ""
    return f"{mark}{cell['text']}{'*' if cell.get('strong') else ''}"


def cell(
    text: str, *, mark: str | None = None, note: str | None = None, strong: bool | None = None
) -> Json:
    """Return a cell of a table of the report."""
    more = {"mark": mark, "note": note or None, "strong": strong}
    return {"text": text} | {name: value for name, value in more.items() if value is not None}


def predictors_table(caption: str, values: Mapping[Any, Any], judged: Mapping[Any, str]) -> Json:
    """Return the accuracies of all predictors of a run on both test sets.

    `judged` is the primary predictor on each.
    """
    known = any(value is not None for value in values["global_test"].values())
    shared = known and not tests_differ(values["local_test"], values["global_test"])
    shared = shared and len(set(judged.values())) == 1
    titles = {"local_test": "test set"} if shared else TEST_TITLES
    rows = [
        [cell(PREDICTOR_TITLES[each])]
        + [cell(percent(values[t].get(each)), strong=each == judged[t]) for t in titles]
        for each in PREDICTORS
    ]
    tests = "local test set: each client's own test samples; global: those of all clients."
    notes = [
        "*: the primary metric on this test set.",
        "personal: each client's personalized model, mean over clients; global: the server's "
        f"model. classifier: the last layer; prototype: the nearest prototype. "
        f"{ONE_TEST if shared else tests}",
        explain_prior(PREDICTORS),
    ]
    columns = ["predictor", *titles.values()]
    return {"caption": caption, "columns": columns, "rows": rows, "notes": notes}


def metrics_table(
    found: Mapping[Any, Mapping[str, float | None]], metric: str, *, shared: bool
) -> Json:
    """Return all metrics of a run on both test sets, or on one that all clients share.

    `metric` is the primary one.
    """
    tests = {"local_test": "test set"} if shared else TEST_TITLES
    rows = [
        [cell(metric_title(name))]
        + [cell(metric_value(name, found[t].get(name)), strong=name == metric) for t in tests]
        for name in found["local_test"]
    ]
    caption = "Metrics of the primary predictor in the last round"
    columns = ["metric", *tests.values()]
    return {"caption": caption, "columns": columns, "rows": rows, "notes": [METRIC_NOTE]}


def clients_table(
    title: str,
    accuracies: Mapping[str, float | None],
    metric: str = "accuracy",
    values: Mapping[str, Mapping[str, float | None]] = MappingProxyType({}),
) -> TextTable:
    """Return each client's accuracy, and another metric if asked; of many clients the lowest."""
    ranked = sorted(accuracies, key=lambda name: (accuracies[name] is None, accuracies[name]))
    lowest = set(ranked[:_MOST_CLIENTS])
    columns = ["client", "accuracy %"]
    rows = [[name, percent(value)] for name, value in accuracies.items() if name in lowest]
    if metric != "accuracy":
        columns.append(metric_title(metric))
        for row in rows:
            row.append(metric_value(metric, values.get(row[0], {}).get(metric)))
    note = ""
    if left_out := len(accuracies) - len(rows):
        note = f"The lowest; {left_out:,} more: accuracy_per_client in summary.json."
    return TextTable(title, columns, rows, note)
