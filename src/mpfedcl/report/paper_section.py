"""What a report says of a table of the paper: ours, the paper's beside it, and the difference."""

from collections.abc import Sequence
from pathlib import Path

from mpfedcl.core.json_files import Json, read_json_file
from mpfedcl.report.file_schemas import FigureLine, PaperCell, PaperResultFile
from mpfedcl.report.method_styles import is_styled, style_of
from mpfedcl.report.number_formatting import (
    choose_evenly,
    finite_values,
    mean,
    round_significant,
    rounded,
)
from mpfedcl.report.paper_tables import READ_AS_IN_PAPER
from mpfedcl.report.tables import PREDICTOR_TITLES, mean_and_deviation, percent
from mpfedcl.report.tuning_section import format_settings

_MOST_POINTS = 400
_QUICK = (
    "Quick: a few rounds and one seed; it shows that everything runs, the numbers mean nothing."
)
_BEST = {"higher": "the highest mean", "lower": "the lowest mean", None: "the best mean"}


def describe_paper(path: Path) -> Json:
    """Return the section of a folder that holds a result.json."""
    result = read_json_file(path / "result.json", PaperResultFile)
    kinds = dict.fromkeys((cell.track, cell.panel, cell.test) for cell in result.cells)
    seeds = ", ".join(str(seed) for seed in result.seeds)
    took = "" if result.seconds is None else f" It took {result.seconds:,.0f} seconds."
    return {
        "kind": "paper",
        "title": result.title,
        "warning": _QUICK if result.quick else None,
        "about": [result.about, f"Seeds {seeds}.{took}" if seeds else took.strip()],
        "tables": [_table(result, *kind) for kind in kinds]
        + ([_chosen_settings_table(result)] if result.chosen else []),
        "figures": [
            figure.model_dump(include={"title", "x", "y"})
            | {"lines": [_describe_line(line) for line in figure.lines]}
            for figure in result.figures
        ],
        "notes": [
            *_name_pictures(path, result),
            *([READ_AS_IN_PAPER] if any(map(_is_read_by_prototype, result.cells)) else []),
            *result.notes,
            *result.verdicts,
        ],
        "command": result.command,
    }


def _is_read_by_prototype(cell: PaperCell) -> bool:
    return cell.unit == "%" and cell.predictor == "personal_prototype"


def _name_pictures(path: Path, result: PaperResultFile) -> list[str]:
    """Say where the pictures of a result are that has neither tables nor lines."""
    pictures = sorted(each.name for each in path.glob("*.png"))
    if result.cells or result.figures or not pictures:
        return []
    return [f"It is a picture: {', '.join(pictures)} in this folder."]


def _table(result: PaperResultFile, track: str, panel: str, test: str) -> Json:
    places: dict[tuple[str, str], list[PaperCell]] = {}
    for cell in result.cells:
        if (cell.track, cell.panel, cell.test) == (track, panel, test):
            places.setdefault((cell.row, cell.column), []).append(cell)
    columns = [each for each in result.columns if any(key[1] == each.key for key in places)]
    rows = [each for each in result.rows if any(key[0] == each.key for key in places)]
    units = dict.fromkeys(cell.unit for cells in places.values() for cell in cells)
    has_published = any(cell.published for cells in places.values() for cell in cells)
    # Tests have two names of their own; a table of another kind may call them otherwise.
    of_test = f"{test.replace('_', ' ')} set" if test in ("local_test", "global_test") else test
    return {
        "caption": f"{f'{panel}. ' if panel else ''}Track {track}, {of_test}, in "
        f"{', '.join(units)}: {'ours as ' if has_published else ''}mean(std)"
        + (", then the paper's and how far ours is from it" if has_published else ""),
        "columns": ["", *(each.title for each in columns)],
        "rows": [
            [
                {"text": row.title, "note": _describe_measurement(places, row.key)},
                *(_describe_cell(places.get((row.key, column.key), ())) for column in columns),
            ]
            for row in rows
        ],
        "notes": [_legend(places)],
    }


