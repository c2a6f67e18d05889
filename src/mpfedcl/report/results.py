"""Results in Python: a run, a comparison or a search, and its measurements in long form."""

import csv
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from itertools import chain, combinations
from pathlib import Path
from typing import Any, Literal, get_args

from mpfedcl.core.errors import InvalidInput, enumerate_names
from mpfedcl.core.json_files import Json
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.descriptions import describe_partition
from mpfedcl.methods import TESTS
from mpfedcl.report.document import compare_runs, primary_by_seed, run_predictors_table
from mpfedcl.report.drawings import comparison_drawings, metric_drawing, run_partition_drawing
from mpfedcl.report.figures import Drawing, DrawnFigure
from mpfedcl.report.html import show_table, tag
from mpfedcl.report.result_folders import ResultFolder, find_result_folders, find_tuning_files
from mpfedcl.report.run import RunRecords
from mpfedcl.report.tables import text_table
from mpfedcl.report.tuning import describe_tuning, format_settings, read_searches, scores_drawing
from mpfedcl.report.wording import name_seeds
from mpfedcl.rounds.record import training_seconds
from mpfedcl.runs.observer import HasModels
from mpfedcl.studies.statistics import LEVEL, paired_difference
from mpfedcl.studies.tuning import TuningResult

Library = Literal["polars", "pandas", "columns"]
Value = str | int | float | bool | None
_TYPES: dict[str, type] = {
    **dict.fromkeys(("seed", "round", "rounds", "bytes_up", "bytes_down"), int),
    **dict.fromkeys(("answered", "missing", "rejected", "trial", "pairs"), int),
    **dict.fromkeys(
        ("value", "accuracy", "accuracy_global", "loss", "megabytes", "seconds"), float
    ),
    **dict.fromkeys(("virtual_seconds", "score", "difference", "low", "high", "level"), float),
    **dict.fromkeys(("last", "judged", "finished", "chosen"), bool),
}
"""The types of the columns of all tables; every other column is text."""


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


def _long_table(columns: str, rows: Iterable[tuple[Value, ...]]) -> LongTable:
    return LongTable({name: _TYPES.get(name, str) for name in columns.split()}, list(rows))


# Runs


def long_accuracies(runs: Sequence[RunRecords]) -> LongTable:
    """Return accuracy in % by round, test set and predictor, as far as it was evaluated.

    `last` is the last evaluated round, and `judged` the predictor of the primary metric.
    """
    rows: list[tuple[Value, ...]] = []
    for run in runs:
        values = [
            (line, test, predictor, value)
            for line in run.rounds
            for test in (TESTS if line.accuracy else ())
            for predictor, value in (line.accuracy or {}).get(test, {}).items()
        ]
        # A predictor that the method does not have is None in every round.
        known = {(test, predictor) for _, test, predictor, value in values if value is not None}
        for line, test, predictor, value in values:
            if (test, predictor) in known:
                place = (line.round, line is run.last_evaluated, test, predictor)
                rows.append((*_name(run), *place, run.predictors[test] == predictor, value))
    return _long_table("method seed run round last test predictor judged accuracy", rows)


def long_clients(runs: Sequence[RunRecords]) -> LongTable:
    """Return each client's primary metric in % on its local test set by round."""
    rows = (
        (*_name(run), line.round, line is run.last_evaluated, client, accuracy)
        for run in runs
        for line in run.rounds
        for client, accuracy in (line.accuracy_per_client or {}).items()
    )
    return _long_table("method seed run round last client accuracy", rows)


def long_metrics(runs: Sequence[RunRecords]) -> LongTable:
    """Return all metrics of the primary predictors in the last round; those of clients by name."""
    rows: list[tuple[Value, ...]] = []
    for run in runs:
        if (found := run.rounds[-1].metrics) is None:
            continue
        tables: list[tuple[str, str | None, Mapping[str, float | None]]] = [
            ("local_test", None, found.local_test),
            ("global_test", None, found.global_test),
            *(("local_test", client, values) for client, values in found.per_client.items()),
        ]
        for test, client, values in tables:
            rows += [
                (*_name(run), test, client, metric, metric == run.experiment.metric, value)
                for metric, value in values.items()
            ]
    return _long_table("method seed run test client metric judged value", rows)


