"""The search for one method's settings: what is run next, and what came of it.

Everything is read from the runs' records, so a search that was killed continues from them.
"""

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import FORMAT
from mpfedcl.core.rng import numpy_generator
from mpfedcl.experiment import Experiment
from mpfedcl.methods import PredictorName, find_method
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.studies.jobs import JobOptions, JobPool, PlannedRun
from mpfedcl.studies.tuning.grid import Knobs, KnobValues, build_grid, draw_settings
from mpfedcl.studies.tuning.halving import (
    Rung,
    choose_settings,
    keep_best,
    plan_rungs,
    standard_error,
)
from mpfedcl.studies.tuning.result import Trial, TuningResult, present_values

BUDGET = 12
VALIDATION = 0.2
TOLERANCE = 1.0

_NEUTRAL_SETTINGS = {"engine": "auto", "workers": 1, "worker_timeout": 1800.0}
"""Settings that make no difference to results: a search may be resumed with others."""


def run_searches(searches: Sequence["Search"], options: JobOptions) -> bool:
    """Run searches side by side, rung by rung; tell whether all are complete."""
    for search in searches:
        search.write_description()
    with JobPool(options) as pool:
        while due := [planned for search in searches for planned in search.due_runs()]:
            if not pool.run(due):
                return False
    return True


