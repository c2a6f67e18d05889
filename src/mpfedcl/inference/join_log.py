"""joins.jsonl: the log of clients that joined or left a finished run, one event per line."""

import contextlib
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import FORMAT, write_atomically
from mpfedcl.core.json_files import load_json
from mpfedcl.runs.statistics_files import POOLED

Json = dict[str, Any]

LOG = "joins.jsonl"
CHANGES = ("joined", "replaced", "extended", "left")
"""Events that change a federation; `rejected` and `dropped` only report."""


def make_event(kind: str, client: str) -> Json:
    """Return the first fields of an event that happens now."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"format": FORMAT, "event": kind, "client": client, "time": now}


def extend_log(path: Path, *events: Json) -> bytes:
    """Return the content of a run's log with more events at its end."""
    content = (path / LOG).read_bytes() if (path / LOG).exists() else b""
    if content and not content.endswith(b"\n"):
        content += b"\n"
    return content + b"".join(json.dumps(e, allow_nan=False).encode() + b"\n" for e in events)


def write_events(path: Path, *events: Json) -> None:
    """Append events to a run's log."""
    write_atomically(path / LOG, extend_log(path, *events))


def read_events(path: Path) -> Iterator[Json]:
    """Yield the events of a run's log; lines that cannot be parsed are skipped."""
    for line in (path / LOG).read_bytes().splitlines() if (path / LOG).exists() else []:
        event: Any = None
        with contextlib.suppress(ValueError):
            event = load_json(line)
        if isinstance(event, dict):
            yield event


def has_changed(path: Path) -> bool:
    """Return whether clients joined or left a one-shot run after it ended."""
    is_kept = (path / POOLED).is_file()
    return is_kept and any(event.get("event") in CHANGES for event in read_events(path))


def refuse_changed(path: Path) -> None:
    """Refuse to resume a one-shot run that clients joined or left: it has no round left."""
    if has_changed(path):
        raise InvalidInput(
            f"resume is {str(path)!r}, where clients have joined or left since; it must be a run "
            "with rounds left, and a one-shot run has none."
        )