def long_rounds(runs: Sequence[RunRecords]) -> LongTable:
    """Return loss, traffic, time and answers by round; seconds are without evaluation."""
    columns = (
        "method seed run round loss bytes_up bytes_down seconds virtual_seconds answered missing "
        "rejected"
    )
    rows = (
        (
            *(*_name(run), line.round, line.loss),
            *(line.bytes.get(way, 0) for way in ("up", "down")),
            *(training_seconds(line.seconds), line.virtual_seconds),
            *map(len, (line.clients.answered, line.clients.missing, line.clients.rejected)),
        )
        for run in runs
        for line in run.rounds
    )
    return _long_table(columns, rows)


def long_runs(runs: Sequence[RunRecords]) -> LongTable:
    """Return a row per run: its last accuracy on both test sets, and its costs."""
    columns = (
        "method seed run dataset split rounds finished predictor accuracy predictor_global "
        "accuracy_global megabytes seconds"
    )
    rows = []
    for run in runs:
        split = describe_partition(run.experiment, with_seed=False)
        split = "over a network" if run.is_network else split
        accuracies = [(run.predictors[test], run.accuracy(test)) for test in TESTS]
        costs = sum(run.bytes.values()) / 1e6, training_seconds(run.seconds)
        reached = (run.rounds[-1].round, run.summary is not None)
        rows.append((*_name(run), run.data[0], split, *reached, *chain(*accuracies), *costs))
    return _long_table(columns, rows)


def _name(run: RunRecords) -> tuple[Value, ...]:
    return run.experiment.method, run.experiment.seed, run.name


def long_differences(groups: Sequence[Json]) -> LongTable:
    """Return the differences of each two methods, paired by seed, in % points."""
    rows = [
        (test, one, other, found.pairs, found.mean, found.low, found.high, LEVEL, found.verdict)
        for test in TESTS
        for (one, values), (other, others) in combinations(primary_by_seed(groups, test).items(), 2)
        if (found := paired_difference(values, others))
    ]
    return _long_table("test method than pairs difference low high level verdict", rows)


# Searches


def long_scores(searches: Sequence[TuningResult]) -> LongTable:
    """Return validation accuracy in % of each trial by round."""
    rows = (
        (
            *(search.method, trial.number, format_settings(trial.changes)),
            *(trial.number == search.chosen, number, score),
        )
        for search in searches
        for trial in search.trials
        for number, score in sorted(trial.scores.items())
    )
    return _long_table("method trial changes chosen round score", rows)


# Results


class Offers(dict[str, Any]):
    """Tables or figures by name; its representation is the names."""

    def __repr__(self) -> str:
        return f"[{', '.join(self)}]"


class Loaded(ABC):
    """A result that was read from its folder. A notebook shows it as a table."""

    path: Path

    @property
    @abstractmethod
    def long_tables(self) -> Mapping[str, Callable[[], LongTable]]:
        """The tables that `frame` can return, by name; the first is the default."""

    @property
    @abstractmethod
    def figures(self) -> Mapping[str, Drawing]:
        """The figures by name; `plot` draws the first by default."""

    @abstractmethod
    def _summary(self) -> tuple[str, Json]:
        """Return a line about the result, and its first table in the report."""

    def frame(self, table: str | None = None, library: Library | None = None) -> Any:
        """Return measurements in long form, one a row.

        Args:
            table: Which measurements, one of `.long_tables`.
            library: "polars", "pandas" or "columns", which is a dict with a list per column; by
                default the first of them that is installed.
        """
        return _choose("table", table, self.long_tables)().frame(library)

    def plot(self, figure: str | None = None) -> DrawnFigure:
        """Return a matplotlib figure, as the commands draw it; a notebook shows it.

        Args:
            figure: Which figure, one of `.figures`.
        """
        drawn: DrawnFigure = _choose("figure", figure, self.figures).figure()
        return drawn

    def __repr__(self) -> str:
        heading, table = self._summary()
        return f"{heading}\n{text_table(table).text()}"

    def _repr_html_(self) -> str:
        heading, table = self._summary()
        return tag("div", tag("b", heading), show_table(table))


