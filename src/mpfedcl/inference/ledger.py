"""joins.jsonl: who has joined, changed and left a run, a line each, every line bound to the last.

`previous` is the SHA-256 of the line before, so that no line can be taken out or changed without
all after it telling.
"""

import contextlib
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mpfedcl.core.files import FORMAT, write_atomically
from mpfedcl.core.json_files import load_json
from mpfedcl.core.tensors import digest

Json = dict[str, Any]

LOG = "joins.jsonl"


def make_event(kind: str, name: str) -> Json:
    """Return the beginning of an event of now."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"format": FORMAT, "event": kind, "client": name, "time": now}


def extend_ledger(path: Path, *events: Json) -> bytes:
    """Return the content of a run's ledger with events after those that it has."""
    file = path / LOG
    content = file.read_bytes() if file.exists() else b""
    if content and not content.endswith(b"\n"):
        content += b"\n"
    for event in events:
        last = content.splitlines()[-1] if content else None
        bound = {**event, "previous": None if last is None else digest(last)}
        content += json.dumps(bound, allow_nan=False).encode() + b"\n"
    return content


def write_events(path: Path, *events: Json) -> None:
    """Write events into a run's ledger."""
    write_atomically(path / LOG, extend_ledger(path, *events))


def read_events(path: Path) -> Iterator[Json]:
    """Yield the events of a run's ledger; lines that are none are passed over."""
    file = path / LOG
    for line in file.read_bytes().splitlines() if file.exists() else []:
        event: Any = None
        with contextlib.suppress(ValueError):
            event = load_json(line)
        if isinstance(event, dict):
            yield event


def find_break(path: Path) -> int | None:
    """Return the number, from 1, of the first line that does not follow the one before it."""
    file, last = path / LOG, None
    for number, line in enumerate(file.read_bytes().splitlines() if file.exists() else [], 1):
        event: Any = None
        with contextlib.suppress(ValueError):
            event = load_json(line)
        if not isinstance(event, dict) or event.get("previous") != last:
            return number
        last = digest(line)
    return None
