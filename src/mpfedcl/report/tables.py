"""Tables: for the terminal within 100 columns, in Markdown, in a notebook; and their sentences.

A table of the report is {caption, columns, rows, notes} with cells {text, mark?, note?, strong?}.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from textwrap import fill
from typing import Any

import numpy
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mpfedcl.core.json_files import Json
from mpfedcl.methods import PREDICTORS
from mpfedcl.report.formatting import deviation, finite_values, mean
from mpfedcl.studies.statistics import interval_half_width

PREDICTOR_TITLES = {
    "personal_classifier": "personal, classifier",
    "personal_prototype": "personal, prototype",
    "global_classifier": "global, classifier",
    "global_prototype": "global, prototype",
    "personal_classifier_prior": "personal, classifier + prior",
    "global_classifier_prior": "global, classifier + prior",
    "global_prototype_prior": "global, prototype + prior",
    "global_classifier_estimated": "global, classifier + estimated prior",
}
TEST_TITLES = {"local_test": "local test set", "global_test": "global test set"}
PREDICTOR_GROUPS = {"without a label prior": PREDICTORS[:4], "with a label prior": PREDICTORS[4:]}
"""All predictors, in two tables: in one they do not fit."""
MARKS = {"best": "▲", "within": "≈"}
"""Signs before a number. A star marks the primary metric."""
ONE_TEST = "All clients share one test set."
_BETWEEN = 3
"""Characters between two columns; as many are at the two edges together, less one."""
_WIDTH = 100
_MOST_CLIENTS, _WORST_CLIENTS = 20, 5
"""Up to how many clients are listed one by one, and how many of more."""
_MOST_NAMES = 5
_QUARTILES = (25, 50, 75)
_NUMBER = re.compile(r"[-·]\*?|[▲≈+-]?[\d,]+(\.\d+)?(\([\d.]+\))?(✗\d+)?\*?")
_CELL = "text-align: {}; padding: 0.2em 0.8em"


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

    def _column_parts(self, room: int) -> list[list[int]]:
        """Return the columns of each part: all of them, where the longest words fit.

        Else there are as few parts as there can be, with about equally many columns.
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
        """Tell for each column whether all its cells are numbers, or marks for none."""
        cells: list[list[str]] = [[row[i] for row in self.rows] for i in range(len(self.columns))]
        return [all(_NUMBER.fullmatch(cell) for cell in column) for column in cells]


def text_table(table: Json, title: str = "", *, noted: str = "") -> TextTable:
    """Return a table of the report as rows of text.

    A star marks what is strong. Notes of the first column become a column `noted`.
    """
    rows = [[_cell_text(cell) for cell in row] for row in table["rows"]]
    columns = list(table["columns"])
    if noted:
        columns.append(noted)
        rows = [
            [*row, cells[0].get("note") or ""]
            for row, cells in zip(rows, table["rows"], strict=True)
        ]
    heading = "\n".join(each for each in (title, table["caption"]) if each)
    return TextTable(heading, columns, rows, "\n".join(each for each in table["notes"] if each))


def table_as_text(heading: str, table: Json) -> str:
    """Return a table of the report as lines of at most 100 columns."""
    text = StringIO()
    # In a notebook a console would otherwise print, whatever its file is.
    plain = Console(
        file=text,
        width=_WIDTH,
        markup=False,
        highlight=False,
        color_system=None,
        force_jupyter=False,
    )
    text_table(table).show(plain)
    return f"{heading}\n{text.getvalue().rstrip()}"


def table_as_html(heading: str, table: Json) -> str:
    """Return a table of the report as HTML for a notebook, with escaped names."""
    head = _html_row("th", table["columns"])
    body = "".join(_html_row("td", [_cell_text(cell) for cell in row]) for row in table["rows"])
    notes = "<br>".join(escape(note) for note in table["notes"] if note)
    return (
        f"<div><b>{escape(heading)}</b><br>{escape(table['caption'])}"
        f"<table><thead>{head}</thead><tbody>{body}</tbody></table><small>{notes}</small></div>"
    )


