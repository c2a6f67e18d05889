"""Tuning: successive halving over a method's search space, evaluated on validation images.

Every method gets the same number of trials. The state of a search is read from the records of its
runs, so a search that was killed continues from them.
"""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Self

import numpy
from pydantic import field_serializer, field_validator, model_validator

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import FORMAT, write_atomically
from mpfedcl.core.json_files import FileContent, Json
from mpfedcl.core.rng import numpy_generator
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.names import metric_sign
from mpfedcl.methods import PredictorName, find_method
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.runs.plan import resolve
from mpfedcl.studies.jobs import (
    JobOptions,
    JobPool,
    PlannedRun,
    reject_budget,
    reject_other_runs,
    reject_repeated,
)

BUDGET = 12
VALIDATION = 0.2
LEARNING_RATE = "train__lr"

SearchSpace = dict[str, tuple[Any, ...]]
"""The values of each hyperparameter that is searched."""
Values = dict[str, Any]
"""One value for each hyperparameter."""
Scores = Mapping[int, float | None]
"""Scores by the number of the trial, larger is better; None, the worst, if a run has no score."""

_SHARES = (4, 2, 1)
"""All trials run a quarter of the rounds, half of them half, and a quarter all rounds."""


@dataclass(frozen=True)
class Rung:
    """A rung: this many trials run up to this round; the defaults always run to the end."""

    rounds: int
    settings: int


@dataclass(frozen=True)
class Trial:
    """One trial: the values of all hyperparameters, and their scores."""

    number: int
    """0 is the trial of the defaults."""
    values: Values
    changes: Values
    """The values that differ from the defaults."""
    scores: dict[int, float | None]
    """Value of the primary metric on validation samples by round."""
    stopped_after: int | None
    """The round after which the trial was stopped; None if it ran to the end."""
    runs: list[str]
    """The folders of the runs, one per seed."""


class TuningResult(FileContent):
    """The result of tuning a method: tuning.json in the folder of the method."""

    format: int = FORMAT
    method: str
    predictor: PredictorName
    base: Experiment
    """The experiment with the defaults; it is tested on its test images."""
    search_space_used: SearchSpace
    budget: int
    seeds: list[int]
    validation: float
    rungs: list[Rung]
    trials: list[Trial]
    chosen: int
    within: list[int]
    """The trials whose score is within a standard error of the best."""
    standard_error: float | None
    """Of the best score, in points; None if the metric is not accuracy."""
    rounds_run: int
    seconds: float

    @field_validator("base", mode="before")
    @classmethod
    def _read_base(cls, value: Any) -> Any:
        try:
            return Experiment(**value) if isinstance(value, dict) else value
        except (InvalidInput, TypeError) as error:
            raise ValueError(str(error)) from None

    @field_serializer("base")
    def _write_base(self, base: Experiment) -> Json:
        plain: Json = json.loads(base.model_dump_json(exclude_none=True))
        return plain

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.rungs or [trial.number for trial in self.trials] != [*range(len(self.trials))]:
            raise ValueError("rungs are missing, or trials out of order")
        if not 0 <= self.chosen < len(self.trials):
            raise ValueError(f"chosen is {self.chosen}; it must be the number of a trial")
        return self

    def __repr__(self) -> str:
        chosen = ", ".join(f"{n.replace('__', '.')} {v}" for n, v in self.chosen_values.items())
        score = "no score" if self.score is None else f"{self.metric} {self.score:.4g}"
        return (
            f"{self.method}: trial {self.chosen} of {len(self.trials)} is chosen, {score} on "
            f"validation samples ({chosen or 'nothing to tune'})"
        )

    __str__ = __repr__

    @property
    def metric(self) -> str:
        """The primary metric, which gives the scores."""
        return self.base.metric

    @property
    def chosen_values(self) -> Values:
        """The chosen value of each hyperparameter, for `Experiment.replace`."""
        return self.trials[self.chosen].values

    @property
    def changes(self) -> Values:
        """The chosen values that are not the defaults."""
        return self.trials[self.chosen].changes

    @property
    def is_fixed(self) -> bool:
        """Whether the method has no hyperparameters to tune."""
        return not self.search_space_used

    @property
    def best(self) -> Experiment:
        """The experiment with the chosen values, tested on its test images."""
        return self.base.replace(**self.chosen_values)

    @property
    def score(self) -> float | None:
        """The validation score of the chosen trial in the last round."""
        return self.trials[self.chosen].scores.get(self.rungs[-1].rounds)

    @property
    def default_score(self) -> float | None:
        """The validation score of the defaults in the last round."""
        return self.trials[0].scores.get(self.rungs[-1].rounds)

    def write(self, folder: Path) -> None:
        """Write tuning.json and the chosen settings."""
        RunDirectory(folder).write_json("tuning.json", self.to_json())
        self.write_best(folder)

    def write_best(self, folder: Path) -> None:
        """Write the chosen settings as a file that `mpfedcl run` and `mpfedcl compare` take."""
        name = f"best-{self.method.replace(':', '.')}.toml"
        write_atomically(folder / name, self.best.to_toml().encode())


