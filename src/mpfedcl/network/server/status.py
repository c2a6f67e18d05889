"""What a running federation is doing just now, in a small file for people and programs."""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from mpfedcl.errors import RunCutShort
from mpfedcl.files import write_atomically

_SELDOM = 0.5
"""Seconds between two writes that say the same of another moment."""


class Status:
    """Writes a status file, if it is given a place, and looks for the wish to stop beside it."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._last: dict[str, Any] = {}
        self._written = 0.0

    def say(self, what: str, **details: Any) -> None:
        """Write what is being done; the same again is not written."""
        content = {"what": what, "pid": os.getpid(), **details}
        if self._path is None or content == self._last:
            return
        same_step = content.get("what") == self._last.get("what")
        if same_step and time.monotonic() - self._written < _SELDOM:
            return
        self._last, self._written = content, time.monotonic()
        # A status that cannot be written must not end a run.
        with contextlib.suppress(OSError):
            write_atomically(self._path, (json.dumps(content) + "\n").encode())

    def touch(self) -> None:
        """Show that this process lives."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                os.utime(self._path)

    def asked_to_stop(self) -> bool:
        """Tell whether somebody wants the run to stop after the round under way."""
        return self._path is not None and stop_file(self._path).exists()

    def check(self) -> None:
        """End a wait at once where somebody wants the run to stop: nothing is under way."""
        if self.asked_to_stop():
            raise RunCutShort("stopped while it was waiting for clients; what was done is kept.")


def read_status(path: Path) -> dict[str, Any]:
    """Return what a status file says; nothing where there is none."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def stop_file(path: Path) -> Path:
    """Return the file whose being there asks a run to stop."""
    return path.with_name(f"{path.name}.stop")
