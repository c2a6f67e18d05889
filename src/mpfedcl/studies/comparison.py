"""Comparisons: one experiment with several methods and seeds, in one folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.json_files import validate_content
from mpfedcl.experiment import RESULT_NEUTRAL_SETTINGS, Experiment
from mpfedcl.experiment.experiment import take_choices
from mpfedcl.methods import PREDICTORS, TESTS, OneShot, built_in_methods, find_method
from mpfedcl.rounds.metrics import measure_fairness, pool_bins
from mpfedcl.rounds.record import RoundRecord, training_seconds
from mpfedcl.rounds.systems import check_clock, check_timing
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.studies.jobs import JobOptions, PlannedRun, run_planned
from mpfedcl.studies.statistics import LEVEL, find_best, mark_best, paired_difference

ALL = "all"
"""Stands for every built-in method."""
_ANY_CLASSES = 2


def choose_methods(base: Experiment, named: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the methods of a comparison; with `all`, also why other methods do not fit.

    Methods named next to `all` come first, and must fit.
    """
    if ALL not in named:
        return list(named), {}
    chosen = [name for name in named if name != ALL]
    left_out: dict[str, str] = {}
    for name, method in built_in_methods().items():
        if name in chosen:
            continue
        try:
            experiment = base.replace(method=name).resolved(method.defaults)
            check_timing(method, experiment)
            check_clock(method, experiment)
            method(experiment, _ANY_CLASSES)
        except InvalidInput as refusal:
            left_out[name] = str(refusal)
        else:
            chosen.append(name)
    return chosen, left_out


