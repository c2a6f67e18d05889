"""Tables that fit 100 columns, for the terminal and for Markdown."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

import numpy
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mpfedcl.methods import PREDICTORS, TESTS
from mpfedcl.report.number_formatting import deviation, finite_values, mean
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
READING_GROUPS = {"without a label prior": PREDICTORS[:4], "with a label prior": PREDICTORS[4:]}
"""All predictors, in two tables: side by side they do not fit."""
FAIRNESS_TITLES = {
    "worst": "worst client",
    "worst_decile": "worst tenth",
    "best_decile": "best tenth",
    "std": "spread",
}
FAIRNESS_NOTE = (
    "worst tenth: mean of the worst tenth of the clients, of one at least; spread: standard "
    "deviation over clients (ddof 1); Jain's index: 1 where all clients are served alike."
)
MARKS = {"best": "▲", "within": "≈"}
"""Signs before a number, so that numbers stay in line: not the star that marks a predictor."""
_BETWEEN = 3
"""Characters between two columns; as many are at the two edges together, less one."""
_MOST_CLIENTS, _WORST_CLIENTS = 20, 5
"""Up to how many clients are listed one by one, and how many of more."""
_QUARTILES = (25, 50, 75)
_NUMBER = re.compile(r"[-·]\*?|[▲≈+-]?[\d,]+(\.\d+)?(\([\d.]+\))?(✗\d+)?\*?")


@dataclass
class TextTable:
    """A table as rows of text, shown either way, with a note below it."""

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


def percent(value: float | None) -> str:
    """Return an accuracy with one decimal, a dash where there is none."""
    return "-" if value is None else f"{value:.1f}"


def mean_and_deviation(values: Sequence[float | None], *, ddof: int = 1) -> str:
    """Return mean(std) over seeds; a dash where no seed has a number.

    "✗1" after it says that one seed has none: the mean is of the others, and nobody ranks it.
    """
    known = finite_values(values)
    if not known:
        return "-"
    missing = f"✗{len(values) - len(known)}" if len(known) < len(values) else ""
    spread = "" if len(known) == 1 else f"({deviation(known, ddof):.1f})"
    return f"{mean(known):.1f}{spread}{missing}"


def explain_deviation(num_seeds: int) -> str:
    """Say what stands in parentheses."""
    return "" if num_seeds < 2 else "(std): standard deviation over seeds, ddof 1."


def explain_divergence(diverged: Mapping[str, Sequence[int]]) -> str:
    """Name the runs that diverged, by method and seed; nothing where there are none."""
    told = [
        f"{name}, seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
        for name, seeds in diverged.items()
        if seeds
    ]
    if not told:
        return ""
    return (
        f"Diverged: {'; '.join(told)}. Nothing that clients sent in the last round could be used. "
        "Where the server has kept a model, the number is that model's; ✗1: one seed has no number "
        "and is not in the mean."
    )


def explain_marks(num_seeds: int) -> str:
    """Return the legend of the marks, in words, with what so many seeds allow one to say."""
    if num_seeds < 2:
        return f"{MARKS['best']} best of one seed; one seed cannot show what is noise."
    reach = interval_half_width(num_seeds)
    wide = ", so few differences are clear" if reach > 1 else ""
    return (
        f"{MARKS['best']} best mean; {MARKS['within']} not clearly behind: 0 is in the 95 % "
        f"interval of the difference, paired by seed.\nWith {num_seeds} seeds the interval reaches "
        f"{reach:.1f} deviations of the difference each way{wide}."
    )


def judged_by(entry: Mapping[str, Any]) -> dict[str, str]:
    """Return the reading for each test; older files name one for both."""
    return {
        "local_test": entry["predictor"],
        "global_test": entry.get("predictor_global") or entry["predictor"],
    }


def name_predictors(predictors: Iterable[str]) -> str:
    """Return predictors in words, each once."""
    return "; ".join(PREDICTOR_TITLES[each] for each in dict.fromkeys(predictors))


def name_encoders(encoders: Mapping[str, str | None]) -> str:
    """Say which methods see samples through which encoder, where that differs."""
    methods: dict[str, list[str]] = {}
    for method, encoder in encoders.items():
        methods.setdefault(encoder or "none", []).append(method)
    if len(methods) < 2:
        return ""
    seen = "; ".join(f"{encoder} ({', '.join(names)})" for encoder, names in methods.items())
    return f"The methods use different encoders: {seen}."


def explain_prior(predictors: Iterable[str]) -> str:
    """Return what a prior is, where one of the predictors has one."""
    if not {*predictors} & {*READING_GROUPS["with a label prior"]}:
        return ""
    return (
        "prior: the client's own shares of labels are added to the scores;\n"
        "estimated: they are found from its unlabeled test samples."
    )


def tests_differ(own: Mapping[Any, Any], union: Mapping[Any, Any]) -> bool:
    """Tell by what was read on both whether these are two tests, or one that all clients share."""
    pairs = [(own.get(name), value) for name, value in union.items()]
    # Means over clients of one and the same number are a rounding apart.
    return any(
        None not in pair and not math.isclose(*pair, abs_tol=1e-6)  # type: ignore[arg-type]
        for pair in pairs
    )


def fairness_table(methods: Mapping[str, Any]) -> TextTable:
    """Return who is served worst by each method of a comparison."""
    rows = []
    for name, entry in methods.items():
        known = [each or {} for each in entry["fairness"]]
        numbers = ([each.get(key) for each in known] for key in FAIRNESS_TITLES)
        rows.append([name, *(mean_and_deviation(each) for each in numbers)])
        rows[-1].append(f"{mean(jain):.3f}" if (jain := _known(known, "jain")) else "-")
    return TextTable(
        "who is served worst, by the method's own predictor on each client's local test set",
        ["method", *FAIRNESS_TITLES.values(), "Jain's index"],
        rows,
        FAIRNESS_NOTE,
    )


def _known(several: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return finite_values([each.get(key) for each in several])


def predictors_table(title: str, summary: Mapping[str, Any]) -> TextTable:
    """Return the predictors on both tests of a run, of which its summary tells."""
    predictors, judged = summary["predictors"], judged_by(summary)
    is_known = any(value is not None for value in predictors["global_test"].values())
    shared = is_known and not tests_differ(predictors["local_test"], predictors["global_test"])
    shared = shared and len(set(judged.values())) == 1
    titles = (
        {"local_test": "test"}
        if shared
        else {test: f"{test.replace('_', ' ')} set" for test in TESTS}
    )

    def cell(test: str, predictor: str) -> str:
        star = "*" if predictor == judged[test] else ""
        return percent(predictors[test].get(predictor)) + star

    return TextTable(
        title,
        ["accuracy %, last round", *titles.values()],
        [[PREDICTOR_TITLES[each], *(cell(test, each) for test in titles)] for each in PREDICTORS],
        f"* the predictor that the method is judged by on this test.\n{explain_prior(PREDICTORS)}",
    )


def clients_table(
    title: str,
    accuracies: Mapping[str, float | None],
    spread: Mapping[str, Any] | None = None,
) -> TextTable:
    """Return each client's accuracy; of many clients what they have in common, and the worst.

    `spread` is of all clients, where not all are listed.
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
    """Return what is known of clients that are too many to be listed."""
    known = {name: value for name, value in listed.items() if value is not None}
    return TextTable(
        title,
        [f"of {spread['clients']:,} clients", "accuracy %"],
        [
            *_spread_rows(spread["mean"], spread["quartiles"]),
            *([f"worst of the last round: {name}", percent(known[name])] for name in _worst(known)),
        ],
        f"accuracy_per_client in summary.json lists {len(known):,}: who took part in the last round"
        " and was read.",
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