def _html_row(kind: str, texts: Sequence[str]) -> str:
    # Names to the left; notebooks align everything to the right.
    sides = ["left", *["right"] * (len(texts) - 1)]
    cells = [
        f'<{kind} style="{_CELL.format(side)}">{escape(text)}</{kind}>'
        for side, text in zip(sides, texts, strict=True)
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _cell_text(cell: Json) -> str:
    mark = MARKS[cell["mark"]] if cell.get("mark") else ""
    return f"{mark}{cell['text']}{'*' if cell.get('strong') else ''}"


def cell(text: str, *, mark: str | None = None, note: str | None = None) -> Json:
    """Return a cell of a table of the report."""
    return {"text": text} | ({"mark": mark} if mark else {}) | ({"note": note} if note else {})


def percent(value: float | None) -> str:
    """Return an accuracy with one decimal, a dash for None."""
    return "-" if value is None else f"{value:.1f}"


def mean_and_deviation(values: Sequence[float | None]) -> str:
    """Return mean(std) over seeds; a dash if no seed has a number.

    "✗1" after it: one seed has no number, and the mean is of the others.
    """
    known = finite_values(values)
    if not known:
        return "-"
    missing = f"✗{len(values) - len(known)}" if len(known) < len(values) else ""
    spread = "" if len(known) == 1 else f"({deviation(known):.1f})"
    return f"{mean(known):.1f}{spread}{missing}"


def explain_deviation(num_seeds: int) -> str:
    """Return what stands in parentheses."""
    return "" if num_seeds < 2 else "(std): standard deviation over seeds, ddof 1."


def explain_divergence(diverged: Mapping[str, Sequence[int]]) -> str:
    """Return the runs that diverged, by method and seed; nothing if none did."""
    told = [
        f"{name}, seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
        for name, seeds in diverged.items()
        if seeds
    ]
    if not told:
        return ""
    return (
        f"Diverged: {'; '.join(told)}. No update of the last round could be used. If the server has "
        "an earlier model, the number is that model's. ✗1: one seed has no number and is not in "
        "the mean."
    )


def explain_marks(num_seeds: int) -> str:
    """Return the legend of the marks, and how much so many seeds can show."""
    if num_seeds < 2:
        return (
            f"{MARKS['best']} best of one seed. One seed cannot separate a difference from chance."
        )
    reach = interval_half_width(num_seeds)
    wide = ", so few differences are clear" if reach > 1 else ""
    return (
        f"{MARKS['best']} best mean; {MARKS['within']} not clearly behind: 0 is in the 95 % "
        f"interval of the difference, paired by seed. With {num_seeds} seeds the interval reaches "
        f"{reach:.1f} deviations of the difference each way{wide}."
    )


def judged_by(entry: Mapping[str, Any]) -> dict[str, str]:
    """Return the primary predictor on each test set, as a summary names it."""
    return {
        "local_test": entry["predictor"],
        "global_test": entry.get("predictor_global") or entry["predictor"],
    }


def name_predictors(predictors: Iterable[str]) -> str:
    """Return the titles of predictors, each once."""
    return "; ".join(PREDICTOR_TITLES[each] for each in dict.fromkeys(predictors))


def name_encoders(encoders: Mapping[str, str | None]) -> str:
    """Return which methods use which encoder; nothing if all use the same."""
    methods: dict[str, list[str]] = {}
    for method, encoder in encoders.items():
        methods.setdefault(encoder or "none", []).append(method)
    if len(methods) < 2:
        return ""
    seen = "; ".join(f"{encoder} ({', '.join(names)})" for encoder, names in methods.items())
    return f"The methods use different encoders: {seen}."


def explain_prior(predictors: Iterable[str]) -> str:
    """Return the meaning of a prior if one of the predictors has one."""
    if not {*predictors} & {*PREDICTOR_GROUPS["with a label prior"]}:
        return ""
    return (
        "prior: the client's own label distribution is added to the scores; estimated: this "
        "distribution is estimated from its unlabeled test samples."
    )


def tests_differ(own: Mapping[Any, Any], union: Mapping[Any, Any]) -> bool:
    """Return whether two test sets gave these accuracies, or one that all clients share."""
    pairs = [(own.get(name), value) for name, value in union.items()]
    # Means over clients of one and the same number are a rounding apart.
    return any(
        None not in pair and not math.isclose(*pair, abs_tol=1e-6)  # type: ignore[arg-type]
        for pair in pairs
    )


def predictors_table(caption: str, values: Mapping[Any, Any], judged: Mapping[Any, str]) -> Json:
    """Return the accuracies of all predictors of a run on both test sets.

    `judged` is the primary predictor on each.
    """
    known = any(value is not None for value in values["global_test"].values())
    shared = known and not tests_differ(values["local_test"], values["global_test"])
    shared = shared and len(set(judged.values())) == 1
    titles = {"local_test": "test set"} if shared else TEST_TITLES

    def accuracy(test: str, predictor: str) -> Json:
        value, is_primary = values[test].get(predictor), predictor == judged[test]
        return cell(percent(value)) | {"strong": is_primary}

    rows = [
        [cell(PREDICTOR_TITLES[each]), *(accuracy(test, each) for test in titles)]
        for each in PREDICTORS
    ]
    notes = [
        "*: the primary metric on this test set.",
        "personal: each client's personalized model, mean over clients; global: the server's "
        "model. classifier: the last layer; prototype: the nearest prototype. "
        + (
            ONE_TEST
            if shared
            else "local test set: each client's own test samples; global: those of all clients."
        ),
        explain_prior(PREDICTORS),
    ]
    return {
        "caption": caption,
        "columns": ["predictor", *titles.values()],
        "rows": rows,
        "notes": notes,
    }


def clients_table(
    title: str,
    accuracies: Mapping[str, float | None],
    spread: Mapping[str, Any] | None = None,
) -> TextTable:
    """Return each client's accuracy; of many clients the quartiles and the worst.

    `spread` is over all clients if not all are listed.
    """
    if spread is not None:
        return _spread_table(title, accuracies, spread)
    known = {name: value for name, value in accuracies.items() if value is not None}
    if len(accuracies) <= _MOST_CLIENTS or not known:
        rows = [[name, percent(value)] for name, value in accuracies.items()]
        return TextTable(title, ["client", "accuracy %"], rows)
    quartiles = numpy.percentile(list(known.values()), _QUARTILES).tolist()
    untested = len(accuracies) - len(known)
    return TextTable(
        title,
        [f"of {len(known)} clients", "accuracy %"],
        [
            *_spread_rows(mean(list(known.values())), quartiles),
            *([f"among the worst: {name}", percent(known[name])] for name in _worst(known)),
        ],
        "All clients: accuracy_per_client in summary.json."
        + (f" {untested} have no number there." if untested else ""),
    )


def _spread_table(
    title: str, listed: Mapping[str, float | None], spread: Mapping[str, Any]
) -> TextTable:
    """Return the quartiles over all clients, and the worst of those that are listed."""
    known = {name: value for name, value in listed.items() if value is not None}
    return TextTable(
        title,
        [f"of {spread['clients']:,} clients", "accuracy %"],
        [
            *_spread_rows(spread["mean"], spread["quartiles"]),
            *([f"worst of the last round: {name}", percent(known[name])] for name in _worst(known)),
        ],
        f"accuracy_per_client in summary.json lists {len(known):,}: the clients evaluated in the "
        "last round.",
    )


def _spread_rows(middle: float | None, quartiles: Sequence[float]) -> list[list[str]]:
    first, median, third = quartiles
    return [
        ["mean", percent(middle)],
        ["upper quartile", percent(third)],
        ["median", percent(median)],
        ["lower quartile", percent(first)],
    ]


def _worst(known: Mapping[str, float]) -> list[str]:
    return sorted(known, key=lambda name: known[name])[:_WORST_CLIENTS]


# Sentences


def describe_mean(
    accuracies: Mapping[str, float | None] | None,
    clients: Collection[str],
    spread: Mapping[str, Any] | None = None,
) -> str:
    """Return over which clients the primary metric is the mean; `clients` are all of the run.

    `spread` is over the evaluated clients if not all are listed.
    """
    if spread is not None:
        return _describe_many(spread["clients"], len(clients))
    found = accuracies or {}
    left_out = [name for name in sorted({*clients, *found}) if found.get(name) is None]
    if not left_out:
        return "mean over clients"
    total = len({*clients, *found})
    more = len(left_out) - _MOST_NAMES
    names = ", ".join(left_out[:_MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")
    return f"mean over {total - len(left_out):,} of {total:,} clients (not evaluated: {names})"


def _describe_many(read: int, total: int) -> str:
    if read >= total:
        return "mean over clients"
    return f"mean over {read:,} of {total:,} clients (the others were not evaluated)"


def describe_server_model(
    predictors: Mapping[Any, Mapping[Any, float | None]], judged: Mapping[Any, str]
) -> list[str]:
    """Return the accuracy of the server's model if the primary metric is of personalized models.

    `judged` is the primary predictor on each test set.
    """
    if not str(judged.get("local_test")).startswith("personal"):
        return []
    stay = (
        "The primary metric is of the personalized models, which stay with the clients: there, "
        "mpfedcl predict DIR/clients/NAME IMAGES uses them."
    )
    predictor = str(judged.get("global_test"))
    value = predictors.get("local_test", {}).get(predictor)
    if not predictor.startswith("global") or value is None:
        return [stay, "The server has no model of its own."]
    return [
        f"The server's model reaches {percent(value)} % on the same test sets "
        f"({PREDICTOR_TITLES[predictor]}).",
        stay,
    ]


def fairness_sentence(summary: Mapping[str, Any]) -> str:
    """Return the spread of accuracy over clients; nothing for one client, or if it is unknown."""
    found = summary.get("fairness")
    if not found or found["clients"] < 2:
        return ""
    return (
        f"spread over clients: std {found['std']:.1f} (ddof 1), "
        f"worst client {found['worst']:.1f} %, worst tenth {found['worst_decile']:.1f} %, "
        f"Jain's index {found['jain']:.3f}"
    )


def calibration_sentence(summary: Mapping[str, Any]) -> str:
    """Return the expected calibration error of a run; nothing if it predicts no probabilities."""
    found = summary.get("calibration_error") or {}
    told = [
        f"{value:.1f} % on the {TEST_TITLES[test]}"
        for test, value in found.items()
        if value is not None
    ]
    return f"expected calibration error: {', '.join(told)}" if told else ""