class LoadedRun(Loaded, HasModels):
    """One run."""

    def __init__(self, records: RunRecords) -> None:
        self._records = records
        self.path = records.path

    @property
    def experiment(self) -> Experiment:
        """The settings, complete."""
        return self._records.experiment

    @property
    def accuracy(self) -> float | None:
        """The accuracy on the local test sets in the last round, in %."""
        return self._records.accuracy("local_test")

    @property
    def accuracy_global(self) -> float | None:
        """The accuracy on the global test set in the last round, in %."""
        return self._records.accuracy("global_test")

    @property
    def history(self) -> list[dict[str, Any]]:
        """The rounds' records, as rounds.jsonl has them."""
        return [line.to_json() for line in self._records.rounds]

    @property
    def summary(self) -> dict[str, Any] | None:
        """The content of summary.json; None if the run has not ended."""
        return None if self._records.summary is None else self._records.summary.to_json()

    @property
    def long_tables(self) -> Mapping[str, Callable[[], LongTable]]:
        """accuracy, clients, metrics, rounds, runs."""
        return _tables_of_runs([self._records])

    @property
    def figures(self) -> Mapping[str, Drawing]:
        """accuracy; partition, if it is known."""
        groups = compare_runs([self._records])["groups"]
        title = f"{self._records.method_name} on {self._records.data[0]}"
        accuracy = metric_drawing(groups, title=title)
        return Offers({"accuracy": accuracy, **_partition_of(self._records)})

    def _summary(self) -> tuple[str, Json]:
        done, planned = self._records.rounds[-1].round, self.experiment.rounds
        ended = "" if self._records.summary else f", not finished: round {done} of {planned}"
        about = f"{self._records.method_name} on {', '.join(self._records.data)}{ended}"
        return f"{about} ({self.path})", run_predictors_table(self._records)


class LoadedComparison(Loaded):
    """Several runs; those that differ only in their seed form a group."""

    def __init__(self, path: Path, records: Sequence[RunRecords]) -> None:
        self.path = path
        self._records = records

    @property
    def runs(self) -> list[LoadedRun]:
        """All runs."""
        return [LoadedRun(each) for each in self._records]

    @property
    def methods(self) -> list[str]:
        """The methods by name; with their folders if a method was run with two settings."""
        return [group["name"] for group in self.section["groups"]]

    @property
    def seeds(self) -> list[int]:
        """The seeds of all methods."""
        return list(dict.fromkeys(each.experiment.seed for each in self._records))

    @property
    def long_tables(self) -> Mapping[str, Callable[[], LongTable]]:
        """accuracy, clients, metrics, rounds, runs; differences, if methods can be compared."""
        tables = _tables_of_runs(self._records)
        if self.section["is_ranked"]:
            tables["differences"] = partial(long_differences, self.section["groups"])
        return tables

    @property
    def figures(self) -> Mapping[str, Drawing]:
        """accuracy, seeds, differences, clients, costs, reliability, partition of the first run."""
        found = comparison_drawings(self.section["groups"], is_ranked=self.section["is_ranked"])
        data = _describe_runs(self._records)
        titled = {
            name: replace(each, title=f"{data}: {each.title}") for name, each in found.items()
        }
        return Offers(titled | _partition_of(self._records[0]))

    @cached_property
    def section(self) -> Json:
        """The section of the report: `about`, `groups`, `tables`."""
        return compare_runs(self._records)

    def _summary(self) -> tuple[str, Json]:
        about = f"{len(self.methods)} methods on {_describe_runs(self._records)}"
        waiting = [each.name for each in self._records if each.summary is None]
        ended = f"; not finished: {', '.join(waiting)}" if waiting else ""
        about = f"{about}; {name_seeds(self.seeds)}{ended}"
        return f"{about} ({self.path})", self.section["tables"][0]


