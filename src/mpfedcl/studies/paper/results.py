"""From finished runs to the result of a table or figure: a number per cell and seed, with marks."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from mpfedcl.experiment import Experiment
from mpfedcl.studies.paper.item import Cell, Curves, FinishedRun, PaperItem, Track
from mpfedcl.studies.statistics import mark_best, paired_difference

Lookup = Callable[[Track, Experiment, int], FinishedRun]
"""The run of a track's experiment with a seed."""

_FLAGSHIP = "mp-fedcl"


def collect_result(
    item: PaperItem, seeds: Sequence[int], lookup: Lookup, command: str = ""
) -> dict[str, Any]:
    """Return an item's result as plain values: what `result.json` holds."""
    cells = [_read_cell(cell, seeds, lookup) for cell in item.cells]
    _mark_best_cells(item, cells)
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
        "figures": [
            *_axis_figures(item, cells),
            *(_curve_figure(c, seeds, lookup) for c in item.curves),
        ],
        "axis": item.axis,
        "notes": list(item.notes),
    }
    result["verdicts"] = compare_flagship(result)
    return result


def _read_cell(cell: Cell, seeds: Sequence[int], lookup: Lookup) -> dict[str, Any]:
    values, paper = [], cell.published
    first = lookup(cell.track, cell.experiment, seeds[0])
    for seed in seeds:
        run = lookup(cell.track, cell.experiment, seed)
        other = None if cell.compared_with is None else lookup(cell.track, cell.compared_with, seed)
        values.append(cell.measure.compute(run, other))
    return {
        "track": cell.track,
        "panel": cell.panel,
        "test": cell.measure.name,
        "row": cell.row,
        "column": cell.column,
        "unit": cell.measure.unit,
        "better": cell.measure.better,
        "predictor": first.predictor,
        "rounds": len(first.records),
        "values": [None if value is None else round(value, 4) for value in values],
        "published": paper and {"mean": paper.mean, "std": paper.deviation},
        "mark": None,
    }


def _mark_best_cells(item: PaperItem, cells: list[dict[str, Any]]) -> None:
    """Mark the best of each column and what is not clearly worse, where rows are methods."""
    columns: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for cell in cells:
        if cell["better"] and not item.axis:
            key = (cell["track"], cell["panel"], cell["test"], cell["column"])
            columns.setdefault(key, []).append(cell)
    for column in columns.values():
        sign = 1 if column[0]["better"] == "higher" else -1
        values = {
            cell["row"]: [None if v is None else sign * v for v in cell["values"]]
            for cell in column
        }
        marks = mark_best(values)
        for cell in column:
            cell["mark"] = marks[cell["row"]]


def compare_flagship(result: dict[str, Any]) -> list[str]:
    """Say for each table where MP-FedCL is better, worse or not clearly different, and by how much.

    Only what the paired differences over seeds say; one seed says nothing.
    """
    sentences = []
    for (track, panel, test), cells in group_cells(result).items():
        by_row: dict[str, dict[str, list[float | None]]] = {}
        for cell in cells:
            if cell["unit"] == "%":
                by_row.setdefault(cell["row"], {})[cell["column"]] = cell["values"]
        ours = by_row.pop(_FLAGSHIP, None)
        for row, theirs in by_row.items() if ours else ():
            said = _describe_differences(result, ours or {}, theirs)
            where = ", ".join(part for part in (panel, test, track) if part)
            if said:
                title = next(each["title"] for each in result["rows"] if each["key"] == row)
                sentences.append(f"{where}: MP-FedCL against {title}: {said}.")
    return sentences


def _describe_differences(
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


def _axis_figures(item: PaperItem, cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
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


def _curve_figure(curves: Curves, seeds: Sequence[int], lookup: Lookup) -> dict[str, Any]:
    lines = []
    for name, experiment in curves.experiments.items():
        runs = [lookup("paper", experiment, seed) for seed in seeds]
        by_round: dict[int, list[float]] = {}
        for run in runs:
            for record in run.evaluated_records:
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


def group_cells(result: dict[str, Any]) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    """Return the cells by track, panel and test."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for cell in result["cells"]:
        found.setdefault((cell["track"], cell["panel"], cell["test"]), []).append(cell)
    return found