@dataclass(frozen=True)
class Comparison:
    """The runs of a comparison, in the order of methods, then seeds."""

    path: Path
    planned_runs: Sequence[PlannedRun]

    @classmethod
    def prepare(
        cls, base: Experiment, methods: Sequence[str], seeds: Sequence[int], path: Path
    ) -> "Comparison":
        """Plan a comparison in a folder, new or interrupted."""
        if base.privacy.has_budget:
            raise InvalidInput(
                f"privacy.epsilon is {base.privacy.epsilon:g}; for a comparison it must be left "
                "out: each run on private data is a release, and a choice among runs spends the "
                "budgets of all of them. Choose on data that need no budget."
            )
        for name, values in (("methods", methods), ("seeds", seeds)):
            if not values or len(set(values)) < len(values):
                raise InvalidInput(
                    f"{name} is {list(values)}; it must name at least one, and each once."
                )
        planned_runs = []
        for method in methods:
            found = find_method(method)
            for seed in seeds:
                experiment = base.replace(method=method, seed=seed).resolved(found.defaults)
                if issubclass(found, OneShot) and experiment.statistics.keep == "auto":
                    # Clients do not join runs of comparisons, and their statistics take 60 MB.
                    experiment = experiment.replace(statistics__keep="pooled")
                # The full name, because two modules may each have a class Mine.
                folder = f"{method.replace(':', '.')}-seed{seed}"
                planned_runs.append(PlannedRun(experiment, path / folder))
        for planned in planned_runs:
            directory = RunDirectory(planned.path)
            if not directory.holds_run():
                continue
            begun = directory.read_experiment()
            asked = take_choices(planned.experiment, begun)
            neutral = {name: asked.setting(name) for name in RESULT_NEUTRAL_SETTINGS}
            if begun.replace(**neutral) != asked:
                raise InvalidInput(
                    f"out is {str(path)!r}; {planned.path.name} in it holds a run with other "
                    "settings: give another folder, or the settings it was begun with."
                )
        return cls(path, planned_runs)

    def rounds_done(self) -> int:
        """Return the number of recorded rounds of all runs."""
        return sum(planned.rounds_done() for planned in self.planned_runs)

    def run(self, options: JobOptions) -> bool:
        """Run what is not complete; return whether all runs are complete now."""
        return run_planned(self.planned_runs, options)

    def collect(self) -> dict[str, Any]:
        """Return the results by method, test set and predictor, one number per seed."""
        methods: dict[str, Any] = {}
        for planned in self.planned_runs:
            summary = planned.summary()
            assert summary is not None
            last = validate_content(
                RunDirectory(planned.path).read_records()[-1], RoundRecord, str(planned.path)
            )
            # With many clients a run lists the last participants only, which differ between runs.
            spread = summary.get("accuracy_spread")
            listed = {} if spread else summary["accuracy_per_client"]
            entry = methods.setdefault(
                planned.experiment.method,
                {
                    "predictor": summary["predictor"],
                    "predictor_global": summary["predictor_global"],
                    "accuracy": [],
                    "accuracy_global": [],
                    "predictors": {test: {r: [] for r in PREDICTORS} for test in TESTS},
                    "accuracy_per_client": {name: [] for name in listed},
                    "fairness": [],
                    "calibration": {test: {"error": [], "bins": []} for test in TESTS},
                    "bytes": [],
                    "seconds": [],
                    "runs": [],
                    "diverged": [],
                },
            )
            if last.has_diverged(entry["predictor"]):
                entry["diverged"].append(planned.experiment.seed)
            fairness = measure_fairness((listed or {}).values())
            entry["fairness"].append(spread or (fairness and fairness.to_json()))
            _add_calibration(entry["calibration"], last)
            entry["accuracy"].append(summary["predictors"]["local_test"].get(entry["predictor"]))
            entry["accuracy_global"].append(
                summary["predictors"]["global_test"].get(entry["predictor_global"])
            )
            for client, accuracy in listed.items():
                entry["accuracy_per_client"][client].append(accuracy)
            for test in TESTS:
                for predictor in PREDICTORS:
                    entry["predictors"][test][predictor].append(
                        summary["predictors"][test].get(predictor)
                    )
            entry["bytes"].append(summary["bytes"]["up"] + summary["bytes"]["down"])
            entry["seconds"].append(round(training_seconds(summary["seconds"]), 3))
            entry["runs"].append(planned.path.name)
        # In the given order, as the numbers above.
        seeds = list(dict.fromkeys(planned.experiment.seed for planned in self.planned_runs))
        return {
            # One-shot methods have one round.
            "rounds": max(planned.experiment.rounds for planned in self.planned_runs),
            "seeds": seeds,
            "shared_test": all(
                each.experiment.partition.test == "shared" for each in self.planned_runs
            ),
            "methods": methods,
            "differences": {
                "level": LEVEL,
                "local_test": _compare({name: each["accuracy"] for name, each in methods.items()}),
                "global_test": _compare(
                    {name: each["accuracy_global"] for name, each in methods.items()}
                ),
            },
        }

    def write(self, content: dict[str, Any]) -> None:
        """Write the collected results into comparison.json."""
        RunDirectory(self.path).write_json("comparison.json", content)


def _add_calibration(calibration: dict[str, Any], last: RoundRecord) -> None:
    """Add a run's calibration error and bins, if it has any, to those of other seeds."""
    for test in TESTS:
        found = calibration[test]
        error = (last.calibration_error or {}).get(test)
        if error is not None:
            found["error"].append(error)
        found["bins"] = pool_bins([found["bins"], (last.calibration_bins or {}).get(test, [])])


def _compare(values: dict[str, Any]) -> dict[str, Any]:
    """Compare the methods on one kind of test set with the best and with the first."""
    best, first = find_best(values), next(iter(values))
    return {
        "marks": mark_best(values),
        "best": best,
        "to_best": _differences(values, best),
        "first": first,
        "to_first": _differences(values, first),
    }


def _differences(values: dict[str, Any], other: str | None) -> dict[str, Any]:
    """Return each method's paired difference to another; None if they share no seed."""
    found = {
        name: None if other is None else paired_difference(numbers, values[other])
        for name, numbers in values.items()
        if name != other
    }
    return {name: None if each is None else each.to_json() for name, each in found.items()}