def describe_changes(changes: Values) -> list[str]:
    """Return short texts such as `lr 0.1`, one per changed hyperparameter."""
    return [f"{name.rpartition('__')[2]} {value}" for name, value in changes.items()]


def run_searches(searches: Sequence["Search"], options: JobOptions) -> bool:
    """Run searches in parallel, rung by rung; return whether all are complete."""
    with JobPool(options) as pool:
        while due := [planned for search in searches for planned in search.due_runs()]:
            if not pool.run(due):
                return False
    return True


@dataclass(frozen=True)
class Search:
    """The trials for one method, and the folder of their runs."""

    base: Experiment
    """The experiment with the defaults; its seed is not used."""
    path: Path
    budget: int
    seeds: Sequence[int]
    validation: float
    predictor: PredictorName
    """The predictor that gives the score."""

    @classmethod
    def prepare(
        cls,
        base: Experiment,
        method: str,
        path: Path,
        budget: int = BUDGET,
        seeds: Sequence[int] = (0,),
        *,
        validation: float = VALIDATION,
        predictor: PredictorName | None = None,
    ) -> Self:
        """Draw the trials, and reject a folder that holds another search.

        `predictor` gives the score; None is the method's primary predictor on local test sets.
        """
        reject_budget(base, "tuning")
        reject_repeated("seeds", seeds)
        if not isinstance(budget, int) or budget < 1:
            raise InvalidInput(f"budget is {budget!r}; it must be at least 1.")
        if not isinstance(validation, int | float) or not 0 < validation < 1:
            shown = f"{validation:g}" if isinstance(validation, float) else repr(validation)
            raise InvalidInput(f"validation is {shown}; it must be between 0 and 1.")
        base = base.replace(method=method, partition__validation=0.0)
        primary = _primary_predictor(resolve(base))
        judged = predictor or primary
        if base.metric != "accuracy" and judged != primary:
            raise InvalidInput(
                f"predictor is {judged!r}; with metric {base.metric!r} it must be left out: of "
                "other predictors than the primary one only accuracy is measured."
            )
        search = cls(base, path, budget, tuple(seeds), validation, judged)
        reject_other_runs(search._planned_or_begun_runs(), path)
        return search

    @cached_property
    def _complete(self) -> Experiment:
        """The base experiment with its defaults."""
        return resolve(self.base)

    @cached_property
    def grid(self) -> SearchSpace:
        """The values of each hyperparameter."""
        search_space = find_method(self.base.method).search_space
        return build_grid(search_space, self._complete, self.budget)

    @cached_property
    def settings(self) -> list[Values]:
        """The values of each trial, the defaults first."""
        defaults = {name: self._complete.setting(name) for name in self.grid}
        generator = numpy_generator(self.seeds[0], "tuning", self.base.method)
        return draw_settings(self.grid, defaults, self.budget, generator)

    @cached_property
    def rungs(self) -> tuple[Rung, ...]:
        """The rungs of successive halving."""
        # One-shot methods have one round.
        return plan_rungs(self._complete.rounds, len(self.settings))

    @property
    def most_rounds(self) -> int:
        """The rounds of all runs in total, if the defaults are never among the best."""
        total, before = 0, 0
        for rung in self.rungs:
            running = min(rung.settings + 1, len(self.settings))
            total += running * (rung.rounds - before) * len(self.seeds)
            before = rung.rounds
        return total

    def rounds_done(self) -> int:
        """Return how many rounds are on record."""
        # Lines are counted, not parsed: this is called twice a second for hundreds of runs.
        return sum(each.read_bytes().count(b"\n") for each in self.path.glob("*/rounds.jsonl"))

    def planned_run(self, number: int, seed: int, rounds: int) -> PlannedRun:
        """Return the run of a trial with one seed."""
        defaults, whole = find_method(self.base.method).defaults, self._complete
        # Defaults that depend on the number of rounds follow from all rounds, not from a rung's.
        found = {name: whole.setting(name) for name, each in defaults.items() if callable(each)}
        is_primary = _primary_predictor(whole) == self.predictor
        experiment = self.base.replace(
            **found,
            seed=seed,
            rounds=rounds,
            partition__validation=self.validation,
            # Only the scores at the ends of rungs are needed.
            evaluate_every=math.gcd(*(rung.rounds for rung in self.rungs)),
            evaluate_predictors="primary" if is_primary else "all",
            personal_models=False,
            **self.settings[number],
        )
        return PlannedRun(resolve(experiment), self._run_folder(number, seed))

    def _planned_or_begun_runs(self) -> list[PlannedRun]:
        """Return the runs of all trials, with the rounds of those that have begun."""
        planned = []
        for number in range(len(self.settings)):
            for seed in self.seeds:
                directory = RunDirectory(self._run_folder(number, seed))
                is_begun = directory.holds_run()
                rounds = directory.read_experiment().rounds if is_begun else self.base.rounds
                planned.append(self.planned_run(number, seed, rounds))
        return planned

    def due_runs(self) -> list[PlannedRun]:
        """Return the missing runs of the first incomplete rung."""
        return self._evaluate_rungs()[2]

    def collect_result(self) -> TuningResult:
        """Return the result of a complete search."""
        scores, stopped, _ = self._evaluate_rungs()
        last, defaults = self.rungs[-1].rounds, self.settings[0]
        trials = [
            Trial(
                number,
                values,
                {name: value for name, value in values.items() if value != defaults[name]},
                scores[number],
                stopped.get(number),
                [self._run_folder(number, seed).name for seed in self.seeds],
            )
            for number, values in enumerate(self.settings)
        ]
        final = {each.number: each.scores[last] for each in trials if last in each.scores}
        known = [score for score in final.values() if score is not None]
        # A score that is no share of samples has no binomial error.
        has_error = bool(known) and self.base.metric == "accuracy"
        error = self._standard_error(max(known)) if has_error else None
        num_changes = [len(each.changes) for each in trials]
        chosen, within = choose_settings(self._rankable(final), num_changes, error or 0.0)
        records = [
            record
            for number in range(len(trials))
            for seed in self.seeds
            for record in RunDirectory(self._run_folder(number, seed)).read_records()
        ]
        return TuningResult(
            method=self.base.method,
            predictor=self.predictor,
            base=self.base,
            search_space_used=self.grid,
            budget=self.budget,
            seeds=list(self.seeds),
            validation=self.validation,
            rungs=list(self.rungs),
            trials=trials,
            chosen=chosen,
            within=within,
            standard_error=error,
            rounds_run=len(records),
            seconds=round(sum(sum(record["seconds"].values()) for record in records), 3),
        )

    def write_result(self) -> TuningResult:
        """Write and return the result of a complete search; weights are deleted."""
        result = self.collect_result()
        result.write(self.path)
        for path in self.path.glob("trial-*"):
            shutil.rmtree(RunDirectory(path).checkpoints, ignore_errors=True)
            for file in path.glob("*.safetensors"):
                file.unlink(missing_ok=True)
        return result

    def _evaluate_rungs(
        self,
    ) -> tuple[list[dict[int, float | None]], dict[int, int], list[PlannedRun]]:
        """Return the scores so far, the rounds after which trials stopped, and the missing runs."""
        scores: list[dict[int, float | None]] = [{} for _ in self.settings]
        stopped: dict[int, int] = {}
        running = list(range(len(self.settings)))
        for rung, following in zip(self.rungs, [*self.rungs[1:], None], strict=True):
            planned = [
                self.planned_run(n, seed, rung.rounds) for n in running for seed in self.seeds
            ]
            if due := [each for each in planned if not each.is_done()]:
                return scores, stopped, due
            for number in running:
                scores[number][rung.rounds] = self._score(number, rung.rounds)
            if following is not None:
                at_rung = {number: scores[number][rung.rounds] for number in running}
                kept = keep_best(self._rankable(at_rung), following.settings)
                stopped |= {number: rung.rounds for number in running if number not in kept}
                running = kept
        return scores, stopped, []

    def _rankable(self, scores: Scores) -> Scores:
        """Return scores of which the largest is the best."""
        sign = metric_sign(self.base.metric)
        return {n: None if each is None else sign * each for n, each in scores.items()}

    def _score(self, number: int, round_number: int) -> float | None:
        """Return the mean over seeds of the primary metric after a round."""

        def value(record: Mapping[str, Any]) -> float | None:
            if self.base.metric == "accuracy":
                found: float | None = record["accuracy"]["local_test"][self.predictor]
                return found
            return (record.get("metric") or {}).get("local_test")

        found = [
            value(record)
            for seed in self.seeds
            for record in RunDirectory(self._run_folder(number, seed)).read_records()
            if record["round"] == round_number
        ]
        known = [each for each in found if each is not None]
        return fmean(known) if len(known) == len(found) else None

    def _standard_error(self, score: float) -> float:
        experiment = self.planned_run(0, self.seeds[0], self.base.rounds).experiment
        sizes = []
        for seed in self.seeds:
            content = RunDirectory(self._run_folder(0, seed)).read_json("partition.json")
            assert content is not None
            sizes.append([client["test"] for client in content["clients"].values()])
        return standard_error(score, sizes, shared=experiment.partition.test == "shared")

    def _run_folder(self, number: int, seed: int) -> Path:
        width = len(str(len(self.settings) - 1))
        return self.path / f"trial-{number:0{width}}-seed{seed}"


