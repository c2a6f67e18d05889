"""Run the paper's tables and figures: values per cell and seed, marks, and published values."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Literal

import mpfedcl
from mpfedcl import Experiment
from reproduction.items import ITEMS, PREDICTORS, TRACKS, Cell, Item, Sets
from reproduction.paper_page import draw_item, write_page
from reproduction.runs import Record, Runs, training_seconds
from reproduction.tables import DOCS, mark_best, paired_difference

SEEDS = (0, 1, 2)
TUNING_SEEDS = (100, 101, 102)
"""Other draws of the data than those that are reported."""
BUDGET = 12
Json = dict[str, Any]
Records = Sequence[Record]


@dataclass(frozen=True)
class Finished:
    """A run as a cell sees it: its first rounds, and the paper's predictor."""

    records: Records
    predictor: str

    def accuracy(self, record: Record, test: str = "local_test") -> float | None:
        """Return the accuracy in a round by the paper's predictor; None if not evaluated."""
        found: float | None = (record["accuracy"] or {}).get(test, {}).get(self.predictor)
        return found

    def first_round_at(self, level: float) -> int | None:
        """Return the first evaluated round in which an accuracy was reached."""
        for number, record in enumerate(self.records, start=1):
            value = self.accuracy(record)
            if value is not None and value >= level:
                return number
        return None


def _after(run: Finished, rounds: int, _: Finished | None) -> float | None:
    return run.accuracy(run.records[min(rounds, len(run.records)) - 1])


def _megabytes_to(run: Finished, level: float, _: Finished | None) -> float | None:
    last = run.first_round_at(level)
    if last is None:
        return None
    return float(sum(sum(record["bytes"].values()) for record in run.records[:last])) / 1e6


def _same_time(run: Finished, _: Any, other: Finished | None) -> float | None:
    """Return the last accuracy before the other run's training time is used up."""
    assert other is not None
    # A run's own time is reached exactly; rounding must not cut its last round off.
    limit = sum(map(training_seconds, other.records)) * (1 + 1e-9)
    spent, found = 0.0, None
    for record in run.records:
        spent += training_seconds(record)
        if spent > limit:
            break
        found = found if run.accuracy(record) is None else run.accuracy(record)
    return found


@dataclass(frozen=True)
class Measure:
    """Which value of a run a cell shows."""

    title: str
    unit: str
    better: Literal["higher", "lower"] | None
    compute: Callable[[Finished, Any, Finished | None], float | None]
    """From the run, the argument of the cell, and the run it is compared with."""


LOCAL = "local test set"
MEASURES = {
    "last": Measure("", "%", "higher", lambda run, test, _: run.accuracy(run.records[-1], test)),
    "column": Measure(
        LOCAL, "%", "higher", lambda run, test, _: run.accuracy(run.records[-1], test)
    ),
    "client": Measure(
        LOCAL,
        "%",
        "higher",
        lambda run, client, _: run.records[-1]["accuracy_per_client"].get(client),
    ),
    "after": Measure(f"{LOCAL}, after the given rounds", "%", "higher", _after),
    "rounds to": Measure(
        "rounds to reach", "rounds", "lower", lambda run, level, _: run.first_round_at(level)
    ),
    "megabytes to": Measure("megabytes to reach", "MB", "lower", _megabytes_to),
    "same time": Measure(f"{LOCAL}, at the same training time", "%", "higher", _same_time),
    "sent": Measure(
        "sent by a client", "numbers", None, lambda run, name, _: run.records[-1]["sent"][name]
    ),
}


