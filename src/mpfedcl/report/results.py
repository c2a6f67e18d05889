"""Results in Python: a run, a comparison or a search, read from its folder."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import combinations
from pathlib import Path
from typing import Any

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.json_files import Json, read_json_file
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.wording import describe_data, describe_partition
from mpfedcl.methods import TESTS
from mpfedcl.report.comparison import find_ranking_obstacles, run_predictors_table
from mpfedcl.report.comparison_figures import comparison_drawings
from mpfedcl.report.document import compare_runs
from mpfedcl.report.figures import Drawing, DrawnFigure
from mpfedcl.report.file_schemas import SearchRecord, TuningFile
from mpfedcl.report.long_tables import (
    Library,
    LongTable,
    Value,
    last_accuracy,
    long_accuracies,
    long_clients,
    long_rounds,
    long_runs,
    long_scores,
    long_settings,
)
from mpfedcl.report.result_folders import ResultFolder, find_result_folders, find_tuning_files
from mpfedcl.report.run import RunRecords, describe_run
from mpfedcl.report.run_figures import accuracy_drawing, partition_drawing
from mpfedcl.report.tables import table_as_html, table_as_text
from mpfedcl.report.tuning import describe_tuning, scores_drawing
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.studies.statistics import LEVEL, paired_difference
from mpfedcl.studies.tuning import present_values


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
    def _headline(self) -> tuple[str, Json]:
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
        return table_as_text(*self._headline())

    def _repr_html_(self) -> str:
        return table_as_html(*self._headline())


class LoadedRun(Loaded):
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
        """The primary metric on the local test sets in the last round, in %."""
        return last_accuracy(self._records, "local_test", self._records.predictors["local_test"])

    @property
    def accuracy_global(self) -> float | None:
        """The primary metric on the global test set in the last round, in %."""
        return last_accuracy(self._records, "global_test", self._records.predictors["global_test"])

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
        """accuracy, clients, rounds, runs."""
        return _tables_of_runs([self._records])

    @property
    def figures(self) -> Mapping[str, Drawing]:
        """accuracy; partition, if it is known."""
        groups = compare_runs([(self._records, describe_run(self._records))])["groups"]
        data, _ = _describe_data(self._records)
        accuracy = accuracy_drawing(groups, title=f"{self._records.method_name} on {data}")
        return Offers({"accuracy": accuracy, **_partition_of(self._records)})

    def _headline(self) -> tuple[str, Json]:
        done, planned = self._records.rounds[-1].round, self.experiment.rounds
        ended = "" if self._records.summary else f", not finished: round {done} of {planned}"
        about = f"{self._records.method_name} on {', '.join(_describe_data(self._records))}{ended}"
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
        """The methods by name; with their folders, where a method was run with two settings."""
        return list(self._groups)

    @property
    def seeds(self) -> list[int]:
        """The seeds of all methods."""
        return list(dict.fromkeys(each.experiment.seed for each in self._records))

    @property
    def tables(self) -> list[Json]:
        """The tables of the report: primary metrics, fairness, all predictors."""
        return list(self._described["tables"])

    @property
    def setup(self) -> str:
        """Data, clients, rounds and seeds in a line."""
        return str(self._described["about"][0])

    @property
    def long_tables(self) -> Mapping[str, Callable[[], LongTable]]:
        """accuracy, clients, rounds, runs; differences, if methods can be compared."""
        tables = _tables_of_runs(self._records)
        if not find_ranking_obstacles(self._described["groups"], self._records):
            tables["differences"] = self._differences
        return tables

    @property
    def figures(self) -> Mapping[str, Drawing]:
        """accuracy, seeds, differences, clients, costs, reliability, partition of the first run."""
        found = comparison_drawings(self._described["groups"], self._described)
        data = _describe_runs(self._records)
        titled = {
            name: replace(each, title=f"{data}: {each.title}") for name, each in found.items()
        }
        return Offers(titled | _partition_of(self._records[0]))

    @cached_property
    def _described(self) -> Json:
        return compare_runs([(each, describe_run(each)) for each in self._records])

    @cached_property
    def _groups(self) -> dict[str, list[RunRecords]]:
        groups = self._described["groups"]
        return {each["name"]: [self._records[at] for at in each["runs"]] for each in groups}

    def _differences(self) -> LongTable:
        """Return the differences of each two methods, paired by seed, in % points."""
        columns = {"test": str, "method": str, "than": str, "pairs": int, "difference": float}
        columns |= {"low": float, "high": float, "level": float, "verdict": str}
        rows: list[tuple[Value, ...]] = []
        for test in TESTS:
            values = {
                name: [by_seed.get(seed) for seed in self.seeds]
                for name, runs in self._groups.items()
                for by_seed in [
                    {e.experiment.seed: e.value(test, e.predictors[test]) for e in runs}
                ]
            }
            for one, other in combinations(values, 2):
                if found := paired_difference(values[one], values[other]):
                    ends = (found.mean, found.low, found.high, LEVEL, found.verdict)
                    rows.append((test, one, other, found.pairs, *ends))
        return LongTable(columns, rows)

    def _headline(self) -> tuple[str, Json]:
        seeds = f"seed{'s' if len(self.seeds) > 1 else ''} {', '.join(map(str, self.seeds))}"
        about = f"{len(self._groups)} methods on {_describe_runs(self._records)}; {seeds}"
        waiting = [each.name for each in self._records if each.summary is None]
        ended = f"; not finished: {', '.join(waiting)}" if waiting else ""
        return f"{about}{ended} ({self.path})", self.tables[0]


class LoadedSearch(Loaded):
    """A search for the settings of one method or several."""

    def __init__(self, path: Path, files: Sequence[Path], searches: Sequence[SearchRecord]) -> None:
        self.path = path
        self._files = files
        self._searches = searches

    @property
    def methods(self) -> list[str]:
        """The methods by name."""
        return [each.method for each in self._searches]

    @property
    def best(self) -> dict[str, Experiment]:
        """For each method the experiment with the chosen settings, ready to run."""
        return {
            each.method: Experiment(**each.base).replace(
                **present_values(each.trials[each.chosen].values)
            )
            for each in self._searches
        }

    @property
    def long_tables(self) -> Mapping[str, Callable[[], LongTable]]:
        """scores, settings."""
        return Offers(
            scores=partial(long_scores, self._searches),
            settings=partial(long_settings, self._searches),
        )

    @property
    def figures(self) -> Mapping[str, Drawing]:
        """scores."""
        return Offers(scores=scores_drawing(self._searches))

    def _headline(self) -> tuple[str, Json]:
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
        rounds=partial(long_rounds, records),
        runs=partial(long_runs, records),
    )


def _partition_of(run: RunRecords) -> dict[str, Drawing]:
    """Return the partition of a run; under a privacy budget it is not shown."""
    if run.partition is None or run.privacy is not None:
        return {}
    clients = {name: {"train": held.train} for name, held in run.partition.clients.items()}
    _, split = _describe_data(run)
    held = {"classes": run.partition.classes, "clients": clients}
    return {"partition": partition_drawing(held, f"Training samples, {split}")}


def _describe_runs(runs: Iterable[RunRecords]) -> str:
    """Return data and partition of runs, each once."""
    settings = [
        f"{run.experiment.dataset.name}, {describe_partition(run.experiment, with_seed=False)}"
        for run in runs
    ]
    return "; ".join(dict.fromkeys(settings))


def _describe_data(records: RunRecords) -> tuple[str, str]:
    is_network = records.partition is not None and records.partition.network
    return describe_data(records.experiment, {"network": is_network})


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
    if result.kind == "run" and not RunDirectory(result.path).count_records():
        raise InvalidInput(f"path is {str(path)!r}, a run that has no round yet.")
    loaded = read_result(result)
    if not unfinished:
        _refuse_unfinished(result, loaded)
    return loaded


def read_result(result: ResultFolder) -> LoadedRun | LoadedComparison | LoadedSearch:
    """Read what a folder was found to hold: runs, or a search."""
    if result.kind == "tuning":
        files = find_tuning_files(result.path)
        read = [read_json_file(file, TuningFile).methods.values() for file in files]
        return LoadedSearch(result.path, files, [each for several in read for each in several])
    records = [RunRecords.read(each) for each in result.runs]
    if result.kind == "run":
        return LoadedRun(records[0])
    return LoadedComparison(result.path, records)


def _refuse_unfinished(result: ResultFolder, loaded: Loaded) -> None:
    runs = loaded.runs if isinstance(loaded, LoadedComparison) else [loaded]
    waiting = [each for each in runs if isinstance(each, LoadedRun) and each.summary is None]
    names = [each.path.name for each in waiting] + list(result.left_out)
    if not names:
        return
    if isinstance(loaded, LoadedRun):
        rounds = f"round {loaded.history[-1]['round']} of {loaded.experiment.rounds}"
        raise InvalidInput(
            f"path is {str(loaded.path)!r}, a run that has not ended ({rounds}); resume it by "
            f"mpfedcl run --resume {loaded.path}, or read it as it is: unfinished=True."
        )
    more = f" and {len(names) - 3} others" if len(names) > 3 else ""
    raise InvalidInput(
        f"path is {str(result.path)!r}; runs in it have not ended ({', '.join(names[:3])}{more}): "
        "let the same command or call finish them, or read them as they are: unfinished=True."
    )
