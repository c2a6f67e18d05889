"""From finished runs to an item's tables: numbers a seed, beside the paper's, with marks."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from mpfedcl.experiment import Experiment
from mpfedcl.report.tables import MARKS, Grid, explain_marks, mean_and_deviation, percent
from mpfedcl.studies.paper.item import Cell, Curves, Finished, Item, Published, Track
from mpfedcl.studies.statistics import best_and_within, paired_difference
from mpfedcl.studies.tuning.tuning import describe_changes

Lookup = Callable[[Track, Experiment, int], Finished]
"""The run of a track's experiment with a seed."""

_FLAGSHIP = "mp-fedcl"
_QUICK = "Quick: a few rounds and one seed show that everything runs; the numbers mean nothing."
_TRACK_TITLES = {
    "paper": "the paper's settings",
    "tuned": "each method tuned on validation data",
}


def collect(item: Item, seeds: Sequence[int], lookup: Lookup, command: str = "") -> dict[str, Any]:
    """Return an item's result as plain values: what `result.json` holds."""
    cells = [_read(cell, seeds, lookup) for cell in item.cells]
    _mark(item, cells)
    result = {
        "format": 1,
        "id": item.id,
        "title": item.title,
        "about": item.about,
        "command": command or f"mpfedcl paper run {item.id}",
        "seeds": list(seeds),
        "columns": [{"key": key, "title": title} for key, title in item.columns.items()],
        "rows": [{"key": key, "title": title} for key, title in item.rows.items()],
        "cells": cells,
        "figures": [*_lines(item, cells), *(_draw(c, seeds, lookup) for c in item.curves)],
        "axis": item.axis,
        "notes": list(item.notes),
    }
    result["verdicts"] = compare_flagship(result)
    return result


def _read(cell: Cell, seeds: Sequence[int], lookup: Lookup) -> dict[str, Any]:
    values = []
    first = lookup(cell.track, cell.experiment, seeds[0])
    for seed in seeds:
        run = lookup(cell.track, cell.experiment, seed)
        other = None if cell.against is None else lookup(cell.track, cell.against, seed)
        values.append(cell.measure.read(run, other))
    return {
        "track": cell.track,
        "panel": cell.panel,
        "test": cell.measure.name,
        "row": cell.row,
        "column": cell.column,
        "unit": cell.measure.unit,
        "better": cell.measure.better,
        "reading": first.reading,
        "rounds": len(first.records),
        "values": [None if value is None else round(value, 4) for value in values],
        "published": _plain(cell.published),
        "mark": None,
    }


def _plain(published: Published | None) -> dict[str, float | None] | None:
    return None if published is None else {"mean": published.mean, "std": published.deviation}


def _mark(item: Item, cells: list[dict[str, Any]]) -> None:
    """Mark the best of each column and what is not clearly worse, where rows are methods."""
    columns: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for cell in cells:
        if cell["better"] and not item.axis:
            key = (cell["track"], cell["panel"], cell["test"], cell["column"])
            columns.setdefault(key, []).append(cell)
    for several in columns.values():
        sign = 1 if several[0]["better"] == "higher" else -1
        values = {
            cell["row"]: [None if v is None else sign * v for v in cell["values"]]
            for cell in several
        }
        marks = best_and_within(values)
        for cell in several:
            cell["mark"] = marks[cell["row"]]


def compare_flagship(result: dict[str, Any]) -> list[str]:
    """Say for each table where MP-FedCL is better, worse or not clearly different, and by how much.

    Only what the paired differences over seeds say; one seed says nothing.
    """
    sentences = []
    for (track, panel, test), cells in _tables(result).items():
        by_row: dict[str, dict[str, list[float | None]]] = {}
        for cell in cells:
            if cell["unit"] == "%":
                by_row.setdefault(cell["row"], {})[cell["column"]] = cell["values"]
        ours = by_row.pop(_FLAGSHIP, None)
        for row, theirs in by_row.items() if ours else ():
            said = _compare(result, ours or {}, theirs)
            where = ", ".join(part for part in (panel, test, track) if part)
            if said:
                title = next(each["title"] for each in result["rows"] if each["key"] == row)
                sentences.append(f"{where}: MP-FedCL against {title}: {said}.")
    return sentences


def _compare(
    result: dict[str, Any],
    ours: dict[str, list[float | None]],
    theirs: dict[str, list[float | None]],
) -> str:
    """Return the columns by verdict, with the mean difference in points."""
    titles = {column["key"]: column["title"] for column in result["columns"]}
    said: dict[str, list[str]] = {"better": [], "worse": [], "no clear difference": []}
    for column, values in theirs.items():
        difference = paired_difference(ours.get(column, []), values) if column in ours else None
        if difference is not None and difference.verdict != "one seed":
            said[difference.verdict].append(f"{titles[column]} {difference.mean:+.1f}")
    return "; ".join(f"{name}: {', '.join(each)}" for name, each in said.items() if each)


