"""Measure all methods side by side: the tables of docs/benchmark.md.

    python scripts/measure_benchmark.py OUT [--sets mnist office10] [--methods all] [--jobs 2]

For each method the learning rate is chosen on validation images of another draw, among the same
few; then three seeds are run, and both tests are read in the last round. What is there is not run
again, so the same command goes on, with more methods, sets or seeds too. `--time` measures seconds
per round instead, one run at a time: on an idle machine only. `--write` puts what there is into
docs/benchmark.md. Needs the data folder (MPFEDCL_DATA).
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmark_page import write_page
from mpfedcl.api import RUNNER
from mpfedcl.core.files import write_atomically
from mpfedcl.experiment import Experiment
from mpfedcl.methods import find_method
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.studies.comparison import Comparison
from mpfedcl.studies.jobs import JobOptions, PlannedRun, run_planned
from mpfedcl.studies.method_choice import choose_methods

RATES = (0.01, 0.03, 0.1)
"""Tried for each method that trains; the first is the default."""
TUNING_SEED = 100
VALIDATION = 0.2
ROUNDS = 30
POINTS = 5
"""How often a run is evaluated, for the time to a target."""
TIMED_ROUNDS = 3
ALPHA = 0.05
SETS = ("mnist", "office10", "digit5")


@dataclass(frozen=True)
class Situation:
    """A data set, and how it is dealt to clients."""

    dataset: str
    kind: str

    @property
    def title(self) -> str:
        """Its name in the tables, and of its folder."""
        return f"{self.dataset}-{self.kind}"

    def base(self) -> Experiment:
        """Return what all runs have in common."""
        return Experiment(rounds=ROUNDS, evaluate_every=ROUNDS // POINTS).replace(
            dataset__name=self.dataset,
            partition__kind=self.kind,
            partition__alpha=ALPHA,
            # The same clock for all, so that methods that do not wait can be seen to gain by it.
            systems__kind="lognormal",
            personal_models=False,
            trail=False,
        )


def list_situations(sets: Sequence[str]) -> Iterator[Situation]:
    """Yield label skew for each set, and feature skew where there are several domains."""
    for dataset in sets:
        yield Situation(dataset, "label")
        if not dataset.startswith("mnist"):
            yield Situation(dataset, "feature")


def rates_of(method: str) -> tuple[float, ...]:
    """Return the learning rates to try: none for a method that trains nothing."""
    return RATES if find_method(method).trains else RATES[:1]


def plan_search(situation: Situation, method: str, folder: Path) -> dict[float, PlannedRun]:
    """Return the runs that choose a method's learning rate."""
    found = find_method(method)
    base = situation.base().replace(method=method, seed=TUNING_SEED, evaluate_every=ROUNDS)
    base = base.replace(partition__validation=VALIDATION)
    return {
        rate: PlannedRun(
            base.replace(train__lr=rate).resolved(found.defaults),
            folder / "tuning" / f"{method}-lr-{rate:g}",
        )
        for rate in rates_of(method)
    }


def choose_rate(method: str, searched: dict[float, PlannedRun]) -> float:
    """Return the learning rate that does best on validation images; of equals the smallest."""
    if len(searched) == 1:
        return next(iter(searched))
    predictor = find_method(method).predictor
    scores = {}
    for rate, planned in searched.items():
        last = RunDirectory(planned.path).read_records()[-1]
        score = (last["accuracy"] or {}).get("local_test", {}).get(predictor)
        scores[rate] = -math.inf if score is None else score
    return max(scores, key=lambda rate: (scores[rate], -rate))


def measure(
    situation: Situation, methods: Sequence[str], seeds: Sequence[int], out: Path, jobs: int
) -> dict[str, Any]:
    """Run what is missing; return what the page says of each method."""
    folder = out / situation.title
    searches = {method: plan_search(situation, method, folder) for method in methods}
    due = [run for each in searches.values() if len(each) > 1 for run in each.values()]
    options = JobOptions(RUNNER, jobs)
    assert run_planned(due, options)
    rates = {method: choose_rate(method, searches[method]) for method in methods}
    comparisons = {
        method: Comparison.prepare(
            situation.base().replace(train__lr=rates[method]), [method], seeds, folder
        )
        for method in methods
    }
    assert run_planned([run for each in comparisons.values() for run in each.planned_runs], options)
    return {
        method: describe(rates[method], comparison) for method, comparison in comparisons.items()
    }


def describe(rate: float, comparison: Comparison) -> dict[str, Any]:
    """Return a method's results, a number per seed."""
    runs = [RunDirectory(each.path).read_records() for each in comparison.planned_runs]
    (entry,) = comparison.collect()["methods"].values()
    # In the last round of a run that has diverged nobody's update counts.
    num_clients = max(len(record["clients"]["answered"]) for record in runs[0]) or 1
    return {
        "lr": rate,
        "local_test": entry["accuracy"],
        "global_test": entry["accuracy_global"],
        "predictor": entry["predictor"],
        "predictor_global": entry.get("predictor_global") or entry["predictor"],
        "megabytes": sum(sum(record["bytes"].values()) for record in runs[0]) / num_clients / 1e6,
        "curves": [curve_of(records, entry["predictor"]) for records in runs],
    }


def curve_of(records: Sequence[dict[str, Any]], predictor: str) -> list[tuple[float, float | None]]:
    """Return virtual seconds and accuracy on the local test sets, where a run was evaluated."""
    return [
        (record["virtual_seconds"], (record["accuracy"] or {}).get("local_test", {}).get(predictor))
        for record in records
        if record["accuracy"] is not None and record.get("virtual_seconds") is not None
    ]


def measure_seconds(situation: Situation, methods: Sequence[str], out: Path) -> dict[str, float]:
    """Return seconds per round without evaluation: the median of a few, one run at a time."""
    seconds = {}
    for method in methods:
        found = find_method(method)
        base = situation.base().replace(
            method=method, rounds=TIMED_ROUNDS, evaluate_every=TIMED_ROUNDS
        )
        planned = PlannedRun(base.resolved(found.defaults), out / situation.title / "time" / method)
        assert run_planned([planned], JobOptions(RUNNER))
        records = RunDirectory(planned.path).read_records()
        spent = [
            sum(value for phase, value in record["seconds"].items() if phase != "evaluate")
            for record in records
        ]
        seconds[method] = round(median(spent), 4)
        print(f"{situation.title} {method}: {seconds[method]:.3f} s per round", flush=True)
    return seconds


def main() -> None:
    """Measure, situation by situation, and write OUT/benchmark.json after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--methods", nargs="+", default=["all"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    file = given.out / "benchmark.json"
    content: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for situation in list_situations(given.sets):
        if given.write and not given.time:
            break
        methods, left_out = choose_methods(situation.base(), given.methods)
        print(f"{situation.title}: {len(methods)} methods", flush=True)
        part = content.setdefault(situation.title, {"methods": {}, "seconds": {}})
        part["left_out"] = left_out
        if given.time:
            part["seconds"] |= measure_seconds(situation, methods, given.out)
        else:
            part["methods"] |= measure(
                situation, methods, range(given.seeds), given.out, given.jobs
            )
        write_atomically(file, json.dumps(content, indent=1).encode())
    if given.write:
        write_page(content, rounds=ROUNDS, rates=RATES)


if __name__ == "__main__":
    main()
