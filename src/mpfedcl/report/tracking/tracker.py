"""The base class of trackers, what they draw, and the notes they keep in a run directory."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from mpfedcl.core.files import write_atomically
from mpfedcl.experiment import Experiment
from mpfedcl.runs.observer import Record, RunResult

_NOTES_FILE = "tracking.json"


class Tracker:
    """Keeps a record of a run somewhere else; override what you need.

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
    """Names that it reads of `experiment.options`; others are refused."""

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
            result: What `run` returns; its `summary` is None where the run was stopped early.
        """


def round_scalars(record: Record) -> dict[str, float]:
    """Return a round's numbers; what was not measured in it is left out."""
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
    """Return each client's accuracy on its local test set, by the reading the method is judged by."""
    predictors = record["accuracy_per_client"] or {}
    return {name: float(value) for name, value in predictors.items() if value is not None}


def read_notes(path: Path, tracker: str) -> dict[str, str]:
    """Return what a tracker has noted in a run's folder; nothing where that is not readable."""
    noted = _read_all_notes(path).get(tracker)
    return {name: str(value) for name, value in noted.items()} if isinstance(noted, dict) else {}


def write_notes(path: Path, tracker: str, **notes: str) -> None:
    """Note in a run's folder where a tracker keeps its record, so that a resume finds it."""
    text = json.dumps({**_read_all_notes(path), tracker: notes}, indent=2) + "\n"
    write_atomically(path / _NOTES_FILE, text.encode())


def write_failures(path: Path, failures: Mapping[str, str]) -> None:
    """Note in a run's folder which trackers have failed, for whoever did not hear the warnings."""
    if failures or "failed" in _read_all_notes(path):
        # A folder that cannot be written to is no news to the run.
        with contextlib.suppress(OSError):
            write_notes(path, "failed", **failures)


def read_failures(path: Path) -> list[str]:
    """Return what was said of trackers that failed when a run was last started or resumed."""
    return list(read_notes(path, "failed").values())


def _read_all_notes(path: Path) -> dict[str, Any]:
    try:
        notes = json.loads((path / _NOTES_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return notes if isinstance(notes, dict) else {}
