"""What a running federation is doing just now, in a small file for people and programs."""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from mpfedcl.core.errors import RunCutShort
from mpfedcl.core.files import write_atomically

_WRITE_SECONDS = 0.5
"""Between two writes within the same step."""


class Status:
    """Writes a status file, if it is given a path, and looks for a stop file beside it."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._last: dict[str, Any] = {}
        self._written = 0.0

    def write(self, what: str, **details: Any) -> None:
        """Write what is being done; the same again is not written."""
        content = {"what": what, "pid": os.getpid(), **details}
        if self._path is None or content == self._last:
            return
        same_step = content.get("what") == self._last.get("what")
        if same_step and time.monotonic() - self._written < _WRITE_SECONDS:
            return
        self._last, self._written = content, time.monotonic()
        # A status that cannot be written must not end a run.
        with contextlib.suppress(OSError):
            write_atomically(self._path, (json.dumps(content) + "\n").encode())

    def show_alive(self) -> None:
        """Show that this process is alive."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                os.utime(self._path)

    def stop_requested(self) -> bool:
        """Tell whether the run is to stop after the round under way."""
        return self._path is not None and stop_file(self._path).exists()

    def raise_if_stop_requested(self) -> None:
        """Raise `RunCutShort` if the run is to stop: while it waits, no round is under way."""
        if self.stop_requested():
            raise RunCutShort("stopped while it was waiting for clients; what was done is kept.")


def read_status(path: Path) -> dict[str, Any]:
    """Return the content of a status file; empty where there is none."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def stop_file(path: Path) -> Path:
    """Return the file that asks a run to stop by existing."""
    return path.with_name(f"{path.name}.stop")
