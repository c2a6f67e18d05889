"""`run`, `resume`, `compare` and `tune`: simulations with trackers, calibration and model card.

The package `runs` does not know these callbacks; this module attaches them to a run.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from mpfedcl.core.files import unused_folder
from mpfedcl.data.objects import give
from mpfedcl.experiment import RESULT_NEUTRAL_SETTINGS, Experiment
from mpfedcl.inference.calibration import calibrate
from mpfedcl.inference.membership import warn_of_joined_clients
from mpfedcl.inference.one_shot import update_over_network
from mpfedcl.inference.trained_run import reject_changed
from mpfedcl.methods import PredictorName, find_method
from mpfedcl.models.factory import name_factory
from mpfedcl.report.card import write_card
from mpfedcl.report.export import write_comparison
from mpfedcl.report.results import LoadedComparison, load
from mpfedcl.report.tracking import add_trackers, make_trackers, read_failures
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.runs.observer import Attach, Callbacks, Observer, RunResult
from mpfedcl.runs.simulation import resume_simulation, run_simulation
from mpfedcl.studies.comparison import Comparison, choose_methods
from mpfedcl.studies.jobs import JobOptions, Jobs, count_jobs
from mpfedcl.studies.tuning import BUDGET, VALIDATION, Search, TuningResult, run_searches


def run(
    experiment: Experiment,
    out: Path | str | None = None,
    observer: Observer | None = None,
    *,
    data: Any = None,
    groups: Any = None,
    model: Any = None,
) -> RunResult:
    """Run an experiment on this machine into a new run directory.

    Args:
        experiment: The settings; open ones have the defaults of the method and the data set.
        out: The run directory, new or empty; by default a new folder below `runs/`.
        observer: Notified of each round; it can also stop the run.
        data: Your own data instead of `dataset.name`: a dictionary by client, or one data set to be
            split by `partition`. A data set is (x, y) arrays, a torch or Hugging Face Dataset, a
            frame, or a pair (train, test) of these.
        groups: The client of each training sample of one data set.
        model: Your own model instead of `model.name`: a function that returns a torch.nn.Module,
            given those of num_classes and input_shape that it has as parameters; or a module.

    Returns:
        The accuracy of the last round, the records of all rounds, and the folder with the rest.

    Example:
        >>> result = run(Experiment(method="fedavg", rounds=1, clients=2), out=folder / "run")
        >>> result.accuracy == result.summary["accuracy"]
        True
        >>> (result.path / "model.safetensors").exists()
        True
    """
    experiment = give(experiment, data, groups)
    if model is not None:
        experiment = experiment.replace(model__name=name_factory(model))
    return run_simulation(experiment, out, observer or Observer(), CALLBACKS)


def resume(
    path: Path | str,
    rounds: int | None = None,
    observer: Observer | None = None,
    *,
    engine: str | None = None,
    workers: int | Literal["auto"] | None = None,
    worker_timeout: float | None = None,
    track: Sequence[str] | None = None,
    track_to: Path | None = None,
    data: Any = None,
    groups: Any = None,
    model: Any = None,
) -> RunResult:
    """Resume a run from its newest intact checkpoint; the result is as if it had never stopped.

    Args:
        path: The run directory.
        rounds: More rounds than the run was begun with, or None for as many.
        observer: Notified of each round; it can also stop the run.
        engine, workers, worker_timeout, track, track_to: As in `Experiment`. They do not change
            the result, so they may differ from those the run was begun with; None keeps them.
        data, groups: The objects that the run was begun with, if it was.
        model: As for `run`, if the run was begun with an object that has no importable name.

    Returns:
        What `run` returns, with the records of all rounds.

    Example:
        >>> first = run(Experiment(method="fedavg", rounds=1, clients=2), out=folder / "run")
        >>> len(resume(first.path, rounds=2).history)
        2
    """
    asked = {
        "rounds": rounds,
        "engine": engine,
        "workers": workers,
        "worker_timeout": worker_timeout,
        "track": track,
        "track_to": track_to,
    }
    changes = {name: value for name, value in asked.items() if value is not None}
    reject_changed(Path(path))
    if data is not None:
        give(RunDirectory(Path(path)).read_experiment(), data, groups)
    if model is not None:
        name_factory(model, RunDirectory(Path(path)).read_experiment().model.name)
    return resume_simulation(Path(path), changes, observer or Observer(), CALLBACKS)


def attach(experiment: Experiment) -> Attach:
    """Return the callbacks of a run of this experiment; reject trackers that are not installed."""
    trackers = make_trackers(experiment.track)
    method = find_method(experiment.method)

    def accompany(path: Path, observer: Observer) -> Observer:
        # A run over a network is resumed by the server's process.
        reject_changed(path)

        def on_start(started: Experiment, rounds_done: int) -> None:
            if rounds_done < started.rounds:
                warn_of_joined_clients(path, observer.on_warning)
            observer.on_start(started, rounds_done)

        def on_finish(result: RunResult) -> None:
            if result.summary is not None:
                write_card(RunDirectory(path), method, result.pool, observer.on_warning)
            observer.on_finish(result)

        watched = replace(
            observer,
            on_start=on_start,
            on_finish=on_finish,
            on_models=lambda end: calibrate(replace(end, personal=observer.on_models(end))),
        )
        return add_trackers(trackers, path, watched)

    return accompany


CALLBACKS = Callbacks(attach, update_over_network)
"""The callbacks of every run, from Python and from the command line."""


def run_or_resume(experiment: Experiment, path: Path, observer: Observer) -> RunResult:
    """Run an experiment into a folder, or resume the run in it; for comparisons and searches."""
    if RunDirectory(path).holds_run():
        neutral = {name: experiment.setting(name) for name in RESULT_NEUTRAL_SETTINGS}
        return resume(path, experiment.rounds, observer, **neutral)
    return run(experiment, path, observer)


def compare(
    base: Experiment,
    methods: Sequence[str],
    out: Path | str | None = None,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    jobs: Jobs = 1,
    on_progress: Callable[[int, int], None] = lambda *_: None,
    data: Any = None,
    groups: Any = None,
) -> LoadedComparison:
    """Run several methods over several seeds, as `mpfedcl compare` does.

    Finished runs are not repeated: after an interruption the same call continues.

    Args:
        base: The settings that all runs share; its method and seed are replaced.
        methods: The methods by name; "all" is every method that supports the data.
        out: Folder for runs, tables and figures; by default a new one below `runs/`.
        seeds: Seeds of the data split, initial weights, batches and clustering.
        jobs: Number of concurrent runs, or "auto": as many as cores and memory allow. A script
            with several jobs needs `if __name__ == "__main__":`, because each process imports it.
        on_progress: Called after each round with the number of completed rounds and the total.
        data, groups: As for `run`; then `jobs` is 1.

    Returns:
        The comparison, as `load` reads it: `.frame()`, `.plot()`, and a notebook shows a table.

    Example:
        >>> base = Experiment(rounds=1, clients=2)
        >>> found = compare(base, ["fedavg", "local"], folder / "both", seeds=[0])
        >>> found.methods
        ['fedavg', 'local']
    """
    if isinstance(methods, str):
        methods = [methods]
    count_jobs(jobs)
    base = give(base, data, groups, jobs)
    make_trackers(base.track)
    path = unused_folder(Path("runs") / "comparison") if out is None else Path(out)
    chosen, left_out = choose_methods(base, methods)
    comparison = Comparison.prepare(base, chosen, seeds, path)
    for name, reason in left_out.items():
        warnings.warn(f"{name} is left out: {reason}", stacklevel=2)
    total = sum(each.experiment.rounds for each in comparison.planned_runs)
    told = JobOptions(
        run_or_resume, jobs, on_wait=lambda: on_progress(comparison.rounds_done(), total)
    )
    comparison.run(told)
    for each in comparison.planned_runs:
        for sentence in read_failures(each.path):
            warnings.warn(f"{each.path.name}: {sentence}", stacklevel=2)
    write_comparison(comparison)
    loaded = load(path)
    assert isinstance(loaded, LoadedComparison)
    return loaded


def tune(
    base: Experiment,
    method: str,
    out: Path | str,
    *,
    budget: int = BUDGET,
    seeds: Sequence[int] = (0,),
    validation: float = VALIDATION,
    predictor: PredictorName | None = None,
    jobs: Jobs = 1,
    should_stop: Callable[[], bool] = lambda: False,
    on_wait: Callable[[], None] = lambda: None,
    data: Any = None,
    groups: Any = None,
) -> TuningResult | None:
    """Tune the hyperparameters of a method on validation images; no test image is opened.

    Args:
        base: The experiment; its values are always one of the trials.
        method: The method by name.
        out: Folder of the search; an interrupted search is resumed.
        budget: Number of trials.
        seeds: Seeds of each trial.
        validation: Fraction of each client's training images that is held out for validation.
        predictor: Predictor of the score; by default the primary one on the local test sets.
        jobs: Number of concurrent runs, or "auto".
        should_stop, on_wait: Called repeatedly during the runs; the first can stop the search.
        data, groups: As for `run`; then `jobs` is 1.

    Returns:
        All trials and the chosen settings (`.best` is an experiment); None if stopped.
    """
    search = Search.prepare(
        give(base, data, groups, jobs),
        method,
        Path(out),
        budget,
        seeds,
        validation=validation,
        predictor=predictor,
    )
    options = JobOptions(run_or_resume, jobs, should_stop, on_wait)
    return search.write_result() if run_searches([search], options) else None
