"""`run`, `resume`, `compare` and `tune`: simulations with trackers, calibration and model card.

The package `runs` does not know these callbacks; this module attaches them to a run.
"""

import inspect
import reprlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from mpfedcl.core.errors import InvalidInput, RunWarning
from mpfedcl.core.files import unused_folder
from mpfedcl.core.progress import show_rounds
from mpfedcl.data.objects import give
from mpfedcl.experiment import RESULT_NEUTRAL_SETTINGS, TUNED_RULE, Experiment
from mpfedcl.experiment.settings import ModelSettings
from mpfedcl.inference.calibration import calibrate
from mpfedcl.inference.export import ExportedFile, export_run
from mpfedcl.inference.membership import warn_of_joined_clients
from mpfedcl.inference.one_shot import update_over_network
from mpfedcl.inference.onnx_graph import ExportRule
from mpfedcl.inference.predictor import Predictor
from mpfedcl.inference.trained_run import reject_changed
from mpfedcl.methods import Method, PredictorName, find_method, name_method
from mpfedcl.models.factory import given_again, is_model, name_factories, name_factory
from mpfedcl.report.card import write_card
from mpfedcl.report.export import write_comparison, write_report
from mpfedcl.report.result_folders import find_result_folders
from mpfedcl.report.results import Loaded, LoadedComparison, load
from mpfedcl.report.tracking import add_trackers, make_trackers, read_failures
from mpfedcl.report.wording import describe_round
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.runs.failure import describe_failure
from mpfedcl.runs.observer import Attach, Callbacks, Observer, Record, RunResult
from mpfedcl.runs.simulation import resume_simulation, run_simulation
from mpfedcl.studies.comparison import (
    Comparison,
    MethodChoice,
    choose_methods,
    read_tuned,
)
from mpfedcl.studies.jobs import JobOptions, Jobs, count_jobs
from mpfedcl.studies.tuning import BUDGET, VALIDATION, Search, TuningResult, run_searches

Progress = bool | Literal["auto"]


def run(
    experiment: MethodChoice,
    out: Path | str | None = None,
    observer: Observer | None = None,
    *,
    model: Any = None,
    data: Any = None,
    groups: Any = None,
    progress: Progress = "auto",
    **settings: Any,
) -> RunResult:
    """Run an experiment on this machine into a new run directory.

    Args:
        experiment: The settings, or a method by name or class; open settings have the defaults of
            the method and the data set.
        out: The run directory, new or empty; by default a new folder below `runs/`.
        observer: Notified of each round; it can also stop the run.
        model: Your own model instead of `model.name`: a function that returns a torch.nn.Module,
            given those of num_classes and input_shape that it has as parameters; or a module.
            A dictionary by client, or by pattern such as `clinic-*`, gives clients different
            models, for methods that share no parameters.
        data: Your own data instead of `dataset.name`: a dictionary by client, or one data set to be
            split by `partition`. A data set is (x, y) arrays, a torch or Hugging Face Dataset, a
            frame, or a pair (train, test) of these.
        groups: The client of each training sample of one data set.
        progress: Whether to show a bar; "auto": on a terminal and in a notebook, if there is no
            observer.
        settings: Settings to change, as in `Experiment`: `rounds=5, train={"lr": 0.1}`.

    Returns:
        The accuracy of the last round, the records of all rounds, and the folder with the rest.

    Example:
        >>> result = run("fedavg", folder / "run", rounds=1, clients=2, train={"lr": 0.1})
        >>> result.accuracy == result.summary["accuracy"]
        True
        >>> (result.path / "model.safetensors").exists()
        True
    """
    made = _make_experiment("experiment", experiment, _add_model(settings, model))
    made = give(made, data, groups)
    folder = None if out is None else _read_path("out", out)
    with _watch(observer, progress) as watching:
        return run_simulation(made, folder, watching, CALLBACKS)


