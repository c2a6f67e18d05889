"""A run as the list of all runs shows it: little enough to keep of thousands."""

import time
from typing import Any, Literal

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.json_files import Json
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.wording import describe_data
from mpfedcl.inference.calibration import DRIFT_LOG
from mpfedcl.report.number_formatting import (
    choose_evenly,
    finite_values,
    mean,
    round_significant,
    rounded,
)
from mpfedcl.report.watch.incremental_records import IncrementalRecords
from mpfedcl.report.watch.regular_files import (
    Signature,
    file_signature,
    parse_experiment,
    read_regular_file,
)
from mpfedcl.report.watch.run_discovery import RunLocation
from mpfedcl.rounds.record import RoundRecord

State = Literal["running", "finished", "stopped", "damaged"]
_CURVE_POINTS = 40
"""Points of the small curve in the list."""
_QUIET_SECONDS = 5.0
"""Without a new round for so long at least, a run without a lock counts as stopped."""


class RunListEntry:
    """What is known of one run, and what has been read of its files."""

    def __init__(self, location: RunLocation) -> None:
        self.location = location
        self.entry: Json = {}
        self.is_active = True
        self._seen: tuple[Any, ...] = ()
        self._settings: tuple[Signature | None, Experiment | None, str] = (None, None, "unread")
        self._records = IncrementalRecords(location.path / "rounds.jsonl")
        self._reset_rounds()

    def _reset_rounds(self) -> None:
        self._curve: list[tuple[int, float]] = []
        self._last: RoundRecord | None = None
        self._rejected = self._missing = 0

    def refresh(self, locked: set[int]) -> bool:
        """Read what is new; return whether anything is."""
        path = self.location.path
        experiment, trouble = self._read_settings()
        began, lines = self._records.read_new()
        if began:
            self._reset_rounds()
        for line in lines:
            self._last = line
            known = finite_values(list((line.accuracy_per_client or {}).values()))
            spread = line.accuracy_spread
            if (value := rounded(spread.mean if spread else mean(known))) is not None:
                self._curve.append((line.round, value))
            self._rejected += len(line.clients.rejected)
            self._missing += len(line.clients.missing)
        signature = file_signature(path / "rounds.jsonl")
        summary = file_signature(path / "summary.json")
        predicted = file_signature(path / DRIFT_LOG)
        signed = [each for each in (signature, summary, self._settings[0], predicted) if each]
        changed = max((each[2] for each in signed), default=0)
        state = self._find_state(trouble, summary is not None, signature, locked)
        self.is_active = state == "running"
        seen = (began, state, trouble, changed, self._records.damaged)
        if self.entry and not lines and seen == self._seen:
            return False
        self._seen = seen
        self.entry = self._describe(experiment, state, trouble, changed)
        return True

    def mark_damaged(self, error: Exception) -> bool:
        """Show the run as one that cannot be read; return whether that is new."""
        before, self.is_active = self.entry, False
        trouble = f"It cannot be read ({type(error).__name__}: {error})."
        self.entry = self._describe(None, "damaged", trouble, 0)
        return self.entry != before

    def _read_settings(self) -> tuple[Experiment | None, str]:
        file = self.location.path / "experiment.toml"
        signature = file_signature(file)
        if signature is None or signature != self._settings[0]:
            try:
                content = read_regular_file(file, 2**20)
                self._settings = signature, parse_experiment(content, file), ""
            except InvalidInput as error:
                self._settings = signature, None, str(error)
        return self._settings[1:]

    def _find_state(
        self, trouble: str, is_finished: bool, records: Signature | None, locked: set[int]
    ) -> State:
        if trouble:
            return "damaged"
        if is_finished:
            return "finished"
        if locked and (lock := file_signature(self.location.path / ".lock")) and lock[0] in locked:
            return "running"
        # Locks of another machine or container are not seen; that it grows is.
        took = sum(self._last.seconds.values()) if self._last else 0.0
        since = time.time() - records[2] / 1e9 if records else float("inf")
        return "running" if since < max(_QUIET_SECONDS, 3 * took) else "stopped"

    def _describe(
        self, experiment: Experiment | None, state: State, trouble: str, changed: int
    ) -> Json:
        places = choose_evenly(len(self._curve), _CURVE_POINTS)
        last = self._last
        parts = self.location.parts
        entry: Json = {
            "id": self.location.id,
            "name": parts[-1] if parts else self.location.path.resolve().name,
            "folder": "/".join(parts[:-1]),
            "state": state,
            "trouble": trouble.replace(f"{self.location.path}/", ""),
            "changed": changed // 10**6,
            "round": last.round if last else 0,
            "accuracy": self._curve[-1][1] if self._curve else None,
            "loss": round_significant(last.loss) if last else None,
            "curve": [list(self._curve[place]) for place in places],
            "rejected": self._rejected,
            "missing": self._missing,
            "damaged": self._records.damaged,
        }
        if experiment is not None:
            # Written before the first round, and by runs over a network alone.
            is_network = file_signature(self.location.path / "federation.json") is not None
            data, split = describe_data(experiment, {"network": is_network}, with_seed=False)
            entry |= {
                "method": experiment.method,
                "dataset": data,
                "setting": split,
                "seed": experiment.seed,
                "planned": experiment.rounds,
            }
        return entry