@dataclass(frozen=True)
class Paper:
    """The runs of the paper in a folder."""

    folder: Path
    runs: Runs
    seeds: Sequence[int] = SEEDS
    _searches: dict[Path, Any] = field(default_factory=dict)

    def tuned(self, base: Experiment) -> Any:
        """Return the search for the settings of an experiment, run now if need be."""
        base = self.runs.prepare(base)
        folder = self.folder / "tuning" / self.runs.path(base).name
        if folder not in self._searches:
            self._searches[folder] = mpfedcl.tune(
                base,
                base.method,
                folder,
                budget=2 if self.runs.quick else BUDGET,
                seeds=TUNING_SEEDS[:1] if self.runs.quick else TUNING_SEEDS,
                predictor=PREDICTORS[base.method],
                jobs=self.runs.jobs,
            )
        return self._searches[folder]

    def finished(self, track: str, experiment: Experiment, seed: int) -> Finished:
        """Return a run, run now if need be."""
        predictor = PREDICTORS[experiment.method]
        if track == "tuned":
            experiment = self.tuned(experiment).best
        return Finished(self.runs.records(experiment.replace(seed=seed)), predictor)

    def measure(self, name: str, item: Item) -> Json:
        """Run what an item needs and return its result as plain values."""
        for track in TRACKS:
            wanted = item.experiments(track)
            if track == "tuned":
                wanted = [self.tuned(each).best for each in wanted]
            # Pictures show one run.
            seeds = self.seeds if item.cells or item.curves else self.seeds[:1]
            self.runs.complete(each.replace(seed=seed) for each in wanted for seed in seeds)
        cells = [self._read(cell) for cell in item.cells]
        if not item.axis:
            _mark_best_cells(cells)
        searches = {  # A search serves many cells.
            each.experiment.to_toml(): (each, self.tuned(each.experiment))
            for each in item.cells
            if each.track == "tuned"
        }
        result = {
            "format": 1,
            "id": name,
            "title": item.title,
            "about": item.about,
            "command": f"make reproduce STUDY={name}",
            "seeds": list(self.seeds),
            "columns": [{"key": key, "title": title} for key, title in item.columns.items()],
            "rows": [{"key": key, "title": title} for key, title in item.rows.items()],
            "cells": cells,
            "figures": [
                *_axis_figures(item, cells),
                *(self._curves(*each) for each in (item.curves or {}).items()),
            ],
            "axis": item.axis,
            "notes": list(item.notes),
            "chosen": [
                {
                    "row": cell.row,
                    "set": cell.panel or item.columns[cell.column],
                    "changes": found.changes,
                    "score": found.score,
                    "default_score": found.default_score,
                    "standard_error": found.standard_error,
                }
                for cell, found in searches.values()
            ],
            "quick": self.runs.quick,
            "seconds": round(self._seconds(item) + sum(s.seconds for _, s in searches.values()), 1),
        }
        return result | {"verdicts": compare_with_others(result)}

    def _read(self, cell: Cell) -> Json:
        name, argument = cell.measure
        measure = MEASURES[name]
        values = []
        for seed in self.seeds:
            run = self.finished(cell.track, cell.experiment, seed)
            other = None
            if cell.compared_with is not None:
                other = self.finished(cell.track, cell.compared_with, seed)
            value = measure.compute(run, argument, other)
            values.append(None if value is None else round(value, 4))
        mean, std = (*(cell.published or ()), None, None)[:2]
        return {
            "track": cell.track,
            "panel": cell.panel,
            "test": measure.title or f"{argument.replace('_', ' ')} set",
            "row": cell.row,
            "column": cell.column,
            "unit": measure.unit,
            "better": measure.better,
            "predictor": run.predictor,
            "rounds": len(run.records),
            "values": values,
            "published": cell.published and {"mean": mean, "std": std},
            "mark": None,
        }

    def _curves(self, title: str, experiments: Mapping[str, Experiment]) -> Json:
        lines = []
        for name, experiment in experiments.items():
            runs = [self.finished("paper", experiment, seed) for seed in self.seeds]
            rounds = [n for n, record in enumerate(runs[0].records, start=1) if record["accuracy"]]
            values = [[run.accuracy(run.records[n - 1]) for run in runs] for n in rounds]
            lines.append({"name": name, "x": rounds, **_mean_and_deviation(values)})
        return {"title": title, "x": "round", "y": "accuracy %", "lines": lines}

    def _seconds(self, item: Item) -> float:
        runs = {
            self.runs.path(self.runs.prepare(run)): self.runs.records(run)
            for track in TRACKS
            for each in item.experiments(track)
            for seed in (self.seeds if item.cells or item.curves else self.seeds[:1])
            for run in [(self.tuned(each).best if track == "tuned" else each).replace(seed=seed)]
        }
        return float(sum(sum(r["seconds"].values()) for records in runs.values() for r in records))


