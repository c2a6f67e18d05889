"""What a report says of a table of the paper: ours, the paper's beside it, and the difference."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpfedcl.report.numbers import known, mean, mean_text, rounded, significant, thin
from mpfedcl.report.records import Cell, Line, PaperResult, Published, read_content
from mpfedcl.report.tables import READING_TITLES

_MOST_POINTS = 400

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
        "about": [result.about, f"Seeds {seeds}.{took}" if seeds else took.strip()],
        "tables": [_table(result, *kind) for kind in kinds],
        "figures": [
            {
                "title": figure.title,
                "x": figure.x,
                "y": figure.y,
                "lines": [_line(line) for line in figure.lines],
            }
            for figure in result.figures
        ],
        "notes": [*result.notes, *result.verdicts],
        "command": result.command,
    }


def _table(result: PaperResult, track: str, panel: str, test: str) -> Json:
    places: dict[tuple[str, str], list[Cell]] = {}
    for cell in result.cells:
        if (cell.track, cell.panel, cell.test) == (track, panel, test):
            places.setdefault((cell.row, cell.column), []).append(cell)
    columns = [each for each in result.columns if any(key[1] == each.key for key in places)]
    rows = [each for each in result.rows if any(key[0] == each.key for key in places)]
    units = dict.fromkeys(cell.unit for cells in places.values() for cell in cells)
    # Tests have two names of their own; a table of another kind may call them otherwise.
    of_test = f"{test} test" if test in ("own", "union") else test
    return {
        "caption": f"{f'{panel}. ' if panel else ''}Track {track}, {of_test}, in "
        f"{', '.join(units)}: ours as mean(std), then the paper's and how far ours is from it",
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
    shown: Json = {"text": mean_text(first.values)}
    if first.mark:
        shown["mark"] = first.mark
    notes = [_beside(first)] if first.published else []
    notes += [
        f"{READING_TITLES.get(cell.reading, cell.reading)}: {mean_text(cell.values)}"
        for cell in cells[1:]
    ]
    return shown | ({"note": "; ".join(notes)} if notes else {})


def _beside(cell: Cell) -> str:
    assert cell.published is not None
    ours = mean(known(cell.values))
    text = f"paper {_published(cell.published)}"
    return text if ours is None else f"{text}, {ours - cell.published.mean:+.1f}"


def _published(published: Published) -> str:
    deviation = "" if published.std is None else f"({published.std:g})"
    return f"{published.mean:g}{deviation}"


def _legend(places: dict[tuple[str, str], list[Cell]]) -> str:
    marked = any(cell.mark for cells in places.values() for cell in cells)
    words = "best: the highest mean of a column. ≈: within noise of the best. " if marked else ""
    return f"{words}Std with ddof 0."


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