def _lines(item: Item, cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the cells of an item with an axis as lines, a figure a panel and test."""
    if not item.axis:
        return []
    figures: dict[tuple[str, str], dict[str, Any]] = {}
    for cell in cells:
        key = (cell["panel"], cell["test"])
        title = ", ".join(part for part in key if part)
        figure = figures.setdefault(
            key, {"title": title, "x": item.axis, "y": "accuracy %", "lines": {}}
        )
        name = item.rows[cell["row"]]
        line = figure["lines"].setdefault(name, {"name": name, "x": [], "mean": [], "std": []})
        # As in the table: a value that a seed lacks leaves a gap.
        if None not in cell["values"]:
            line["x"].append(float(cell["column"]))
            line["mean"].append(statistics.fmean(cell["values"]))
            line["std"].append(statistics.pstdev(cell["values"]))
    return [{**figure, "lines": list(figure["lines"].values())} for figure in figures.values()]


def _draw(curves: Curves, seeds: Sequence[int], lookup: Lookup) -> dict[str, Any]:
    lines = []
    for name, experiment in curves.experiments.items():
        runs = [lookup("paper", experiment, seed) for seed in seeds]
        by_round: dict[int, list[float]] = {}
        for run in runs:
            for record in run.read:
                value = run.accuracy(record)
                if value is not None:
                    by_round.setdefault(record["round"], []).append(value)
        # Rounds in which every seed was read.
        whole = {n: each for n, each in sorted(by_round.items()) if len(each) == len(runs)}
        lines.append(
            {
                "name": name,
                "x": list(whole),
                "mean": [round(statistics.fmean(each), 4) for each in whole.values()],
                "std": [round(statistics.pstdev(each), 4) for each in whole.values()],
            }
        )
    return {"title": curves.title, "x": "round", "y": "accuracy %", "lines": lines}


def remarks(result: dict[str, Any]) -> list[str]:
    """Return what is to be said below an item's tables."""
    is_marked = any(cell["mark"] for cell in result["cells"])
    return [
        *([_QUICK] if result.get("quick") else []),
        *([explain_marks(len(result["seeds"]))] if is_marked else []),
        *result["notes"],
    ]


def grids(result: dict[str, Any]) -> list[Grid]:
    """Return an item's tables, one a track, panel and test, and the paper's numbers beside ours.

    The settings of the tuned track come last.
    """
    several_tracks = len({cell["track"] for cell in result["cells"]}) > 1
    found = []
    for (track, panel, test), cells in _tables(result).items():
        parts = [result["title"], panel, test, _TRACK_TITLES[track] if several_tracks else ""]
        title = ", ".join(part for part in parts if part)
        found.append(_grid(result, title, cells, show))
        known = [cell for cell in cells if cell["published"]]
        if known and not result.get("quick"):
            found.append(
                _grid(result, f"{title}: the paper's, and ours less the paper's", known, _beside)
            )
    chosen = _chosen_grid(result)
    return found if chosen is None else [*found, chosen]


def _chosen_grid(result: dict[str, Any]) -> Grid | None:
    """Return the settings of the tuned track, method by method; None where nothing was tuned."""
    if not result.get("chosen"):
        return None
    titles = {row["key"]: row["title"] for row in result["rows"]}
    return Grid(
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


def _tables(result: dict[str, Any]) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    """Return the cells by track, panel and test."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for cell in result["cells"]:
        found.setdefault((cell["track"], cell["panel"], cell["test"]), []).append(cell)
    return found


def _grid(
    result: dict[str, Any],
    title: str,
    cells: list[dict[str, Any]],
    write: Callable[[dict[str, Any] | None], str],
) -> Grid:
    by_place = {(cell["row"], cell["column"]): cell for cell in cells}
    rows = [r for r in result["rows"] if any(key == r["key"] for key, _ in by_place)]
    columns = [c for c in result["columns"] if any(key == c["key"] for _, key in by_place)]
    if result["axis"]:
        # Many values, few methods: the long side goes down the page.
        return Grid(
            title,
            [result["axis"], *(row["title"] for row in rows)],
            [
                [c["title"], *(write(by_place.get((r["key"], c["key"]))) for r in rows)]
                for c in columns
            ],
        )
    return Grid(
        title,
        ["", *(column["title"] for column in columns)],
        [[r["title"], *(write(by_place.get((r["key"], c["key"]))) for c in columns)] for r in rows],
    )


def show(cell: dict[str, Any] | None) -> str:
    """Return a cell's mean(std) with its mark; a dash where a seed has no value."""
    if cell is None or None in cell["values"]:
        return "-"
    if cell["unit"] == "numbers":
        return f"{statistics.fmean(cell['values']):,.0f}"
    return MARKS.get(cell["mark"] or "", "") + mean_and_deviation(cell["values"])


def _beside(cell: dict[str, Any] | None) -> str:
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