def _mark_best_cells(cells: list[Json]) -> None:
    """Mark the best of each column and what is not clearly worse."""
    columns: dict[tuple[str, ...], list[Json]] = {}
    for cell in cells:
        if cell["better"]:
            key = (cell["track"], cell["panel"], cell["test"], cell["column"])
            columns.setdefault(key, []).append(cell)
    for column in columns.values():
        sign = 1 if column[0]["better"] == "higher" else -1
        marks = mark_best(
            {c["row"]: [None if v is None else sign * v for v in c["values"]] for c in column}
        )
        for cell in column:
            cell["mark"] = marks[cell["row"]]


def compare_with_others(result: Json) -> list[str]:
    """Say where MP-FedCL is better, worse or not clearly different, by paired differences."""
    tables: dict[tuple[str, str, str], dict[str, dict[str, list[float | None]]]] = {}
    for cell in result["cells"]:
        if cell["unit"] == "%" and len(cell["values"]) > 1:
            table = tables.setdefault((cell["panel"], cell["test"], cell["track"]), {})
            table.setdefault(cell["row"], {})[cell["column"]] = cell["values"]
    titles = {each["key"]: each["title"] for each in [*result["columns"], *result["rows"]]}
    sentences = []
    for where, rows in tables.items():
        ours = rows.pop("mp-fedcl", {})
        for row, theirs in rows.items() if ours else ():
            said: dict[str, list[str]] = {"better": [], "worse": [], "no clear difference": []}
            for column, values in theirs.items():
                found = paired_difference(ours.get(column, [None] * len(values)), values)
                if found is not None:
                    said[found.verdict].append(f"{titles[column]} {found.mean:+.1f}")
            told = "; ".join(f"{name}: {', '.join(each)}" for name, each in said.items() if each)
            if told:
                place = ", ".join(part for part in where if part)
                sentences.append(f"{place}: MP-FedCL against {titles[row]}: {told}.")
    return sentences


def _axis_figures(item: Item, cells: list[Json]) -> list[Json]:
    """Return the cells of an item with an axis as lines, a figure a panel and test."""
    groups: dict[str, dict[str, list[Json]]] = {}
    for cell in cells if item.axis else ():
        title = ", ".join(part for part in (cell["panel"], cell["test"]) if part)
        # As in the table: a value that a seed lacks leaves a gap.
        if None not in cell["values"]:
            groups.setdefault(title, {}).setdefault(item.rows[cell["row"]], []).append(cell)
    return [
        {
            "title": title,
            "x": item.axis,
            "y": "accuracy %",
            "lines": [
                {
                    "name": name,
                    "x": [float(cell["column"]) for cell in line],
                    **_mean_and_deviation([cell["values"] for cell in line]),
                }
                for name, line in lines.items()
            ],
        }
        for title, lines in groups.items()
    ]


def _mean_and_deviation(values: Sequence[Sequence[Any]]) -> Json:
    return {
        "mean": [round(fmean(each), 4) for each in values],
        "std": [round(pstdev(each), 4) for each in values],
    }


def reproduce(names: Sequence[str], folder: Path, runs: Runs, seeds: Sequence[int]) -> None:
    """Run some items, write their results and figures, and fill docs/reproduction.md.

    Quick results stay in the folder.
    """
    sets, paper = Sets(), Paper(folder, runs, seeds)
    for sentence in sets.missing:
        print(sentence)
    docs = folder / "docs" if runs.quick else DOCS
    (docs / "results").mkdir(parents=True, exist_ok=True)
    for name in names:
        item = ITEMS[name](sets)
        if not (item.cells or item.curves or item.pictures):
            print(f"{name} needs data sets that are not in the data folder.")
            continue
        result = paper.measure(name, item)
        text = json.dumps(result, ensure_ascii=False, separators=(",", ":"))
        # A line per cell, so that a change shows where it is.
        text = text.replace('{"track"', '\n{"track"') + "\n"
        (docs / "results" / f"{name}.json").write_text(text, encoding="utf-8")
        draw_item(name, item, result, docs / "images" / "paper", runs, seeds[0])
    write_page(docs, list(names))