@dataclass(frozen=True)
class Search:
    """The settings to try for one method, and the folder of their runs."""

    base: Experiment
    """The experiment as it is run in the end; its own seed plays no part."""
    path: Path
    grid: Knobs
    settings: Sequence[KnobValues]
    """The settings tried, the defaults first."""
    budget: int
    seeds: Sequence[int]
    validation: float
    tolerance: float
    predictor: PredictorName
    """By which settings are judged."""

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
        tolerance: float = TOLERANCE,
        predictor: PredictorName | None = None,
    ) -> Self:
        """Draw the settings to try, and find out whether the folder can be used.

        `predictor`: by which settings are judged; None: as the method is on the clients' local test sets.
        """
        _check(budget, seeds, validation, tolerance)
        if base.privacy.has_budget:
            raise InvalidInput(
                f"privacy.epsilon is {base.privacy.epsilon:g}; for tuning it must be left "
                "out: each run on private data is a release that costs as much, and choosing by "
                "them costs all of theirs together. Choose on data that need no budget."
            )
        found = find_method(method)
        base = base.replace(method=method, partition__validation=0.0)
        complete = base.resolved(found.defaults)
        grid, defaults = build_grid(found.search_space, complete, budget)
        generator = numpy_generator(seeds[0], "tuning", method)
        settings = draw_settings(grid, defaults, budget, generator)
        # How many classes there are plays no part in how a method is judged.
        judged = predictor or found(complete, num_classes=1).predictor_on("local_test")
        asked = (budget, tuple(seeds), validation, tolerance, judged)
        search = cls(base, path, grid, settings, *asked)
        for number in range(len(settings)):
            search.planned_run(number, search.seeds[0], base.rounds)
        search._refuse_another_search()
        return search

    @cached_property
    def rungs(self) -> tuple[Rung, ...]:
        """How many settings are run how far."""
        # Of one exchange there is one round, whatever is asked for.
        rounds = self.base.resolved(find_method(self.base.method).defaults).rounds
        return plan_rungs(rounds, len(self.settings))

    @cached_property
    def _evaluate_predictors(self) -> str:
        """Whether rungs read more than what the method is judged by."""
        found = find_method(self.base.method)
        method = found(self.base.resolved(found.defaults), num_classes=1)
        return "judged" if method.predictor_on("local_test") == self.predictor else "all"

    @property
    def most_rounds(self) -> int:
        """The rounds of all runs together, if the defaults are never among the best."""
        total, before = 0, 0
        for rung in self.rungs:
            running = min(rung.settings + 1, len(self.settings))
            total += running * (rung.rounds - before) * len(self.seeds)
            before = rung.rounds
        return total

    def rounds_done(self) -> int:
        """Return how many rounds are on record."""
        # Counted, not read: this is asked twice a second, of hundreds of runs.
        return sum(each.read_bytes().count(b"\n") for each in self.path.glob("*/rounds.jsonl"))

    def planned_run(self, number: int, seed: int, rounds: int) -> PlannedRun:
        """Return the run of one of the settings with one seed."""
        defaults = find_method(self.base.method).defaults
        whole = self.base.resolved(defaults)
        # What follows from the whole run's length must not follow from a rung's.
        found = {name: whole.setting(name) for name, each in defaults.items() if callable(each)}
        experiment = self.base.replace(
            **found,
            seed=seed,
            rounds=rounds,
            partition__validation=self.validation,
            # Rungs are evaluated, and nothing else is needed.
            evaluate_every=math.gcd(*(rung.rounds for rung in self.rungs)),
            evaluate_predictors=self._evaluate_predictors,
            personal_models=False,
            trail=False,
            **present_values(self.settings[number]),
        )
        return PlannedRun(experiment.resolved(defaults), self.path / self._run_folder(number, seed))

    def due_runs(self) -> list[PlannedRun]:
        """Return the runs of the first rung that is not complete; none where all are."""
        return self._evaluate_rungs()[2]

    def collect_result(self) -> TuningResult:
        """Return what a complete search found."""
        scores, stopped, _ = self._evaluate_rungs()
        last = self.rungs[-1].rounds
        defaults = self.settings[0]
        changes = [
            {name: value for name, value in values.items() if value != defaults[name]}
            for values in self.settings
        ]
        final = {number: each[last] for number, each in enumerate(scores) if last in each}
        known = [score for score in final.values() if score is not None]
        error = self._standard_error(max(known)) if known else None
        chosen, within = choose_settings(
            final, [len(e) for e in changes], self.tolerance * (error or 0)
        )
        records = [
            record
            for number in range(len(self.settings))
            for seed in self.seeds
            for record in self._records(number, seed)
        ]
        return TuningResult(
            method=self.base.method,
            predictor=self.predictor,
            base=self.base,
            search_space_used=self.grid,
            budget=self.budget,
            seeds=list(self.seeds),
            validation=self.validation,
            tolerance=self.tolerance,
            rungs=list(self.rungs),
            trials=[
                Trial(
                    number,
                    self.settings[number],
                    changes[number],
                    scores[number],
                    stopped.get(number),
                    [self._run_folder(number, seed) for seed in self.seeds],
                )
                for number in range(len(self.settings))
            ],
            chosen=chosen,
            within=within,
            standard_error=error,
            rounds_run=len(records),
            seconds=round(sum(sum(record["seconds"].values()) for record in records), 3),
        )

    def write_description(self) -> None:
        """Write down what is searched, so that the folder is not taken for another search."""
        self.path.mkdir(parents=True, exist_ok=True)
        RunDirectory(self.path).write_json("search.json", self._description())

    def write_result(self) -> TuningResult:
        """Write and return what a complete search found; weights are not kept."""
        result = self.collect_result()
        result.write(self.path)
        self.delete_weights()
        return result

    def delete_weights(self) -> None:
        """Delete the weights of all runs of a complete search; its records stay."""
        for path in self.path.glob("trial-*"):
            shutil.rmtree(RunDirectory(path).checkpoints, ignore_errors=True)
            for file in path.glob("*.safetensors"):
                file.unlink(missing_ok=True)

    def _evaluate_rungs(
        self,
    ) -> tuple[list[dict[int, float | None]], dict[int, int], list[PlannedRun]]:
        """Return the scores so far, after which round settings were dropped, and what is due."""
        scores: list[dict[int, float | None]] = [{} for _ in self.settings]
        stopped: dict[int, int] = {}
        running = list(range(len(self.settings)))
        for rung, following in zip(self.rungs, [*self.rungs[1:], None], strict=True):
            planned = [
                self.planned_run(n, seed, rung.rounds) for n in running for seed in self.seeds
            ]
            due = [each for each in planned if not each.is_done()]
            if due:
                return scores, stopped, due
            for number in running:
                scores[number][rung.rounds] = self._score(number, rung.rounds)
            if following is not None:
                at_rung = {number: scores[number][rung.rounds] for number in running}
                kept = keep_best(at_rung, following.settings)
                stopped |= {number: rung.rounds for number in running if number not in kept}
                running = kept
        return scores, stopped, []

    def _score(self, number: int, round_number: int) -> float | None:
        """Return the mean over seeds of the accuracy after a round."""
        found = [
            record["accuracy"]["local_test"][self.predictor]
            for seed in self.seeds
            for record in self._records(number, seed)
            if record["round"] == round_number
        ]
        return None if None in found else fmean(found)

    def _records(self, number: int, seed: int) -> list[dict[str, Any]]:
        return RunDirectory(self.path / self._run_folder(number, seed)).read_records()

    def _standard_error(self, score: float) -> float:
        experiment = self.planned_run(0, self.seeds[0], self.base.rounds).experiment
        sizes = []
        for seed in self.seeds:
            content = RunDirectory(self.path / self._run_folder(0, seed)).read_json(
                "partition.json"
            )
            assert content is not None
            sizes.append([client["test"] for client in content["clients"].values()])
        return standard_error(score, sizes, shared=experiment.partition.test == "shared")

    def _run_folder(self, number: int, seed: int) -> str:
        width = len(str(len(self.settings) - 1))
        return f"trial-{number:0{width}}-seed{seed}"

    def _description(self) -> dict[str, Any]:
        base = self.base.replace(seed=0, **_NEUTRAL_SETTINGS)
        return {
            "format": FORMAT,
            "base": json.loads(base.model_dump_json()),
            "validation": self.validation,
            "seeds": list(self.seeds),
            "settings": [dict(each) for each in self.settings],
        }

    def _refuse_another_search(self) -> None:
        """Refuse a folder that holds the runs of another search."""
        if not any(self.path.glob("*/experiment.toml")):
            return
        found = RunDirectory(self.path).read_json("search.json") or {}
        # Read as settings: those that were added since had their defaults.
        found["base"] = json.loads(Experiment(**found.get("base", {})).model_dump_json())
        if found != json.loads(json.dumps(self._description())):
            raise InvalidInput(
                f"out is {str(self.path)!r}; it holds a search with other settings: give another "
                "folder, or the settings it was begun with."
            )


def _check(budget: int, seeds: Sequence[int], validation: float, tolerance: float) -> None:
    if budget < 1:
        raise InvalidInput(f"budget is {budget}; it must be at least 1.")
    if not seeds or len(set(seeds)) < len(seeds):
        raise InvalidInput(f"seeds is {list(seeds)}; it must name at least one, and each once.")
    if not 0 < validation < 1:
        raise InvalidInput(f"validation is {validation:g}; it must be between 0 and 1.")
    if not 0 <= tolerance < math.inf:
        raise InvalidInput(f"tolerance is {tolerance:g}; it must be 0 or more.")