class LoadedSearch(Loaded):
    """A search for the settings of one method or several."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = find_tuning_files(path)
        self._searches = read_searches(self._files)

    @property
    def methods(self) -> list[str]:
        """The methods by name."""
        return [each.method for each in self._searches]

    @property
    def best(self) -> dict[str, Experiment]:
        """For each method the experiment with the chosen settings, ready to run."""
        return {each.method: each.best for each in self._searches}

    @property
    def long_tables(self) -> Mapping[str, Callable[[], LongTable]]:
        """scores."""
        return Offers(scores=partial(long_scores, self._searches))

    @property
    def figures(self) -> Mapping[str, Drawing]:
        """scores."""
        return Offers(scores=scores_drawing(self._searches))

    def _summary(self) -> tuple[str, Json]:
        section = describe_tuning(self._files)
        return f"{section['title']} ({self.path})", section["tables"][0]


def _choose(field: str, asked: str | None, offered: Mapping[str, Any]) -> Any:
    """Return the table or figure of a name, or the first."""
    name = next(iter(offered)) if asked is None else asked
    if name not in offered:
        raise InvalidInput(f"{field} is {asked!r}; it must be one of {', '.join(offered)}.")
    return offered[name]


def _tables_of_runs(records: Sequence[RunRecords]) -> Offers:
    return Offers(
        accuracy=partial(long_accuracies, records),
        clients=partial(long_clients, records),
        metrics=partial(long_metrics, records),
        rounds=partial(long_rounds, records),
        runs=partial(long_runs, records),
    )


def _partition_of(run: RunRecords) -> dict[str, Drawing]:
    drawing = run_partition_drawing(run)
    return {"partition": drawing} if drawing else {}


def _describe_runs(runs: Sequence[RunRecords]) -> str:
    """Return data and partition of runs, each once."""
    settings = [
        f"{run.experiment.dataset.name}, {describe_partition(run.experiment, with_seed=False)}"
        for run in runs
    ]
    return "; ".join(dict.fromkeys(settings))


def load(
    path: Path | str, *, unfinished: bool = False
) -> LoadedRun | LoadedComparison | LoadedSearch:
    """Read a run, a comparison or a search from its folder. Nothing is run, and nothing written.

    Args:
        path: What `run`, `compare` or `tune` has written, from Python or the command line; a
            folder of runs is read as a comparison.
        unfinished: Whether runs that have not ended may be read as far as they are.

    Returns:
        An object with `.frame()`, measurements in long form, and `.plot()`, a figure.

    Example:
        >>> from mpfedcl import Experiment, run
        >>> made = run(Experiment(method="fedavg", rounds=1, clients=2), out=folder / "run")
        >>> load(made.path).accuracy == made.accuracy
        True
        >>> load(made.path).frame("runs", library="columns")["method"]
        ['fedavg']
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise InvalidInput(f"path is {str(path)!r}; it must be a folder, and there is none there.")
    found = find_result_folders([folder], named="path")
    if len(found) > 1:
        inside = ", ".join(dict.fromkeys(f"{each.kind} in {each.path}" for each in found[:5]))
        raise InvalidInput(
            f"path is {str(path)!r}, which holds several results ({inside}); it must hold one: "
            "load them one by one."
        )
    (result,) = found
    loaded = read_result(result)
    if not unfinished:
        _reject_unfinished(result, loaded)
    return loaded


def read_result(result: ResultFolder) -> LoadedRun | LoadedComparison | LoadedSearch:
    """Read what a folder was found to hold: runs, or a search."""
    if result.kind == "tuning":
        return LoadedSearch(result.path)
    records = [RunRecords.read(each) for each in result.runs]
    if result.kind == "run":
        return LoadedRun(records[0])
    return LoadedComparison(result.path, records)


def _reject_unfinished(result: ResultFolder, loaded: Loaded) -> None:
    runs = loaded.runs if isinstance(loaded, LoadedComparison) else [loaded]
    waiting = [each for each in runs if isinstance(each, LoadedRun) and each.summary is None]
    if names := [*(each.path.name for each in waiting), *result.left_out]:
        raise InvalidInput(
            f"path is {str(result.path)!r}, which has not ended: {enumerate_names(names, 3)}. Let "
            "the same command or call finish it (a run: mpfedcl run --resume), or read it as it "
            "is: unfinished=True."
        )
