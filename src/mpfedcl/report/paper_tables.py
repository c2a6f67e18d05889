"""The paper's tables: our numbers with marks, and beside them the paper's own."""

import statistics
from collections.abc import Callable
from typing import Any

from mpfedcl.report.tables import MARKS, TextTable, explain_marks, mean_and_deviation, percent
from mpfedcl.studies.paper.results import group_cells
from mpfedcl.studies.tuning.result import describe_changes

_QUICK = "Quick: a few rounds and one seed show that everything runs; the numbers mean nothing."
READ_AS_IN_PAPER = (
    "Predicted as in the paper, on every test: the FedCL family and FedProto with each client's\n"
    "own model and the nearest prototype."
)
_TRACK_TITLES = {
    "paper": "the paper's settings",
    "tuned": "each method tuned on validation data",
}


def build_tables(result: dict[str, Any]) -> list[TextTable]:
    """Return an item's tables, one per track, panel and test, and the paper's numbers beside ours.

    The settings of the tuned track come last.
    """
    several_tracks = len({cell["track"] for cell in result["cells"]}) > 1
    found = []
    for (track, panel, test), cells in group_cells(result).items():
        parts = [result["title"], panel, test, _TRACK_TITLES[track] if several_tracks else ""]
        title = ", ".join(part for part in parts if part)
        found.append(_build_table(result, title, cells, format_cell))
        known = [cell for cell in cells if cell["published"]]
        if known and not result.get("quick"):
            title = f"{title}: the paper's, and ours less the paper's"
            found.append(_build_table(result, title, known, _format_published))
    return [*found, _chosen_settings_table(result)] if result.get("chosen") else found


def _chosen_settings_table(result: dict[str, Any]) -> TextTable:
    """Return the settings of the tuned track, method by method."""
    titles = {row["key"]: row["title"] for row in result["rows"]}
    return TextTable(
        f"{result['title']}: settings chosen on validation data, and accuracy there",
        ["", "set", "chosen", "score", "± error", "paper's settings"],
        [
            [
                titles[each["row"]],
                each["set"],
                ", ".join(describe_changes(each["changes"])) or "the paper's",
                percent(each["score"]),
                percent(each["standard_error"]),
                percent(each["default_score"]),
            ]
            for each in sorted(result["chosen"], key=lambda each: list(titles).index(each["row"]))
        ],
    )


def _build_table(
    result: dict[str, Any],
    title: str,
    cells: list[dict[str, Any]],
    write: Callable[[dict[str, Any] | None], str],
) -> TextTable:
    by_place = {(cell["row"], cell["column"]): cell for cell in cells}
    rows = [r for r in result["rows"] if any(key == r["key"] for key, _ in by_place)]
    columns = [c for c in result["columns"] if any(key == c["key"] for _, key in by_place)]
    if result["axis"]:
        # Many values, few methods: the long side goes down the page.
        rows, columns = columns, rows
        by_place = {(column, row): cell for (row, column), cell in by_place.items()}
    return TextTable(
        title,
        [result["axis"], *(column["title"] for column in columns)],
        [[r["title"], *(write(by_place.get((r["key"], c["key"]))) for c in columns)] for r in rows],
    )


def format_cell(cell: dict[str, Any] | None) -> str:
    """Return a cell's mean(std) with its mark; a dash where a seed has no value."""
    if cell is None or None in cell["values"]:
        return "-"
    if cell["unit"] == "numbers":
        return f"{statistics.fmean(cell['values']):,.0f}"
    return MARKS.get(cell["mark"] or "", "") + mean_and_deviation(cell["values"], ddof=0)


def _format_published(cell: dict[str, Any] | None) -> str:
    """Return the paper's number and how much ours is above it."""
    if cell is None:
        return "-"
    paper, is_exact = cell["published"], cell["unit"] == "numbers"
    said = f"{paper['mean']:,.0f}" if is_exact else f"{paper['mean']:.1f}"
    if paper["std"] is not None:
        said += f"({paper['std']:.1f})"
    if None in cell["values"]:
        return said
    difference = statistics.fmean(cell["values"]) - paper["mean"]
    return said + (f"  {difference:+,.0f}" if is_exact else f"  {difference:+.1f}")


def table_notes(result: dict[str, Any]) -> list[str]:
    """Return what is to be said below an item's tables."""
    is_marked = any(cell["mark"] for cell in result["cells"])
    read = {(cell["unit"], cell["predictor"]) for cell in result["cells"]}
    return [
        *([_QUICK] if result.get("quick") else []),
        *([explain_marks(len(result["seeds"]))] if is_marked else []),
        *([READ_AS_IN_PAPER] if ("%", "personal_prototype") in read else []),
        *result["notes"],
    ]
