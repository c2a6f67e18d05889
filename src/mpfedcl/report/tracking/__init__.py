"""Trackers: TensorBoard, MLflow or the user's own record each round of a run."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import write_atomically
from mpfedcl.core.plugins import import_class
from mpfedcl.experiment import Experiment
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.runs.observer import Observer, Record, RunResult

__all__ = ["Record", "Tracker", "add_trackers", "make_trackers", "read_failures"]

_BUILT_IN = {"tensorboard": "TensorBoardTracker", "mlflow": "MlflowTracker"}
"""Modules of this package, each also the name of its extra, and the class in each."""
_NOTES_FILE, _FAILED = "tracking.json", "failed"


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

    def start(self, experiment: Experiment, path: Path, done: Sequence[Record]) -> None:
        """Start with a run, or resume it; reports of rounds after `done` are no longer valid.

        Args:
            experiment: All settings of the run.
            path: The run directory.
            done: The records of the rounds that are over, as lines of rounds.jsonl.
        """

    def round(self, record: Record) -> None:
        """Record a round that has just ended, as a line of rounds.jsonl describes it."""

    def finish(self, result: RunResult) -> None:
        """Finish; the `summary` of the result is None if the run was stopped early."""


def make_trackers(names: Sequence[str]) -> dict[str, Tracker]:
    """Return new trackers by name; a missing package is an error before the run starts."""
    if len(set(names)) < len(names):
        raise InvalidInput(f"track is {list(names)}; it must name each tracker once.")
    return {name: _make_tracker(name) for name in names}


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
        module = import_module(f"mpfedcl.report.tracking.{name}")
        tracker: Tracker = getattr(module, _BUILT_IN[name])()
    except ImportError as error:
        raise InvalidInput(
            f"track is {name!r}, which is not installed ({error}): pip install 'mpfedcl[{name}]'."
        ) from None
    return tracker


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
                # The run itself reports a directory that cannot be written to.
                with suppress(OSError):
                    write_notes(path, _FAILED, failures)
                observer.on_warning(failures[name])

    def on_start(experiment: Experiment, rounds_done: int) -> None:
        observer.on_start(experiment, rounds_done)
        if read_notes(path, _FAILED):
            write_notes(path, _FAILED, {})
        done = RunDirectory(path).read_records()
        notify(lambda tracker: tracker.start(experiment, path, deepcopy(done)))

    def on_round(record: Record) -> None:
        observer.on_round(record)
        notify(lambda tracker: tracker.round(deepcopy(record)))

    def on_finish(result: RunResult) -> None:
        observer.on_finish(result)
        notify(lambda tracker: tracker.finish(deepcopy(result)))

    return replace(observer, on_start=on_start, on_round=on_round, on_finish=on_finish)


def read_notes(path: Path, tracker: str) -> dict[str, str]:
    """Return the notes of a tracker in a run directory; nothing if they are not readable."""
    try:
        notes = json.loads((path / _NOTES_FILE).read_bytes())[tracker]
        return {name: str(value) for name, value in notes.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def write_notes(path: Path, tracker: str, notes: Mapping[str, str]) -> None:
    """Note in a run directory what a tracker must know after a resume."""
    others = {name: read_notes(path, name) for name in (*_BUILT_IN, _FAILED)}
    kept = {name: each for name, each in (others | {tracker: dict(notes)}).items() if each}
    write_atomically(path / _NOTES_FILE, f"{json.dumps(kept, indent=2)}\n".encode())


def read_failures(path: Path) -> list[str]:
    """Return the warnings about trackers that failed since a run was started or resumed."""
    return list(read_notes(path, _FAILED).values())


def round_scalars(record: Record) -> dict[str, float]:
    """Return the values of a round, for the built-in trackers; unmeasured ones are left out."""
    per_client = record["accuracy_per_client"] or {}
    accuracies = {
        f"accuracy/{test}/{predictor}": value
        for test, table in (record["accuracy"] or {}).items()
        for predictor, value in table.items()
    }
    found = {
        "loss": record["loss"],
        **accuracies,
        **{f"clients/{name}": value for name, value in per_client.items()},
        **{f"bytes/{way}": value for way, value in record["bytes"].items()},
        **{f"seconds/{phase}": value for phase, value in record["seconds"].items()},
        **{f"attendance/{kind}": len(who) for kind, who in record["clients"].items()},
    }
    return {name: float(value) for name, value in found.items() if value is not None}
