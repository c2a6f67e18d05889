"""Comparisons: one experiment with several methods and seeds, in one folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.methods import Method, OneShot, built_in_methods, find_method
from mpfedcl.runs.plan import plan, resolve
from mpfedcl.studies.jobs import (
    JobOptions,
    PlannedRun,
    reject_budget,
    reject_other_runs,
    reject_repeated,
    run_planned,
)

ALL = "all"
"""Stands for every built-in method."""
_ANY_CLASSES = 2
MethodChoice = Experiment | str | type[Method]
"""A method by name or class, or an experiment."""
_Choice = TypeVar("_Choice", bound=MethodChoice)


def choose_methods(
    base: Experiment, named: Sequence[_Choice]
) -> tuple[list[_Choice | str], dict[str, str]]:
    """Return the methods of a comparison; with `all`, also why other methods do not fit.

    Methods named next to `all` come first, and must fit.
    """
    if ALL not in named:
        return list(named), {}
    chosen: list[_Choice | str] = [each for each in named if each != ALL]
    left_out: dict[str, str] = {}
    for name, method in built_in_methods().items():
        if name in chosen:
            continue
        try:
            method(plan(base.replace(method=name)).experiment, _ANY_CLASSES)
        except InvalidInput as error:
            left_out[name] = str(error)
        else:
            chosen.append(name)
    return chosen, left_out


def read_tuned(folder: Path, methods: Sequence[str] = ()) -> list[Experiment]:
    """Return the chosen settings of methods, as tuning has written them; by default of all."""
    # A search in Python writes into the folder of its method.
    files = {f.stem: f for place in ("*/", "") for f in sorted(folder.glob(f"{place}best-*.toml"))}
    if not files:
        raise InvalidInput(
            f"tuned is {str(folder)!r}; it must be a folder of mpfedcl tune, with a file "
            "best-<method>.toml for each method."
        )
    found = {each.method: each for each in map(Experiment.from_toml, files.values())}
    for name in methods:
        if name not in found:
            raise InvalidInput(
                f"tuned is {str(folder)!r}, which has the methods {', '.join(found)}; {name} must "
                f"be tuned first: mpfedcl tune --methods {name} --out {folder}."
            )
    return [found[name] for name in methods or found]


@dataclass(frozen=True)
class Comparison:
    """The runs of a comparison, in the order of methods, then seeds."""

    path: Path
    planned_runs: Sequence[PlannedRun]

    @classmethod
    def prepare(
        cls,
        base: Experiment,
        methods: Sequence[MethodChoice],
        seeds: Sequence[int],
        path: Path,
    ) -> "Comparison":
        """Plan a comparison in a folder, new or interrupted.

        A method that is given as an experiment has its own settings instead of those of `base`.
        """
        given = [
            each if isinstance(each, Experiment) else base.replace(method=each) for each in methods
        ]
        reject_repeated("methods", [each.method for each in given])
        reject_repeated("seeds", seeds)
        planned_runs = []
        for start in given:
            reject_budget(start, "a comparison")
            method = start.method
            found = find_method(method)
            for seed in seeds:
                experiment = resolve(start.replace(method=method, seed=seed))
                # What a method rejects is found before the first run.
                found(experiment, _ANY_CLASSES)
                if issubclass(found, OneShot) and experiment.statistics.keep == "auto":
                    # Clients do not join runs of comparisons, and their statistics take 60 MB.
                    experiment = experiment.replace(statistics__keep="pooled")
                # The full name, because two modules may each have a class Mine.
                folder = f"{method.replace(':', '.')}-seed{seed}"
                planned_runs.append(PlannedRun(experiment, path / folder))
        reject_other_runs(planned_runs, path)
        return cls(path, planned_runs)

    def rounds_done(self) -> int:
        """Return the number of recorded rounds of all runs."""
        return sum(planned.rounds_done() for planned in self.planned_runs)

    def run(self, options: JobOptions) -> bool:
        """Run what is not complete; return whether all runs are complete now."""
        return run_planned(self.planned_runs, options)