def _primary_predictor(experiment: Experiment) -> PredictorName:
    # It does not depend on the number of classes.
    return find_method(experiment.method)(experiment, num_classes=1).predictor_on("local_test")


# The search space


def build_grid(
    search_space: Mapping[str, Sequence[Any]], base: Experiment, budget: int
) -> SearchSpace:
    """Return the values to search; the defaults are always among them.

    A grid with fewer points than the budget gets more learning rates, the geometric means of
    neighbors, so that methods with few hyperparameters get as many trials as others.
    """
    try:
        defaults = {name: base.setting(name) for name in search_space}
    except AttributeError:
        raise InvalidInput(
            f"the search space of {base.method} has {', '.join(search_space)}; each must name a "
            f"setting, such as {LEARNING_RATE}."
        ) from None
    grid = {
        name: tuple(values) if defaults[name] in values else (defaults[name], *values)
        for name, values in search_space.items()
    }
    if LEARNING_RATE in grid:
        grid[LEARNING_RATE] = tuple(sorted(grid[LEARNING_RATE]))
    while LEARNING_RATE in grid and count_settings(grid) < budget:
        rates = grid[LEARNING_RATE]
        means = (float(f"{math.sqrt(a * b):.3g}") for a, b in pairwise(rates))
        grid[LEARNING_RATE] = tuple(sorted({*rates, *means}))
        if grid[LEARNING_RATE] == rates:
            break
    return grid


