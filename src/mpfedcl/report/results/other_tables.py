"""Searches for settings and tables of the paper, in long form."""

from collections.abc import Sequence

from mpfedcl.report.file_schemas import PaperResultFile, SearchRecord
from mpfedcl.report.results.long_table import LongTable
from mpfedcl.report.tuning_section import format_settings


def scores_table(searches: Sequence[SearchRecord]) -> LongTable:
    """Return validation accuracy in % of each setting tried, by round, as far as it was run."""
    columns = {
        "method": str,
        "trial": int,
        "changes": str,
        "chosen": bool,
        "round": int,
        "score": float,
    }
    rows = [
        (
            search.method,
            trial.number,
            format_settings(trial.changes),
            trial.number == search.chosen,
            number,
            score,
        )
        for search in searches
        for trial in search.trials
        for number, score in sorted(trial.scores.items())
    ]
    return LongTable(columns, rows)


def settings_table(searches: Sequence[SearchRecord]) -> LongTable:
    """Return the value of each setting in each trial, as text; trial 0 are the defaults."""
    columns = {
        "method": str,
        "trial": int,
        "chosen": bool,
        "setting": str,
        "value": str,
        "changed": bool,
    }
    rows = [
        (
            search.method,
            trial.number,
            trial.number == search.chosen,
            name.replace("__", "."),
            None if value is None else str(value),
            name in trial.changes,
        )
        for search in searches
        for trial in search.trials
        for name, value in trial.values.items()
    ]
    return LongTable(columns, rows)


def paper_table(result: PaperResultFile) -> LongTable:
    """Return the cells of a table of the paper: a row per seed, and the paper's own number."""
    columns = {
        "track": str,
        "panel": str,
        "row": str,
        "column": str,
        "test": str,
        "predictor": str,
        "unit": str,
        "seed": int,
        "value": float,
        "published": float,
        "published_std": float,
    }
    rows = [
        (
            *(cell.track, cell.panel, cell.row, cell.column, cell.test, cell.predictor, cell.unit),
            # Some cells are of fewer seeds, the first of all.
            seed,
            value,
            cell.published.mean if cell.published else None,
            cell.published.std if cell.published else None,
        )
        for cell in result.cells
        for seed, value in zip(result.seeds, cell.values, strict=False)
    ]
    return LongTable(columns, rows)
