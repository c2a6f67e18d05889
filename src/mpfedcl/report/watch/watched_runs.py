"""All runs below a folder: however many pages are open, their files are read once."""

import time
from collections import OrderedDict
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.json_files import Json
from mpfedcl.report.document import compare_runs
from mpfedcl.report.run_description import describe_run
from mpfedcl.report.watch.run_discovery import MOST_FOLDERS, find_locked_inodes, find_runs
from mpfedcl.report.watch.run_list import RunListEntry
from mpfedcl.report.watch.run_page import RunPage, encode

_SECONDS_BETWEEN_SEARCHES = 1.0
"""Between two reads of all runs; those that are running are read every time."""
_MOST_OPEN = 24
MOST_COMPARED = 20


class WatchedRuns:
    """All runs below a folder. Not for several threads at once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.runs: dict[str, RunListEntry] = {}
        self.open_pages: OrderedDict[str, RunPage] = OrderedDict()
        self.searched_at = float("-inf")
        self._search_seconds = 0.0
        self._is_too_large = False

    def refresh(self) -> tuple[list[str], list[str]]:
        """Read what is new; return the ids of runs that have changed, and of those gone."""
        began = time.monotonic()
        # A folder that takes long to search is searched less often.
        is_due = began - self.searched_at >= max(
            _SECONDS_BETWEEN_SEARCHES, 20 * self._search_seconds
        )
        gone = self.find_runs() if is_due else []
        locked = find_locked_inodes()
        changed = [
            name
            for name, run in self.runs.items()
            if (is_due or run.is_active or not run.entry) and _refresh_entry(run, locked)
        ]
        if is_due:
            self.searched_at = began
            # What it takes where nothing is new; the first time everything is.
            self._search_seconds = self._search_seconds if changed else time.monotonic() - began
        return changed, gone

    def find_runs(self) -> list[str]:
        """Look for runs below the root; return those that have gone."""
        places, self._is_too_large = find_runs(self._root)
        found = {place.id: place for place in places}
        gone = [name for name in self.runs if name not in found]
        for name in gone:
            del self.runs[name]
            self.open_pages.pop(name, None)
        for name, place in found.items():
            if name not in self.runs:
                self.runs[name] = RunListEntry(place)
        return gone

    def overview(self) -> Json:
        """Return what a page begins with: all runs."""
        return {
            "folder": str(self._root),
            "version": version("mpfedcl"),
            "runs": [run.entry for run in self.runs.values() if run.entry],
            "note": (
                f"There are more than {MOST_FOLDERS:,} folders; runs beyond them are not shown."
                if self._is_too_large
                else ""
            ),
        }

    def entries(self, ids: Sequence[str]) -> list[Json]:
        """Return what the list says of some runs."""
        return [self.runs[name].entry for name in ids if name in self.runs]

    def describe(self, name: str) -> bytes | None:
        """Return one run's page as JSON; None where there is no such run."""
        opened = self._open_run(name)
        return None if opened is None else opened.to_json()

    def describe_map(self, name: str) -> bytes | None:
        """Return one run's map as JSON; None where there is no such run."""
        opened = self._open_run(name)
        return None if opened is None else opened.map_to_json()

    def compare(self, ids: Sequence[str]) -> bytes:
        """Return chosen runs side by side as JSON; those that are not there are left out."""
        found, troubles = [], []
        for name in dict.fromkeys(ids[:MOST_COMPARED]):
            if (opened := self._open_run(name)) is None:
                continue
            try:
                if opened.records is None or not opened.records.rounds:
                    raise InvalidInput(f"{self.runs[name].location.path.name} has no round yet.")
                found.append((opened.records, describe_run(opened.records)))
            except InvalidInput as error:
                troubles.append(str(error))
        told = compare_runs(found) if found else {"groups": [], "tables": []}
        return encode(told | {"troubles": troubles})

    def _open_run(self, name: str) -> RunPage | None:
        if name not in self.runs:
            return None
        if name not in self.open_pages:
            self.open_pages[name] = RunPage(self.runs[name].location)
        self.open_pages.move_to_end(name)
        while len(self.open_pages) > _MOST_OPEN:
            self.open_pages.popitem(last=False)
        self.open_pages[name].refresh()
        return self.open_pages[name]


def _refresh_entry(run: RunListEntry, locked: set[int]) -> bool:
    try:
        return run.refresh(locked)
    # Whatever else may be wrong with one run's files must not cost the others anything.
    except Exception as error:
        return run.mark_damaged(error)
