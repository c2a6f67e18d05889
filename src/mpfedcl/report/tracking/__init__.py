"""Trackers: TensorBoard, MLflow or the user's own are told of each round of a run."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.plugins import import_class
from mpfedcl.experiment import Experiment
from mpfedcl.report.tracking.tracker import Tracker, read_failures, write_failures
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.runs.observer import Observer, Record, RunResult

__all__ = ["Record", "Tracker", "add_trackers", "make_trackers", "read_failures"]

_BUILT_IN = {"tensorboard": "TensorBoardTracker", "mlflow": "MlflowTracker"}
"""Modules of this folder, each the name of its extra too, and the class in each."""


def make_trackers(names: Sequence[str]) -> dict[str, Tracker]:
    """Return new trackers by name; what is missing is said at once, not in the midst of a run."""
    if len(set(names)) < len(names):
        raise InvalidInput(f"track is {list(names)}; it must name each tracker once.")
    return {name: _make_tracker(name) for name in names}


def add_trackers(trackers: Mapping[str, Tracker], path: Path, observer: Observer) -> Observer:
    """Return an observer that tells the trackers what it is told.

    They get copies. One that fails is named in one warning and told nothing more.
    """
    if not trackers:
        return observer
    working, failures = dict(trackers), dict[str, str]()

    def tell(call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(working.items()):
            try:
                call(tracker)
            # Files, servers, somebody's own code: whatever goes wrong, the run is worth more.
            except Exception as error:
                del working[name]
                first = (str(error).splitlines() or [""])[0]
                failures[name] = (
                    f"Tracker {name} failed ({type(error).__name__}: {first}); the run continues "
                    "without it."
                )
                write_failures(path, failures)
                observer.on_warning(failures[name])

    def on_start(experiment: Experiment, rounds_done: int) -> None:
        observer.on_start(experiment, rounds_done)
        write_failures(path, {})
        done = RunDirectory(path).read_records()
        tell(lambda tracker: tracker.start(experiment, path, deepcopy(done)))

    def on_round(record: Record) -> None:
        observer.on_round(record)
        tell(lambda tracker: tracker.round(deepcopy(record)))

    def on_finish(result: RunResult) -> None:
        observer.on_finish(result)
        tell(lambda tracker: tracker.finish(deepcopy(result)))

    return replace(observer, on_start=on_start, on_round=on_round, on_finish=on_finish)


def _make_tracker(name: str) -> Tracker:
    if ":" in name:
        users = import_class("track", name, Tracker)
        try:
            return users()
        except Exception as error:
            raise InvalidInput(
                f"track is {name!r}; it must be a class that can be made without arguments "
                f"({type(error).__name__}: {error})."
            ) from None
    if name not in _BUILT_IN:
        raise InvalidInput(
            f"track is {name!r}; it must be one of {', '.join(_BUILT_IN)}, or "
            "package.module:Class for your own."
        )
    try:
        found = getattr(import_module(f"mpfedcl.report.tracking.{name}"), _BUILT_IN[name])
        tracker: Tracker = found()
    except ImportError as error:
        raise InvalidInput(
            f"track is {name!r}, which is not installed ({error}): pip install 'mpfedcl[{name}]'."
        ) from None
    return tracker