def _chosen_settings_table(result: PaperResultFile) -> Json:
    """Return what the methods of the tuned track were given."""
    titles = {row.key: row.title for row in result.rows}
    return {
        "caption": "Track tuned: the settings chosen, and validation accuracy in %",
        "columns": ["", "set", "chosen", "score", "± error", "defaults"],
        "rows": [
            [
                {"text": titles.get(each.row, each.row)},
                {"text": each.set},
                {"text": format_settings(each.changes)},
                {"text": percent(each.score)},
                {"text": percent(each.standard_error)},
                {"text": percent(each.default_score)},
            ]
            for each in sorted(result.chosen, key=lambda each: [*titles, each.row].index(each.row))
        ],
        "notes": ["Chosen on images held out of training; no test image was opened."],
    }


def _describe_measurement(places: dict[tuple[str, str], list[PaperCell]], row: str) -> str:
    """Say by which reading and after how many rounds a row was measured."""
    cells = [cell for key, each in places.items() if key[0] == row for cell in each]
    predictors = dict.fromkeys(
        PREDICTOR_TITLES.get(cell.predictor, cell.predictor) for cell in cells
    )
    rounds = dict.fromkeys(cell.rounds for cell in cells if cell.rounds is not None)
    spent = f"{' or '.join(str(number) for number in rounds)} rounds" if rounds else ""
    return "; ".join(part for part in (" or ".join(predictors), spent) if part)


def _describe_cell(cells: Sequence[PaperCell]) -> Json:
    if not cells:
        return {"text": "-"}
    first = cells[0]
    shown: Json = {"text": _format_value(first)}
    if first.mark:
        shown["mark"] = first.mark
    notes = [_compare_with_paper(first)] if first.published else []
    notes += [
        f"{PREDICTOR_TITLES.get(cell.predictor, cell.predictor)}: {_format_value(cell)}"
        for cell in cells[1:]
    ]
    return shown | ({"note": "; ".join(notes)} if notes else {})


def _format_value(cell: PaperCell) -> str:
    """Return mean(std), or a count in full; a dash where a seed lacks its value."""
    middle = _mean(cell)
    if cell.unit != "numbers" or middle is None:
        return "-" if middle is None else mean_and_deviation(cell.values, ddof=0)
    return f"{middle:,.0f}"


def _mean(cell: PaperCell) -> float | None:
    """Return the mean over seeds; None where one lacks its value: the others are another mean."""
    numbers = finite_values(cell.values)
    return mean(numbers) if len(numbers) == len(cell.values) else None


def _compare_with_paper(cell: PaperCell) -> str:
    """Return what the paper prints, and how far ours is from it."""
    assert cell.published is not None
    ours, paper, is_exact = _mean(cell), cell.published, cell.unit == "numbers"
    deviation = "" if paper.std is None else f"({paper.std:g})"
    text = f"paper {paper.mean:,.0f}" if is_exact else f"paper {paper.mean:g}{deviation}"
    if ours is None:
        return text
    difference = ours - paper.mean
    return f"{text}, {difference:+,.0f}" if is_exact else f"{text}, {difference:+.1f}"


def _legend(places: dict[tuple[str, str], list[PaperCell]]) -> str:
    marked = {cell.better for cells in places.values() for cell in cells if cell.mark}
    if not marked:
        return "Std with ddof 0, as in the paper."
    best = _BEST[marked.pop() if len(marked) == 1 else None]
    return (
        f"best: {best} of a column. ≈: within noise of the best. Std with ddof 0, as in the paper."
    )


def _describe_line(line: FigureLine) -> Json:
    chosen = choose_evenly(len(line.x), _MOST_POINTS)
    curve: Json = {
        "name": line.name,
        "x": [round_significant(line.x[place], 6) for place in chosen],
        "mean": [round_significant(line.mean[place], 5) for place in chosen],
    }
    if is_styled(line.name):
        curve["style"] = style_of(line.name).to_json()
    if line.std is not None:
        curve["std"] = [rounded(line.std[place], 4) for place in chosen]
    return curve