def _add_model(settings: dict[str, Any], model: Any) -> dict[str, Any]:
    """Return settings with a user's model, one for each client, or the section `model`."""
    if model is None:
        return settings
    if isinstance(model, dict):
        if model.keys().isdisjoint(ModelSettings.model_fields) and all(
            map(is_model, model.values())
        ):
            model = {"clients": model}
        if isinstance(model.get("clients"), dict):
            model = {**model, "clients": name_factories(model["clients"])}
        return {**settings, "model": model}
    return {**settings, "model__name": name_factory(model)}


def _make_experiment(named: str, given: MethodChoice, settings: dict[str, Any]) -> Experiment:
    """Return an experiment, or the one of a method, with these settings."""
    if isinstance(given, Experiment):
        return given.replace(**settings) if settings else given
    if not isinstance(given, str | type):
        raise InvalidInput(
            f"{named} is {reprlib.repr(given)}; it must be a method by name or class, or an "
            "Experiment."
        )
    if "method" in settings:
        raise InvalidInput(
            f"method is {settings['method']!r}; it must be left out: {named} is a method."
        )
    return Experiment(method=given, **settings)


def _read_path(named: str, given: Path | str) -> Path:
    if not isinstance(given, Path | str):
        raise InvalidInput(f"{named} is {given!r}; it must be the path of a folder.")
    return Path(given)


def _choose_folder(out: Path | str | None, name: str) -> Path:
    return unused_folder(Path("runs") / name) if out is None else _read_path("out", out)


