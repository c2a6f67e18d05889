"""The one who looks: however many pages are open, files are looked at once."""

import time
from collections import OrderedDict
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mpfedcl.errors import InvalidInput
from mpfedcl.report.document import compare_runs
from mpfedcl.report.run_content import describe_run
from mpfedcl.watch.folder import MOST_FOLDERS, find_runs
from mpfedcl.watch.listed_run import ListedRun
from mpfedcl.watch.locks import locked_files
from mpfedcl.watch.open_run import OpenRun, encode

Json = dict[str, Any]
_EVERYTHING = 1.0
"""Seconds between two looks at all runs; those that run are looked at every time."""
_MOST_OPEN = 24
MOST_COMPARED = 20


class Watcher:
    """All runs below a folder. Not for several threads at once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._runs: dict[str, ListedRun] = {}
        self._open: OrderedDict[str, OpenRun] = OrderedDict()
        self._looked = float("-inf")
        self._took = 0.0
        self._is_too_large = False

    def look(self) -> tuple[list[str], list[str]]:
        """Read what is new; return the ids of runs that have changed, and of those gone."""
        began = time.monotonic()
        # A folder that takes long to look through is looked through less often.
        is_due = began - self._looked >= max(_EVERYTHING, 20 * self._took)
        gone = self._find() if is_due else []
        locked = locked_files()
        changed = [
            name
            for name, run in self._runs.items()
            if (is_due or run.is_active or not run.entry) and _look_at(run, locked)
        ]
        if is_due:
            self._looked = began
            # What it takes where nothing is new; the first time everything is.
            self._took = self._took if changed else time.monotonic() - began
        return changed, gone

    def _find(self) -> list[str]:
        places, self._is_too_large = find_runs(self._root)
        found = {place.id: place for place in places}
        gone = [name for name in self._runs if name not in found]
        for name in gone:
            del self._runs[name]
            self._open.pop(name, None)
        for name, place in found.items():
            if name not in self._runs:
                self._runs[name] = ListedRun(place)
        return gone

    def overview(self) -> Json:
        """Return what a page begins with: all runs."""
        return {
            "folder": str(self._root),
            "version": version("mpfedcl"),
            "runs": [run.entry for run in self._runs.values() if run.entry],
            "note": (
                f"There are more than {MOST_FOLDERS:,} folders; runs beyond them are not shown."
                if self._is_too_large
                else ""
            ),
        }

    def entries(self, ids: Sequence[str]) -> list[Json]:
        """Return what the list says of some runs."""
        return [self._runs[name].entry for name in ids if name in self._runs]

    def describe(self, name: str) -> bytes | None:
        """Return one run's page as JSON; None where there is no such run."""
        opened = self._open_run(name)
        return None if opened is None else opened.tell()

    def describe_map(self, name: str) -> bytes | None:
        """Return one run's map as JSON; None where there is no such run."""
        opened = self._open_run(name)
        return None if opened is None else opened.tell_map()

    def compare(self, ids: Sequence[str]) -> bytes:
        """Return chosen runs side by side as JSON; those that are not there are left out."""
        found, troubles = [], []
        for name in dict.fromkeys(ids[:MOST_COMPARED]):
            if (opened := self._open_run(name)) is None:
                continue
            try:
                if opened.records is None or not opened.records.rounds:
                    raise InvalidInput(f"{self._runs[name].place.path.name} has no round yet.")
                found.append((opened.records, describe_run(opened.records)))
            except InvalidInput as error:
                troubles.append(str(error))
        told = compare_runs(found) if found else {"groups": [], "tables": []}
        return encode(told | {"troubles": troubles})

    def _open_run(self, name: str) -> OpenRun | None:
        if name not in self._runs:
            return None
        if name not in self._open:
            self._open[name] = OpenRun(self._runs[name].place)
        self._open.move_to_end(name)
        while len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)
        self._open[name].refresh()
        return self._open[name]


def _look_at(run: ListedRun, locked: set[int]) -> bool:
    try:
        return run.look(locked)
    # Whatever else may be wrong with one run's files must not cost the others anything.
    except Exception as error:
        return run.give_up(error)
