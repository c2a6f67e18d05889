"""The status file of a running federation: its current step, for people and programs."""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from mpfedcl.core.files import write_atomically

_WRITE_SECONDS = 0.5
"""Minimum time between two writes within the same step."""


class Status:
    """Writes a status file, if a path is given, and looks for a stop file next to it."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._last: dict[str, Any] = {}
        self._written = 0.0

    def write(self, what: str, **details: Any) -> None:
        """Write the current step if it has changed."""
        content = {"what": what, "pid": os.getpid(), **details}
        if self._path is None or content == self._last:
            return
        same_step = content.get("what") == self._last.get("what")
        if same_step and time.monotonic() - self._written < _WRITE_SECONDS:
            return
        self._last, self._written = content, time.monotonic()
        # A full disk must not end the run here.
        with contextlib.suppress(OSError):
            write_atomically(self._path, (json.dumps(content) + "\n").encode())

    def show_alive(self) -> None:
        """Touch the status file to show that this process is alive."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                os.utime(self._path)

    def stop_requested(self) -> bool:
        """Return whether the run should stop after the current round."""
        return self._path is not None and stop_file(self._path).exists()


def read_status(path: Path) -> dict[str, Any]:
    """Return the content of a status file; empty if there is none."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def stop_file(path: Path) -> Path:
    """Return the path of the file whose existence stops a run."""
    return path.with_name(f"{path.name}.stop")
