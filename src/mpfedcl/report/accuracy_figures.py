"""Accuracy of several runs per round and over virtual time, and who holds what."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mpfedcl.experiment.wording import describe_data, describe_partition
from mpfedcl.report.figures import Curve, draw_curves, draw_over_time, draw_partition
from mpfedcl.report.run_description import RunRecords
from mpfedcl.report.tables import PREDICTOR_TITLES

Groups = Mapping[str, Sequence[RunRecords]]
"""Runs that differ in their seed alone, by name."""


def draw_accuracy(groups: Groups, path: Path) -> None:
    """Draw each method's headline reading per round, on the clients' local test sets."""
    curves: dict[str, list[Curve]] = {}
    methods: dict[str, str] = {}
    for name, runs in groups.items():
        once = "; no rounds" if runs[0].is_one_shot else ""
        label = f"{name} ({PREDICTOR_TITLES[runs[0].predictors['local_test']]}{once})"
        methods[label] = runs[0].method_name
        read = [_accuracy_by_round(run) for run in runs]
        # A run under way has fewer; a mean is of those rounds that all have.
        common = [number for number in read[0] if all(number in each for each in read)]
        curves[label] = [[(number, each[number]) for number in common] for each in read]
    draw_curves(curves, _title(groups), path, methods)


def has_virtual_time(groups: Groups) -> bool:
    """Tell whether any run was made on a virtual clock."""
    return any(_times(run) for runs in groups.values() for run in runs)


def draw_accuracy_over_time(groups: Groups, path: Path) -> None:
    """Draw the same over virtual seconds, for the runs that have a virtual clock."""
    clocked = {
        name: [
            [(seconds, _accuracy_by_round(run)[number]) for number, seconds in _times(run).items()]
            for run in runs
            if _times(run)
        ]
        for name, runs in groups.items()
    }
    draw_over_time({n: curves for n, curves in clocked.items() if curves}, _title(groups), path)


def knows_split(run: RunRecords) -> bool:
    """Tell whether a run says who holds what; under a privacy budget it does not."""
    return run.partition is not None and run.privacy is None


def draw_split(run: RunRecords, path: Path) -> None:
    """Draw who holds how many training images of each class in a run."""
    assert run.partition is not None
    clients = {name: {"train": held.train} for name, held in run.partition.clients.items()}
    content = {"classes": run.partition.classes, "clients": clients, "network": run.is_network}
    _, split = describe_data(run.experiment, content)
    draw_partition(content, f"training images, {split}", path)


def _accuracy_by_round(run: RunRecords) -> dict[int, float]:
    """Return the headline reading of the rounds that were evaluated; NaN where it has none."""
    predictor = run.predictors["local_test"]
    found = {
        r.round: r.accuracy.get("local_test", {}).get(predictor) for r in run.rounds if r.accuracy
    }
    return {n: float("nan") if value is None else value for n, value in found.items()}


def _times(run: RunRecords) -> dict[int, float]:
    return {
        line.round: line.virtual_seconds
        for line in run.rounds
        if line.accuracy and line.virtual_seconds is not None
    }


def describe_runs(runs: Iterable[RunRecords]) -> str:
    """Return the data of runs and how they are split, each once."""
    settings = [
        f"{run.experiment.dataset.name}, {describe_partition(run.experiment, with_seed=False)}"
        for run in runs
    ]
    return "; ".join(dict.fromkeys(settings))


def _title(groups: Groups) -> str:
    runs = [run for several in groups.values() for run in several]
    of_whom = "" if all(run.has_shared_test for run in runs) else ": clients' local test sets"
    return f"{describe_runs(runs)}{of_whom}"