def count_settings(grid: Mapping[str, Sequence[Any]]) -> int:
    """Return the number of points of a grid."""
    return math.prod(len(values) for values in grid.values())


def draw_settings(
    grid: SearchSpace, defaults: Values, budget: int, generator: numpy.random.Generator
) -> list[Values]:
    """Draw `budget` different points of a grid, or all points.

    The defaults come first, then the defaults at each other learning rate, then random points. All
    learning rates have the same number of trials, give or take one.
    """
    rates = grid.get(LEARNING_RATE, (None,))
    others = {name: values for name, values in grid.items() if name != LEARNING_RATE}
    shape = [len(values) for values in others.values()]
    size = math.prod(shape)
    at_default = [values.index(defaults[name]) for name, values in others.items()]
    default_rate = rates.index(defaults.get(LEARNING_RATE))
    default_number = int(numpy.ravel_multi_index(at_default, shape)) if shape else 0
    remaining = []
    for index in range(len(rates)):
        # Points are drawn by number, because a large grid cannot be enumerated.
        drawn = [int(each) for each in generator.choice(size, min(size, budget + 1), replace=False)]
        first = [] if index == default_rate else [default_number]
        remaining.append([*first, *(number for number in drawn if number != default_number)])
    order = [int(each) for each in generator.permutation(len(rates))]
    tried = [int(index == default_rate) for index in range(len(rates))]
    chosen = [dict(defaults)]
    while len(chosen) < budget and any(remaining):
        index = min((each for each in order if remaining[each]), key=lambda each: tried[each])
        number = remaining[index].pop(0)
        indices = numpy.unravel_index(number, shape) if shape else ()
        tried[index] += 1
        values = {
            name: choices[int(at)]
            for (name, choices), at in zip(others.items(), indices, strict=True)
        }
        if LEARNING_RATE in grid:
            values[LEARNING_RATE] = rates[index]
        chosen.append({name: values[name] for name in grid})
    return chosen