def resume(
    path: Path | str,
    rounds: int | None = None,
    observer: Observer | None = None,
    *,
    progress: Progress = "auto",
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
        observer, progress: As for `run`.
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
    folder = _read_path("path", path)
    reject_changed(folder)
    if data is not None:
        give(RunDirectory(folder).read_experiment(), data, groups)
    read = RunDirectory(folder).read_experiment
    with given_again(model, read), _watch(observer, progress) as watching:
        return resume_simulation(folder, changes, watching, CALLBACKS)


@contextmanager
def _watch(observer: Observer | None, progress: Progress) -> Iterator[Observer]:
    """Yield the observer of a run from Python, with a bar; by default warnings are Python's."""
    if not isinstance(observer, Observer | None):
        raise InvalidInput(f"observer is {observer!r}; it must be an Observer, or left out.")
    given = observer or Observer(on_warning=_warn)
    # An observer shows what its owner wants.
    with show_rounds(False if observer and progress == "auto" else progress) as show:
        experiment = Experiment()

        def on_start(started: Experiment, rounds_done: int) -> None:
            nonlocal experiment
            experiment = started
            show(_title(started), rounds_done, started.rounds, "")
            given.on_start(started, rounds_done)

        def on_round(record: Record) -> None:
            show(_title(experiment), record["round"], experiment.rounds, describe_round(record))
            given.on_round(record)

        yield replace(given, on_start=on_start, on_round=on_round)


def _title(experiment: Experiment) -> str:
    return name_method(experiment.method, find_method(experiment.method))


def _warn(sentence: str) -> None:
    """Warn at the line of the program that called this package."""
    frame, level, here = inspect.currentframe(), 0, str(Path(__file__).parent)
    while frame is not None and frame.f_code.co_filename.startswith(here):
        frame, level = frame.f_back, level + 1
    warnings.warn(sentence, RunWarning, stacklevel=level + 1)


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
            if failure := describe_failure(path):
                observer.on_warning(failure)

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
    base: MethodChoice | Sequence[MethodChoice] | None = None,
    methods: MethodChoice | Sequence[MethodChoice] | None = None,
    out: Path | str | None = None,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    jobs: Jobs = 1,
    progress: Progress = "auto",
    on_progress: Callable[[int, int], None] = lambda *_: None,
    model: Any = None,
    data: Any = None,
    groups: Any = None,
    tuned: Path | str | None = None,
    **settings: Any,
) -> LoadedComparison:
    """Run several methods over several seeds, as `mpfedcl compare` does.

    Finished runs are not repeated: after an interruption the same call continues.

    Args:
        base: The settings that all runs share; its method and seed are replaced. Without it the
            methods come first: `compare(["fedavg", "local"], rounds=5)`.
        methods: The methods by name or class; "all" is every method that supports the data. An
            experiment stands for its method with its own settings.
        out: Folder for runs, tables and figures; by default a new one below `runs/`.
        seeds: Seeds of the data split, initial weights, batches and clustering.
        jobs: Number of concurrent runs, or "auto": as many as cores and memory allow. A script
            with several jobs needs `if __name__ == "__main__":`, because each process imports it.
        progress: Whether to show a bar; "auto": on a terminal and in a notebook.
        on_progress: Called after each round with the number of completed rounds and the total.
        model, data, groups: As for `run`; with data, `jobs` is 1.
        tuned: Folder in which `tune` has written best-<method>.toml: each method has its tuned
            settings, and by default all methods in the folder are compared.
        settings: Settings to change, as in `Experiment`: `rounds=5, train={"lr": 0.1}`.

    Returns:
        The comparison, as `load` reads it: `.frame()`, `.plot()`, and a notebook shows a table.

    Example:
        >>> found = compare(["fedavg", "local"], out=folder / "both", seeds=[0], rounds=1)
        >>> found.methods
        ['fedavg', 'local']
    """
    base, chosen = _read_methods(base, methods, tuned, _add_model(settings, model))
    path = _choose_folder(out, "comparison")
    count_jobs(jobs)
    base = give(base, data, groups, jobs)
    make_trackers(base.track)
    chosen, left_out = choose_methods(base, chosen)
    comparison = Comparison.prepare(base, chosen, seeds, path)
    for name, reason in left_out.items():
        _warn(f"{name} is left out: {reason}")
    total = sum(each.experiment.rounds for each in comparison.planned_runs)
    with show_rounds(progress) as show:

        def on_wait() -> None:
            done = comparison.rounds_done()
            show(f"{len(comparison.planned_runs)} runs", done, total, "")
            on_progress(done, total)

        comparison.run(JobOptions(run_or_resume, jobs, on_wait=on_wait))
    for each in comparison.planned_runs:
        for sentence in (*read_failures(each.path), describe_failure(each.path)):
            if sentence is not None:
                _warn(f"{each.path.name}: {sentence}")
    write_comparison(comparison)
    loaded = load(path)
    assert isinstance(loaded, LoadedComparison)
    return loaded


def _read_methods(
    base: MethodChoice | Sequence[MethodChoice] | None,
    methods: MethodChoice | Sequence[MethodChoice] | None,
    tuned: Path | str | None,
    settings: dict[str, Any],
) -> tuple[Experiment, list[MethodChoice]]:
    """Return the shared settings and the methods of a comparison, in whichever form given."""
    if not isinstance(base, Experiment):
        if base is not None and methods is not None:
            raise InvalidInput(
                f"base is {reprlib.repr(base)}; it must be an Experiment, or left out: "
                'compare(["fedavg", "local"], rounds=5).'
            )
        base, methods = Experiment(), base if methods is None else methods
    given = [methods] if isinstance(methods, str | type | Experiment) else methods
    if not isinstance(given, Sequence | None):
        raise InvalidInput(f"methods is {reprlib.repr(given)}; it must be a list of methods.")
    if tuned is not None:
        if base != Experiment() or not settings.keys() <= RESULT_NEUTRAL_SETTINGS.keys():
            raise InvalidInput(TUNED_RULE)
        names = [_make_experiment("methods", each, {}).method for each in given or ()]
        found = read_tuned(_read_path("tuned", tuned), names)
        return base.replace(**settings), [each.replace(**settings) for each in found]
    chosen = [
        # A method takes the settings of `base`.
        _make_experiment("methods", each, settings) if not isinstance(each, str | type) else each
        for each in given or ()
    ]
    return base.replace(**settings), chosen


