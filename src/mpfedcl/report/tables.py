"""Tables for the terminal, Markdown and notebooks; their sentences, values and names as text.

A table of the report is {caption, columns, rows, notes} with cells {text, mark?, note?, strong?}.
"""

import json
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
from mpfedcl.methods import PREDICTORS, PredictorKind
from mpfedcl.studies.statistics import interval_half_width

_PRIORS = {"none": "", "labels": " + prior", "estimated": " + estimated prior"}
_KINDS = {name: PredictorKind.of(name) for name in PREDICTORS}
PREDICTOR_TITLES: dict[str, str] = {
    name: f"{kind.model}, {kind.rule}{_PRIORS[kind.prior]}" for name, kind in _KINDS.items()
}
TEST_TITLES = {"local_test": "local test set", "global_test": "global test set"}
PREDICTOR_GROUPS = {
    "without a label prior": [name for name, kind in _KINDS.items() if kind.prior == "none"],
    "with a label prior": [name for name, kind in _KINDS.items() if kind.prior != "none"],
}
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

    def html(self) -> str:
        """Return the table for a notebook: numbers to the right, and names escaped."""
        sides = ["right" if numeric else "left" for numeric in self._numeric_columns()]

        def row(kind: str, texts: Sequence[str]) -> str:
            cells = [
                f'<{kind} style="text-align: {side}; padding: 0.2em 0.8em">{escape(text)}</{kind}>'
                for side, text in zip(sides, texts, strict=True)
            ]
            return f"<tr>{''.join(cells)}</tr>"

        first, *others = (escape(line) for line in self.title.splitlines())
        body = "".join(row("td", each) for each in self.rows)
        return (
            f"<div><b>{first}</b>{''.join(f'<br>{line}' for line in others)}"
            f"<table><thead>{row('th', self.columns)}</thead><tbody>{body}</tbody></table>"
            f"<small>{escape(self.note).replace(chr(10), '<br>')}</small></div>"
        )

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


def explain_divergence(diverged: Mapping[str, Sequence[int]]) -> str:
    """Return the runs that diverged, by method and seed; nothing if none did."""
    named = [
        f"{name}, seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
        for name, seeds in diverged.items()
        if seeds
    ]
    if not named:
        return ""
    return (
        f"Diverged: {'; '.join(named)}. No update of the last round could be used. If the server "
        "has an earlier model, the number is that model's. ✗1: one seed has no number and is not "
        "in the mean."
    )


def explain_marks(num_seeds: int) -> str:
    """Return the legend of the marks, and what this number of seeds can show."""
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


def explain_prior(predictors: Iterable[str]) -> str:
    """Return the meaning of a prior if one of the predictors has one."""
    if all(PredictorKind.of(each).prior == "none" for each in predictors):
        return ""
    return (
        "prior: the client's own label distribution is added to the scores; estimated: this "
        "distribution is estimated from its unlabeled test samples."
    )


def title_tests(groups: Sequence[Json]) -> dict[Any, str]:
    """Return the test sets with their titles: one if all clients of all groups share it."""
    return {"local_test": "test set"} if all(g["shared_test"] for g in groups) else TEST_TITLES


def tests_differ(local: Mapping[Any, Any], union: Mapping[Any, Any]) -> bool:
    """Return whether two test sets gave these accuracies, or one that all clients share."""
    pairs = [(local.get(name), value) for name, value in union.items()]
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