# Successive halving


def plan_rungs(rounds: int, num_settings: int) -> tuple[Rung, ...]:
    """Return the rungs of a search; few rounds give fewer rungs."""
    rungs: dict[int, Rung] = {}
    for share, kept in zip(_SHARES, reversed(_SHARES), strict=True):
        up_to = math.ceil(rounds / share)
        rungs.setdefault(up_to, Rung(up_to, math.ceil(num_settings / kept)))
    return tuple(rungs.values())


def keep_best(scores: Scores, count: int) -> list[int]:
    """Return the `count` best trials and the defaults (0), in order; ties go to the first."""
    ranked = sorted(scores, key=lambda n: (scores[n] is None, -(scores[n] or 0.0), n))
    return sorted({*ranked[:count], *(number for number in scores if number == 0)})


def choose_settings(
    scores: Scores, num_changes: Sequence[int], error: float
) -> tuple[int, list[int]]:
    """Return the chosen trial, and all trials within `error` of the best.

    Of these the one with the fewest changes to the defaults is chosen, then the best score: a
    difference within the error is no reason for a change.
    """
    known = {number: score for number, score in scores.items() if score is not None}
    if not known:
        return 0, []
    # Rounding must not separate equal scores.
    limit = max(known.values()) - error - 1e-9
    within = sorted(number for number, score in known.items() if score >= limit)
    chosen = min(within, key=lambda number: (num_changes[number], -known[number], number))
    return chosen, within


def standard_error(score: float, test_sizes: Sequence[Sequence[int]], *, shared: bool) -> float:
    """Return the standard error of a score in %, from the clients' numbers of test images.

    `test_sizes` has a list per seed. A shared test set counts once; otherwise a score is a mean
    over clients, and small test sets make it uncertain.
    """
    variances = []
    for sizes in test_sizes:
        known = [size for size in sizes if size > 0]
        if shared:
            variances.append(1 / max(known))
        else:
            variances.append(sum(1 / size for size in known) / len(known) ** 2)
    share = score / 100
    return 100 * math.sqrt(share * (1 - share) * sum(variances)) / len(variances)