Result = RunResult | Loaded | Path | str
"""What `run`, `compare` or `load` has returned, or the folder of it."""


def export(
    result: Result,
    file: Path | str | None = None,
    *,
    client: str | None = None,
    rule: ExportRule | None = None,
) -> ExportedFile:
    """Export the model of a finished run as one file, as `mpfedcl export` does.

    Args:
        result: The run.
        file: The file: .onnx, or .pt2 for `torch.export` [default: .onnx in exported/ in the run's
            folder].
        client: The client whose personalized model is exported; by default the global model.
        rule: "prototype" or "classifier" [default: the run's primary predictor].

    Returns:
        The path of the file, its size, and its metadata with the result of the check.
    """
    path = None if file is None else _read_path("file", file)
    return export_run(Predictor.load(_find_folder(result), client), path, rule=rule)


def report(
    results: Result | Sequence[Result],
    out: Path | str | None = None,
    *,
    latex: bool = False,
    csv: bool = False,
    pdf: bool = False,
) -> Path:
    """Write results as one HTML file, as `mpfedcl report` does.

    Args:
        results: A result, or several, each of which becomes a section.
        out: The file [default: report.html in the first folder].
        latex, csv, pdf: Also write tables, measurements and figures into the folders.

    Returns:
        The path of the file.
    """
    several = [results] if isinstance(results, Result) else results
    if not isinstance(several, Sequence) or not several:
        raise InvalidInput(f"results is {results!r}; it must be a result, or a list of results.")
    folders = [_find_folder(each) for each in several]
    page = folders[0] / "report.html" if out is None else _read_path("out", out)
    found = find_result_folders(folders, named="results")
    write_report(found, page, latex=latex, csv=csv, pdf=pdf)
    return page


def _find_folder(result: Result) -> Path:
    return result.path if isinstance(result, RunResult | Loaded) else _read_path("result", result)


def tune(
    base: MethodChoice,
    method: str | type[Method] | None = None,
    out: Path | str | None = None,
    *,
    budget: int = BUDGET,
    seeds: Sequence[int] = (0,),
    validation: float = VALIDATION,
    predictor: PredictorName | None = None,
    jobs: Jobs = 1,
    should_stop: Callable[[], bool] = lambda: False,
    on_wait: Callable[[], None] = lambda: None,
    model: Any = None,
    data: Any = None,
    groups: Any = None,
    **settings: Any,
) -> TuningResult | None:
    """Tune the hyperparameters of a method on validation images; no test image is opened.

    Args:
        base: The experiment, whose values are always one of the trials; or a method.
        method: The method by name or class; by default that of the experiment.
        out: Folder of the search, by default a new one below `runs/`; an interrupted search is
            resumed.
        budget: Number of trials.
        seeds: Seeds of each trial.
        validation: Fraction of each client's training images that is held out for validation.
        predictor: Predictor of the score; by default the primary one on the local test sets.
        jobs: Number of concurrent runs, or "auto".
        should_stop, on_wait: Called repeatedly during the runs; the first can stop the search.
        model, data, groups: As for `run`; with data, `jobs` is 1.
        settings: Settings to change, as in `Experiment`: `rounds=5, train={"momentum": 0.9}`.

    Returns:
        All trials and the chosen settings (`.best` is an experiment); None if stopped.
    """
    base = _make_experiment("base", base, _add_model(settings, model))
    if method is not None:
        base = base.replace(method=method)
    search = Search.prepare(
        give(base, data, groups, jobs),
        base.method,
        _choose_folder(out, "tuning"),
        budget,
        seeds,
        validation=validation,
        predictor=predictor,
    )
    options = JobOptions(run_or_resume, jobs, should_stop, on_wait)
    return search.write_result() if run_searches([search], options) else None
