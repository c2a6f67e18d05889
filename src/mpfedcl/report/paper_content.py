"""What a report says of a table of the paper: ours, the paper's beside it, and the difference."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpfedcl.report.numbers import known, mean, mean_text, rounded, significant, thin
from mpfedcl.report.records import Cell, Line, PaperResult, Published, read_content
from mpfedcl.report.tables import READING_TITLES, percent
from mpfedcl.report.tuning_content import describe_values

_MOST_POINTS = 400
_QUICK = (
    "Quick: a few rounds and one seed; it shows that everything runs, the numbers mean nothing."
)
_BEST = {"higher": "the highest mean", "lower": "the lowest mean", None: "the best mean"}

Json = dict[str, Any]


def describe_paper(path: Path) -> Json:
    """Return the section of a folder that holds a result.json."""
    result = read_content(path / "result.json", PaperResult)
    kinds = dict.fromkeys((cell.track, cell.panel, cell.test) for cell in result.cells)
    seeds = ", ".join(str(seed) for seed in result.seeds)
    took = "" if result.seconds is None else f" It took {result.seconds:,.0f} seconds."
    return {
        "kind": "paper",
        "title": result.title,
        "warning": _QUICK if result.quick else None,
        "about": [result.about, f"Seeds {seeds}.{took}" if seeds else took.strip()],
        "tables": [_table(result, *kind) for kind in kinds]
        + ([_chosen(result)] if result.chosen else []),
        "figures": [
            {
                "title": figure.title,
                "x": figure.x,
                "y": figure.y,
                "lines": [_line(line) for line in figure.lines],
            }
            for figure in result.figures
        ],
        "notes": [*_name_pictures(path, result), *result.notes, *result.verdicts],
        "command": result.command,
    }


def _name_pictures(path: Path, result: PaperResult) -> list[str]:
    """Say where the pictures of a result are that has neither tables nor lines."""
    pictures = sorted(each.name for each in path.glob("*.png"))
    if result.cells or result.figures or not pictures:
        return []
    return [f"It is a picture: {', '.join(pictures)} in this folder."]


def _table(result: PaperResult, track: str, panel: str, test: str) -> Json:
    places: dict[tuple[str, str], list[Cell]] = {}
    for cell in result.cells:
        if (cell.track, cell.panel, cell.test) == (track, panel, test):
            places.setdefault((cell.row, cell.column), []).append(cell)
    columns = [each for each in result.columns if any(key[1] == each.key for key in places)]
    rows = [each for each in result.rows if any(key[0] == each.key for key in places)]
    units = dict.fromkeys(cell.unit for cells in places.values() for cell in cells)
    has_published = any(cell.published for cells in places.values() for cell in cells)
    # Tests have two names of their own; a table of another kind may call them otherwise.
    of_test = f"{test} test" if test in ("own", "union") else test
    return {
        "caption": f"{f'{panel}. ' if panel else ''}Track {track}, {of_test}, in "
        f"{', '.join(units)}: {'ours as ' if has_published else ''}mean(std)"
        + (", then the paper's and how far ours is from it" if has_published else ""),
        "columns": ["", *(each.title for each in columns)],
        "rows": [
            [
                {"text": row.title, "note": _how(places, row.key)},
                *(_show(places.get((row.key, column.key), ())) for column in columns),
            ]
            for row in rows
        ],
        "notes": [_legend(places)],
    }


def _chosen(result: PaperResult) -> Json:
    """Return what the methods of the tuned track were given."""
    titles = {row.key: row.title for row in result.rows}
    return {
        "caption": "Track tuned: the settings chosen, and validation accuracy in %",
        "columns": ["", "set", "chosen", "score", "± error", "defaults"],
        "rows": [
            [
                {"text": titles.get(each.row, each.row)},
                {"text": each.set},
                {"text": describe_values(each.changes)},
                {"text": percent(each.score)},
                {"text": percent(each.standard_error)},
                {"text": percent(each.default_score)},
            ]
            for each in sorted(result.chosen, key=lambda each: [*titles, each.row].index(each.row))
        ],
        "notes": ["Chosen on images held out of training; no test image was opened."],
    }


def _how(places: dict[tuple[str, str], list[Cell]], row: str) -> str:
    """Say by which reading and after how many rounds a row was measured."""
    cells = [cell for key, each in places.items() if key[0] == row for cell in each]
    readings = dict.fromkeys(READING_TITLES.get(cell.reading, cell.reading) for cell in cells)
    rounds = dict.fromkeys(cell.rounds for cell in cells if cell.rounds is not None)
    spent = f"{' or '.join(str(number) for number in rounds)} rounds" if rounds else ""
    return "; ".join(part for part in (" or ".join(readings), spent) if part)


def _show(cells: Sequence[Cell]) -> Json:
    if not cells:
        return {"text": "-"}
    first = cells[0]
    shown: Json = {"text": _ours(first)}
    if first.mark:
        shown["mark"] = first.mark
    notes = [_beside(first)] if first.published else []
    notes += [
        f"{READING_TITLES.get(cell.reading, cell.reading)}: {_ours(cell)}" for cell in cells[1:]
    ]
    return shown | ({"note": "; ".join(notes)} if notes else {})


def _ours(cell: Cell) -> str:
    """Return mean(std), or a count in full; a dash where a seed lacks its value."""
    middle = _mean(cell)
    if cell.unit != "numbers" or middle is None:
        return mean_text(cell.values)
    return f"{middle:,.0f}"


def _mean(cell: Cell) -> float | None:
    """Return the mean over seeds; None where one lacks its value: the others are another mean."""
    numbers = known(cell.values)
    return mean(numbers) if len(numbers) == len(cell.values) else None


def _beside(cell: Cell) -> str:
    """Return what the paper prints, and how far ours is from it."""
    assert cell.published is not None
    ours, is_exact = _mean(cell), cell.unit == "numbers"
    text = f"paper {_published(cell.published, is_exact=is_exact)}"
    if ours is None:
        return text
    difference = ours - cell.published.mean
    return f"{text}, {difference:+,.0f}" if is_exact else f"{text}, {difference:+.1f}"


def _published(published: Published, *, is_exact: bool) -> str:
    deviation = "" if published.std is None else f"({published.std:g})"
    return f"{published.mean:,.0f}" if is_exact else f"{published.mean:g}{deviation}"


def _legend(places: dict[tuple[str, str], list[Cell]]) -> str:
    marked = {cell.better for cells in places.values() for cell in cells if cell.mark}
    if not marked:
        return "Std with ddof 0."
    best = _BEST[marked.pop() if len(marked) == 1 else None]
    return f"best: {best} of a column. ≈: within noise of the best. Std with ddof 0."


def _line(line: Line) -> Json:
    chosen = thin(len(line.x), _MOST_POINTS)
    curve: Json = {
        "name": line.name,
        "x": [significant(line.x[place], 6) for place in chosen],
        "mean": [significant(line.mean[place], 5) for place in chosen],
    }
    if line.std is not None:
        curve["std"] = [rounded(line.std[place], 4) for place in chosen]
    return curve
