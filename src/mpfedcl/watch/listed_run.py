"""A run as the list of all runs shows it: little enough to keep of thousands."""

import time
from typing import Any, Literal

from mpfedcl.cli.commands.run import describe_partition
from mpfedcl.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.report.numbers import known, mean, rounded, significant, thin
from mpfedcl.report.records import RoundLine
from mpfedcl.watch.folder import Place
from mpfedcl.watch.growing_records import GrowingRecords
from mpfedcl.watch.plain_files import Signature, read_plain, sign_file

Json = dict[str, Any]
State = Literal["running", "finished", "stopped", "damaged"]
_CURVE = 40
"""Points of the small curve in the list."""
_QUIET = 5.0
"""Seconds without a new round after which a run without a lock counts as stopped, at least."""


class ListedRun:
    """What is known of one run, and what has been read of its files."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.entry: Json = {}
        self.is_active = True
        self._seen: tuple[Any, ...] = ()
        self._settings: tuple[Signature | None, Experiment | None, str] = (None, None, "unread")
        self._begin()

    def _begin(self) -> None:
        self._records = GrowingRecords(self.place.path / "rounds.jsonl")
        self._forget()

    def _forget(self) -> None:
        self._curve: list[tuple[int, float]] = []
        self._last: RoundLine | None = None
        self._rejected = self._missing = 0

    def look(self, locked: set[int]) -> bool:
        """Read what is new; tell whether anything is."""
        path = self.place.path
        experiment, trouble = self._read_settings()
        began, lines = self._records.read_new()
        if began:
            self._forget()
        for line in lines:
            self._count(line)
        signature = sign_file(path / "rounds.jsonl")
        summary = sign_file(path / "summary.json")
        signed = [each for each in (signature, summary, self._settings[0]) if each]
        changed = max((each[2] for each in signed), default=0)
        state = self._tell_state(trouble, summary is not None, signature, locked)
        self.is_active = state == "running"
        seen = (began, state, trouble, changed, self._records.damaged)
        if self.entry and not lines and seen == self._seen:
            return False
        self._seen = seen
        self.entry = self._describe(experiment, state, trouble, changed)
        return True

    def give_up(self, error: Exception) -> bool:
        """Show the run as one that cannot be read; tell whether that is new."""
        before, self.is_active = self.entry, False
        trouble = f"It cannot be read ({type(error).__name__}: {error})."
        self.entry = self._describe(None, "damaged", trouble, 0)
        return self.entry != before

    def _read_settings(self) -> tuple[Experiment | None, str]:
        file = self.place.path / "experiment.toml"
        signature = sign_file(file)
        if signature is None or signature != self._settings[0]:
            try:
                document = read_plain(file, 2**20).decode()
                self._settings = signature, Experiment.parse_toml(document, file), ""
            except UnicodeDecodeError:
                self._settings = signature, None, f"{file} is not text."
            except InvalidInput as error:
                self._settings = signature, None, str(error)
        return self._settings[1:]

    def _count(self, line: RoundLine) -> None:
        self._last = line
        if (
            value := rounded(mean(known(list((line.accuracy_per_client or {}).values()))))
        ) is not None:
            self._curve.append((line.round, value))
        self._rejected += len(line.clients.rejected)
        self._missing += len(line.clients.missing)

    def _tell_state(
        self, trouble: str, is_finished: bool, records: Signature | None, locked: set[int]
    ) -> State:
        if trouble:
            return "damaged"
        if is_finished:
            return "finished"
        if locked and (lock := sign_file(self.place.path / ".lock")) and lock[0] in locked:
            return "running"
        # Locks of another machine or container are not seen; that it grows is.
        took = sum(self._last.seconds.values()) if self._last else 0.0
        since = time.time() - records[2] / 1e9 if records else float("inf")
        return "running" if since < max(_QUIET, 3 * took) else "stopped"

    def _describe(
        self, experiment: Experiment | None, state: State, trouble: str, changed: int
    ) -> Json:
        places = thin(len(self._curve), _CURVE)
        last = self._last
        parts = self.place.parts
        entry: Json = {
            "id": self.place.id,
            "name": parts[-1] if parts else self.place.path.resolve().name,
            "folder": "/".join(parts[:-1]),
            "state": state,
            "trouble": trouble.replace(f"{self.place.path}/", ""),
            "changed": changed // 10**6,
            "round": last.round if last else 0,
            "accuracy": self._curve[-1][1] if self._curve else None,
            "loss": significant(last.loss) if last else None,
            "curve": [list(self._curve[place]) for place in places],
            "rejected": self._rejected,
            "missing": self._missing,
            "damaged": self._records.damaged,
        }
        if experiment is not None:
            entry |= {
                "method": experiment.method,
                "dataset": experiment.dataset.name,
                "setting": describe_partition(experiment, with_seed=False),
                "seed": experiment.seed,
                "planned": experiment.rounds,
            }
        return entry
