"""The seam that trackers are written in: what a run tells whoever records it elsewhere."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpfedcl.experiment import Experiment
from mpfedcl.files import write_atomically

if TYPE_CHECKING:
    from mpfedcl.runs.run_loop import RunResult

Record = Mapping[str, Any]
"""A round, as a line of rounds.jsonl has it."""
_NOTES = "tracking.json"


class Tracker:
    """Keeps a record of a run in a place of its own; override what you need.

    It may fail: the run then goes on without it. It runs in the process that leads a run, and
    never sees the same round twice but after a resume, whose `done` says where the run stands.
    """

    def start(self, experiment: Experiment, path: Path, done: Sequence[Record]) -> None:
        """Begin, or go on with a run whose folder is `path` and whose rounds `done` are over.

        What was told of later rounds no longer holds: they will be run and told again.
        """

    def round(self, record: Record) -> None:
        """Take down a round that has just ended."""

    def finish(self, result: "RunResult") -> None:
        """End; `result.summary` is None where the run was stopped before its last round."""


def recall(path: Path, tracker: str) -> dict[str, str]:
    """Return what a tracker has noted in a run's folder; nothing where that is not readable."""
    noted = _read_notes(path).get(tracker)
    return {name: str(value) for name, value in noted.items()} if isinstance(noted, dict) else {}


def remember(path: Path, tracker: str, **notes: str) -> None:
    """Note in a run's folder where a tracker keeps its record, so that a resume finds it."""
    text = json.dumps({**_read_notes(path), tracker: notes}, indent=2) + "\n"
    write_atomically(path / _NOTES, text.encode())


def note_failures(path: Path, failures: Mapping[str, str]) -> None:
    """Note in a run's folder which trackers have failed, for whoever did not hear the warnings."""
    if failures or "failed" in _read_notes(path):
        # A folder that cannot be written to is no news to the run.
        with contextlib.suppress(OSError):
            remember(path, "failed", **failures)


def read_failures(path: Path) -> list[str]:
    """Return what was said of trackers that failed when a run was last gone on with."""
    return list(recall(path, "failed").values())


def _read_notes(path: Path) -> dict[str, Any]:
    try:
        notes = json.loads((path / _NOTES).read_bytes())
    except (OSError, ValueError):
        return {}
    return notes if isinstance(notes, dict) else {}
