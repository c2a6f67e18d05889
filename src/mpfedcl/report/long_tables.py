"""Measurements in long form, one a row: as a data frame, as plain columns, as CSV."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from typing import Any, Literal, get_args

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment.wording import describe_data, describe_partition
from mpfedcl.methods import PREDICTORS, TESTS, PredictorName, Test
from mpfedcl.report.file_schemas import SearchRecord
from mpfedcl.report.run import RunRecords
from mpfedcl.report.tuning import format_settings
from mpfedcl.rounds.record import training_seconds

Library = Literal["polars", "pandas", "columns"]
Value = str | int | float | bool | None
_RUN = {"method": str, "seed": int, "run": str}
"""The first columns of every row: method, seed and the folder of the run."""
_ROUND = {"round": int, "last": bool}


@dataclass(frozen=True)
class LongTable:
    """Rows of plain values; each column has one type, and None for a missing value."""

    columns: Mapping[str, type]
    rows: Sequence[tuple[Value, ...]]

    def frame(self, library: Library | None = None) -> Any:
        """Return a data frame of polars, else of pandas, else a dict with a list per column."""
        chosen = library or next((each for each in ("polars", "pandas") if find_spec(each)), None)
        if chosen not in (None, *get_args(Library)):
            raise InvalidInput(
                f"library is {chosen!r}; it must be one of {', '.join(get_args(Library))}."
            )
        if chosen in (None, "columns"):
            return {name: [row[at] for row in self.rows] for at, name in enumerate(self.columns)}
        try:
            module = import_module(str(chosen))
        except ImportError:
            raise InvalidInput(
                f"library is {chosen!r}, which is not installed: pip install {chosen}, or take "
                "'columns'."
            ) from None
        if chosen == "polars":
            return module.DataFrame(self.rows, schema=dict(self.columns), orient="row")
        # Text columns are not converted: pandas would turn None into text.
        kinds = {name: kind for name, kind in self.columns.items() if kind is not str}
        return module.DataFrame.from_records(self.rows, columns=[*self.columns]).astype(kinds)

    def csv(self) -> str:
        """Return the table as CSV with a head; None is empty."""
        text = StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        for row in self.rows:
            writer.writerow(str(each).lower() if isinstance(each, bool) else each for each in row)
        return text.getvalue()


# Runs


def long_accuracies(runs: Sequence[RunRecords]) -> LongTable:
    """Return accuracy in % by round, test set and predictor, as far as it was evaluated.

    `last` is the last evaluated round, and `judged` the predictor of the primary metric.
    """
    columns = {**_ROUND, "test": str, "predictor": str, "judged": bool, "accuracy": float}

    def rows(run: RunRecords) -> Iterator[tuple[Value, ...]]:
        read = [(line.round, line.accuracy) for line in run.rounds if line.accuracy]
        had = [
            (test, predictor)
            for test in TESTS
            for predictor in PREDICTORS
            if any(table.get(test, {}).get(predictor) is not None for _, table in read)
        ]
        for number, table in read:
            for test, predictor in had:
                if predictor not in table.get(test, {}):
                    continue
                judged = run.predictors[test] == predictor
                is_last = number == read[-1][0]
                yield number, is_last, test, predictor, judged, table[test][predictor]

    return LongTable(_RUN | columns, [(*_name(run), *row) for run in runs for row in rows(run)])


def long_clients(runs: Sequence[RunRecords]) -> LongTable:
    """Return each client's primary metric in % on its local test set by round."""
    columns = {**_ROUND, "client": str, "accuracy": float}
    rows = [
        (*_name(run), line.round, line is run.last_evaluated, client, accuracy)
        for run in runs
        for line in run.rounds
        for client, accuracy in (line.accuracy_per_client or {}).items()
    ]
    return LongTable(_RUN | columns, rows)


def long_rounds(runs: Sequence[RunRecords]) -> LongTable:
    """Return loss, traffic, time and answers by round; seconds are without evaluation."""
    columns = {
        "round": int,
        "loss": float,
        "bytes_up": int,
        "bytes_down": int,
        "seconds": float,
        "virtual_seconds": float,
        "answered": int,
        "missing": int,
        "rejected": int,
    }
    rows = [
        (
            *_name(run),
            line.round,
            line.loss,
            line.bytes.get("up", 0),
            line.bytes.get("down", 0),
            training_seconds(line.seconds),
            line.virtual_seconds,
            len(line.clients.answered),
            len(line.clients.missing),
            len(line.clients.rejected),
        )
        for run in runs
        for line in run.rounds
    ]
    return LongTable(_RUN | columns, rows)


def long_runs(runs: Sequence[RunRecords]) -> LongTable:
    """Return a row per run: its last accuracy on both test sets, and its costs."""
    columns = {
        "dataset": str,
        "split": str,
        "rounds": int,
        "finished": bool,
        "predictor": str,
        "accuracy": float,
        "predictor_global": str,
        "accuracy_global": float,
        "megabytes": float,
        "seconds": float,
    }
    return LongTable(_RUN | columns, [(*_name(run), *_sum_up(run)) for run in runs])


def last_accuracy(run: RunRecords, test: Test, predictor: PredictorName) -> float | None:
    """Return the accuracy of a predictor in the last evaluated round, unrounded."""
    table = run.last_evaluated.accuracy if run.last_evaluated else None
    return (table or {}).get(test, {}).get(predictor)


def _name(run: RunRecords) -> tuple[Value, ...]:
    return run.experiment.method, run.experiment.seed, run.name


def _sum_up(run: RunRecords) -> tuple[Value, ...]:
    over_network = run.partition is not None and run.partition.network
    data, _ = describe_data(run.experiment, {"network": over_network})
    split = describe_partition(run.experiment, with_seed=False)
    headline = {
        test: (predictor, last_accuracy(run, test, predictor))
        for test, predictor in run.predictors.items()
    }
    return (
        data,
        "over a network" if over_network else split,
        run.rounds[-1].round,
        run.summary is not None,
        *headline["local_test"],
        *headline["global_test"],
        sum(sum(line.bytes.values()) for line in run.rounds) / 1e6,
        sum(training_seconds(line.seconds) for line in run.rounds),
    )


# Searches


def long_scores(searches: Sequence[SearchRecord]) -> LongTable:
    """Return validation accuracy in % of each trial by round."""
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


def long_settings(searches: Sequence[SearchRecord]) -> LongTable:
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
