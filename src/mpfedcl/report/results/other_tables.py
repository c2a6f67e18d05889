"""Searches for settings, in long form."""

from collections.abc import Sequence

from mpfedcl.report.file_schemas import SearchRecord
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