def clients_table(
    title: str,
    accuracies: Mapping[str, float | None],
    spread: Mapping[str, Any] | None = None,
) -> TextTable:
    """Return each client's accuracy; of many clients the quartiles and the worst.

    `spread` is over all clients if not all are listed.
    """
    known = {name: value for name, value in accuracies.items() if value is not None}
    if spread is None and (len(accuracies) <= _MOST_CLIENTS or not known):
        rows = [[name, percent(value)] for name, value in accuracies.items()]
        return TextTable(title, ["client", "accuracy %"], rows)
    if spread is None:
        values = list(known.values())
        quartiles = numpy.percentile(values, _QUARTILES).tolist()
        spread = {"clients": len(known), "mean": mean(values), "quartiles": quartiles}
        worst, note = "among the worst", "All clients: accuracy_per_client in summary.json."
        if untested := len(accuracies) - len(known):
            note += f" {untested} have no number there."
    else:
        worst = "worst of the last round"
        note = (
            f"accuracy_per_client in summary.json lists {len(known):,}: the clients evaluated in "
            "the last round."
        )
    first, median, third = spread["quartiles"]
    rows = [
        ["mean", percent(spread["mean"])],
        ["upper quartile", percent(third)],
        ["median", percent(median)],
        ["lower quartile", percent(first)],
    ]
    for name in sorted(known, key=lambda name: known[name])[:_WORST_CLIENTS]:
        rows.append([f"{worst}: {name}", percent(known[name])])
    return TextTable(title, [f"of {spread['clients']:,} clients", "accuracy %"], rows, note)


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
        count, total = spread["clients"], len(clients)
        if count >= total:
            return "mean over clients"
        return f"mean over {count:,} of {total:,} clients (the others were not evaluated)"
    found = accuracies or {}
    left_out = [name for name in sorted({*clients, *found}) if found.get(name) is None]
    if not left_out:
        return "mean over clients"
    total = len({*clients, *found})
    names = enumerate_names(left_out, _MOST_NAMES)
    return f"mean over {total - len(left_out):,} of {total:,} clients (not evaluated: {names})"


def describe_server_model(
    predictors: Mapping[Any, Mapping[Any, float | None]], judged: Mapping[Any, str]
) -> list[str]:
    """Return the accuracy of the server's model if the primary metric is of personalized models.

    `judged` is the primary predictor on each test set.
    """
    if PredictorKind.of(judged["local_test"]).model != "personal":
        return []
    stay = (
        "The primary metric is of the personalized models, which stay with the clients: there, "
        "mpfedcl predict DIR/clients/NAME IMAGES uses them."
    )
    predictor = judged["global_test"]
    value = predictors.get("local_test", {}).get(predictor)
    if PredictorKind.of(predictor).model != "global" or value is None:
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
    errors = [
        f"{value:.1f} % on the {TEST_TITLES[test]}"
        for test, value in found.items()
        if value is not None
    ]
    return f"expected calibration error: {', '.join(errors)}" if errors else ""


Numbers = Sequence[float | None]
_SPECIAL = re.compile(r"([\\`*_\[\]<>|&~$@]|:(?=//)|(?<=www)\.)", re.IGNORECASE)
"""Characters that Markdown acts on within a line, and those in addresses, which some readers turn
into links."""


def rounded(value: float | None, digits: int = 2) -> float | None:
    """Return a number with this many decimals; None if it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return round(value, digits)


def round_significant(value: float | None, digits: int = 4) -> float | None:
    """Return a number with this many significant digits; None if it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


def choose_evenly(count: int, most: int) -> list[int]:
    """Return at most `most` places of `count`, evenly spread, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [round(place * (count - 1) / (most - 1)) for place in range(most)]


def finite_values(values: Numbers) -> list[float]:
    """Return the numbers among the values."""
    return [value for value in values if value is not None and math.isfinite(value)]


def mean(values: Sequence[float]) -> float | None:
    """Return the mean, None of nothing."""
    return sum(values) / len(values) if values else None


def deviation(values: Sequence[float]) -> float | None:
    """Return the standard deviation (ddof 1), None of fewer than two values."""
    middle = mean(values)
    if middle is None or len(values) < 2:
        return None
    return math.sqrt(sum((value - middle) ** 2 for value in values) / (len(values) - 1))


def printable_name(name: str, longest: int = 80) -> str:
    """Return a name of limited length in which all characters are printable."""
    seen = "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name
    )
    return seen if len(seen) <= longest else f"{seen[: longest - 1]}…"


def escape_markdown(name: str) -> str:
    """Return a name that Markdown shows as plain text within a line or a cell."""
    return _SPECIAL.sub(r"\\\1", printable_name(name).strip()) or "(no name)"


def code_block(text: str, language: str = "") -> str:
    """Return a block of code that no line of the text can end."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    ticks = "`" * max(3, longest + 1)
    return f"{ticks}{language}\n{text}\n{ticks}\n"


def yaml_string(value: str) -> str:
    """Return a quoted string for YAML, which accepts the strings of JSON."""
    return json.dumps(printable_name(value), ensure_ascii=False)


def enumerate_names(names: Iterable[str], most: int) -> str:
    """Return the first `most` names and the number of the others."""
    several = list(names)
    more = f" and {len(several) - most:,} more" if len(several) > most else ""
    return ", ".join(several[:most]) + more
