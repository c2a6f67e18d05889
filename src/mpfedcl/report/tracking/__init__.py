"""Trackers: TensorBoard, MLflow or the user's own record each round of a run."""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import write_atomically
from mpfedcl.core.plugins import import_class
from mpfedcl.experiment import Experiment
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.runs.observer import Observer, Record, RunResult

__all__ = ["Record", "Tracker", "add_trackers", "make_trackers", "read_failures"]

_BUILT_IN = {"tensorboard": "TensorBoardTracker", "mlflow": "MlflowTracker"}
"""Modules of this package, each also the name of its extra, and the class in each."""
_NOTES_FILE = "tracking.json"


class Tracker:
    """Records a run elsewhere; override what you need.

    A tracker is a class without arguments that `Experiment.track` or `--track` names, as
    `package.module:Class`. If it fails, there is one warning and the run continues without it. It
    is called in the process that leads a run, and sees each round once, except after a resume.

    Example:
        >>> class LossTracker(Tracker):
        ...     def start(self, experiment, path, done):
        ...         self.losses = [record["loss"] for record in done]
        ...
        ...     def round(self, record):
        ...         self.losses.append(record["loss"])
        >>> tracker = LossTracker()
        >>> tracker.start(Experiment(), Path("runs/mine"), done=[])
        >>> tracker.round({"round": 1, "loss": 2.3})
        >>> tracker.losses
        [2.3]
    """

    options: ClassVar[tuple[str, ...]] = ()
    """Names of `experiment.options` that it reads; others are rejected."""

    def start(self, experiment: Experiment, path: Path, done: Sequence[Record]) -> None:
        """Start with a run, or resume it; reports of rounds after `done` are no longer valid.

        Args:
            experiment: All settings of the run.
            path: The run directory.
            done: The records of the rounds that are over, as lines of rounds.jsonl.
        """

    def round(self, record: Record) -> None:
        """Record a round that has just ended.

        Args:
            record: The round as a line of rounds.jsonl: `round`, `loss`, `accuracy`, `bytes` ...
        """

    def finish(self, result: RunResult) -> None:
        """Finish.

        Args:
            result: The result of `run`; its `summary` is None if the run was stopped early.
        """


def make_trackers(names: Sequence[str]) -> dict[str, Tracker]:
    """Return new trackers by name; a missing package is an error before the run starts."""
    if len(set(names)) < len(names):
        raise InvalidInput(f"track is {list(names)}; it must name each tracker once.")
    return {name: _make_tracker(name) for name in names}


def add_trackers(trackers: Mapping[str, Tracker], path: Path, observer: Observer) -> Observer:
    """Return an observer that also calls the trackers, with copies.

    A tracker that fails causes one warning and is not called again.
    """
    if not trackers:
        return observer
    working, failures = dict(trackers), dict[str, str]()

    def notify(call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(working.items()):
            try:
                call(tracker)
            # A run must not fail because of a tracker.
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
        notify(lambda tracker: tracker.start(experiment, path, deepcopy(done)))

    def on_round(record: Record) -> None:
        observer.on_round(record)
        notify(lambda tracker: tracker.round(deepcopy(record)))

    def on_finish(result: RunResult) -> None:
        observer.on_finish(result)
        notify(lambda tracker: tracker.finish(deepcopy(result)))

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


# For the built-in trackers


def round_scalars(record: Record) -> dict[str, float]:
    """Return the values of a round; those that were not measured are left out."""
    clients = record["clients"]
    found = {
        "loss": record["loss"],
        **{
            f"accuracy/{test}/{predictor}": value
            for test, table in (record["accuracy"] or {}).items()
            for predictor, value in table.items()
        },
        **{f"bytes/{way}": value for way, value in record["bytes"].items()},
        **{f"seconds/{phase}": value for phase, value in record["seconds"].items()},
        "attendance/answered": len(clients["answered"]),
        "attendance/missing": len(clients["missing"]),
        "attendance/rejected": len(clients["rejected"]),
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def client_scalars(record: Record) -> dict[str, float]:
    """Return the primary metric of each client on its local test set."""
    predictors = record["accuracy_per_client"] or {}
    return {name: float(value) for name, value in predictors.items() if value is not None}


def read_notes(path: Path, tracker: str) -> dict[str, str]:
    """Return the notes of a tracker in a run directory; nothing if they are not readable."""
    noted = _read_all_notes(path).get(tracker)
    return {name: str(value) for name, value in noted.items()} if isinstance(noted, dict) else {}


def write_notes(path: Path, tracker: str, **notes: str) -> None:
    """Note in a run directory where a tracker keeps its record, so that a resume finds it."""
    text = json.dumps({**_read_all_notes(path), tracker: notes}, indent=2) + "\n"
    write_atomically(path / _NOTES_FILE, text.encode())


def write_failures(path: Path, failures: Mapping[str, str]) -> None:
    """Note in a run directory which trackers have failed."""
    if failures or "failed" in _read_all_notes(path):
        # The run itself reports a directory that cannot be written to.
        with contextlib.suppress(OSError):
            write_notes(path, "failed", **failures)


def read_failures(path: Path) -> list[str]:
    """Return the warnings about trackers that failed since a run was started or resumed."""
    return list(read_notes(path, "failed").values())


def _read_all_notes(path: Path) -> dict[str, Any]:
    try:
        notes = json.loads((path / _NOTES_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return notes if isinstance(notes, dict) else {}
