"""A run, a comparison or a search, read from its folder: to look at, to compute with, to draw."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import combinations
from pathlib import Path
from typing import Any

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.json_files import Json
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.wording import describe_data
from mpfedcl.methods import TESTS
from mpfedcl.report.accuracy_figures import (
    describe_runs,
    draw_accuracy,
    draw_accuracy_over_time,
    draw_split,
    has_virtual_time,
    knows_split,
)
from mpfedcl.report.comparison_figures import comparison_figures
from mpfedcl.report.document import compare_runs
from mpfedcl.report.figures import DrawnFigure, draw_for_python, draw_run_curves
from mpfedcl.report.file_schemas import SearchRecord
from mpfedcl.report.results import run_tables
from mpfedcl.report.results.long_table import Library, LongTable, Value
from mpfedcl.report.results.other_tables import scores_table, settings_table
from mpfedcl.report.results.shown import as_html, as_text
from mpfedcl.report.run_description import RunRecords, describe_run
from mpfedcl.report.search_figure import draw_scores
from mpfedcl.report.seed_groups import find_ranking_obstacles, run_readings_table
from mpfedcl.report.tuning_section import describe_tuning
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.studies.statistics import LEVEL, paired_difference
from mpfedcl.studies.tuning import present_values


class Offers(dict[str, Callable[..., Any]]):
    """What can be asked for, by name; it shows the names alone."""

    def __repr__(self) -> str:
        return f"[{', '.join(self)}]"


class Loaded(ABC):
    """A result that was read from its folder. A notebook shows it as a table."""

    path: Path

    @property
    @abstractmethod
    def long_tables(self) -> Mapping[str, Callable[[], LongTable]]:
        """What `frame` can return, by name; the first is what it returns unasked."""

    @property
    @abstractmethod
    def figures(self) -> Mapping[str, Callable[[Path], object]]:
        """What draws each figure into a file, by name; `plot` draws the first unasked."""

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
        drawn = draw_for_python(_choose("figure", figure, self.figures))
        if drawn is None:
            raise InvalidInput(f"figure is {figure!r}; {self.path} has nothing to draw in it.")
        return drawn

    def __repr__(self) -> str:
        return as_text(*self._headline())

    def _repr_html_(self) -> str:
        return as_html(*self._headline())


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
        """The method's reading on the clients' local test sets in the last round, in %."""
        return run_tables.last_accuracy(
            self._records, "local_test", self._records.predictors["local_test"]
        )

    @property
    def accuracy_global(self) -> float | None:
        """The method's reading on all clients' tests together in the last round, in %."""
        return run_tables.last_accuracy(
            self._records, "global_test", self._records.predictors["global_test"]
        )

    @property
    def history(self) -> list[dict[str, Any]]:
        """The rounds' records, as rounds.jsonl has them."""
        return [line.to_json() for line in self._records.rounds]

    @property
    def summary(self) -> dict[str, Any] | None:
        """What summary.json has; None where the run has not ended."""
        return None if self._records.summary is None else self._records.summary.to_json()

    @property
    def long_tables(self) -> Mapping[str, Callable[[], LongTable]]:
        """accuracy, clients, rounds, runs."""
        return _tables_of_runs([self._records])

    @property
    def figures(self) -> Mapping[str, Callable[[Path], object]]:
        """accuracy; partition, where it is known."""
        return Offers({"accuracy": self._draw_accuracy, **_split_of(self._records)})

    def _draw_accuracy(self, path: Path) -> None:
        data, _ = _describe_data(self._records)
        title = f"{self._records.method_name} on {data}, clients' local test sets"
        draw_run_curves(self.history, title, path)

    def _headline(self) -> tuple[str, Json]:
        done, planned = self._records.rounds[-1].round, self.experiment.rounds
        ended = "" if self._records.summary else f", not finished: round {done} of {planned}"
        about = f"{self._records.method_name} on {', '.join(_describe_data(self._records))}{ended}"
        table = run_readings_table(self._records)
        rows = [
            [cell | {"text": f"{cell['text']}*"} if cell.get("strong") else cell for cell in row]
            for row in table["rows"]
        ]
        star = "*: the predictor that the method is judged by on this test."
        return f"{about} ({self.path})", table | {"rows": rows, "notes": [star, *table["notes"]]}


class LoadedComparison(Loaded):
    """Several runs: those that differ in their seed alone belong together."""

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
    def long_tables(self) -> Mapping[str, Callable[[], LongTable]]:
        """accuracy, clients, rounds, runs; differences, where methods can be compared."""
        tables = _tables_of_runs(self._records)
        if not find_ranking_obstacles(self._described["groups"], self._records):
            tables["differences"] = self._differences
        return tables

    @property
    def figures(self) -> Mapping[str, Callable[[Path], object]]:
        """accuracy, seeds, differences, clients, costs, reliability, the first partition."""
        figures: dict[str, Callable[[Path], object]]
        figures = {"accuracy": partial(draw_accuracy, self._groups)}
        # A folder of runs that nobody has compared has no such file.
        if content := RunDirectory(self.path).read_json("comparison.json"):
            names = {each.experiment.method: each.method_name for each in self._records}
            content["methods"] = {names.get(n, n): e for n, e in content["methods"].items()}
            figures |= comparison_figures(content, describe_runs(self._records))
        if has_virtual_time(self._groups):
            figures["accuracy-over-time"] = partial(draw_accuracy_over_time, self._groups)
        return Offers(figures | _split_of(self._records[0]))

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
        about = f"{len(self._groups)} methods on {describe_runs(self._records)}; {seeds}"
        waiting = [each.name for each in self._records if each.summary is None]
        ended = f"; not finished: {', '.join(waiting)}" if waiting else ""
        return f"{about}{ended} ({self.path})", self._described["tables"][0]


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
            scores=partial(scores_table, self._searches),
            settings=partial(settings_table, self._searches),
        )

    @property
    def figures(self) -> Mapping[str, Callable[[Path], object]]:
        """scores."""
        return Offers(scores=partial(draw_scores, self._searches))

    def _headline(self) -> tuple[str, Json]:
        section = describe_tuning(self._files)
        return f"{section['title']} ({self.path})", section["tables"][0]


def _choose(
    field: str, asked: str | None, offered: Mapping[str, Callable[..., Any]]
) -> Callable[..., Any]:
    """Return what was asked for by name, or the first."""
    name = next(iter(offered)) if asked is None else asked
    if name not in offered:
        raise InvalidInput(f"{field} is {asked!r}; it must be one of {', '.join(offered)}.")
    return offered[name]


def _tables_of_runs(records: Sequence[RunRecords]) -> Offers:
    return Offers(
        accuracy=partial(run_tables.accuracy_table, records),
        clients=partial(run_tables.clients_table, records),
        rounds=partial(run_tables.rounds_table, records),
        runs=partial(run_tables.runs_table, records),
    )


def _split_of(records: RunRecords) -> dict[str, Callable[[Path], object]]:
    return {"partition": partial(draw_split, records)} if knows_split(records) else {}


def _describe_data(records: RunRecords) -> tuple[str, str]:
    is_network = records.partition is not None and records.partition.network
    return describe_data(records.experiment, {"network": is_network})
