"""Audit logs: JSON lines in a hash chain, one log at the server and one at each client.

Each entry has the SHA-256 of the entry before it and of itself, so that a changed, removed or
inserted entry is found. A chain cannot show that its last entries were cut off, or that its owner
has rewritten all of it: for that, keep the last hash elsewhere (`federation audit --contains`).
"""

import hashlib
import json
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock

from mpfedcl.core.errors import InvalidInput
from mpfedcl.network.transport import Kind, Message, MessageError

AUDIT_FILE = "audit.jsonl"
FIRST = "0" * 64
"""The `previous` of the first entry."""
_MOST_LINE = 2**17
"""Maximum bytes of an entry."""
_LONGEST_TEXT, _LONGEST_LIST = 500, 1000
_LOCK_SECONDS = 30.0

Entry = dict[str, Any]
RequestHandler = Callable[[Kind, Message], Message]


class AuditLog:
    """Appends entries to a file; several processes may write to it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=_LOCK_SECONDS)

    def append(self, event: str, **details: Any) -> None:
        """Append an entry, and return when it is on disk."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with self._lock, os.fdopen(os.open(self._path, flags, 0o600), "r+b") as file:
            number, previous, removed = _find_end(file)
            lines = []
            if removed:
                # A process was killed while it wrote; nothing was reported as written.
                lost = {"bytes": len(removed), "lost_sha256": hashlib.sha256(removed).hexdigest()}
                lines.append(_write_entry(number, previous, "repaired", lost))
                number, previous = number + 1, _hash_of(lines[0])
            shortened = {name: _shorten(each) for name, each in details.items()}
            lines.append(_write_entry(number, previous, event, shortened))
            file.seek(-len(removed), os.SEEK_END)
            file.truncate()
            file.write(b"".join(lines))
            file.flush()
            os.fsync(file.fileno())


def read_audit(path: Path) -> Iterator[Entry]:
    """Yield the entries of a log; raise `InvalidInput` at the first one that breaks the chain."""
    if not path.is_file():
        raise InvalidInput(f"{path} does not exist; nothing has been recorded yet.")
    previous, number = FIRST, 0
    with path.open("rb") as file:
        while line := file.readline(_MOST_LINE):
            number += 1
            if not line.endswith(b"\n") and len(line) < _MOST_LINE:
                raise InvalidInput(
                    f"{path} ends in the middle of line {number}: a process was killed while it "
                    "wrote. The next entry repairs and records this."
                )
            entry = _parse(line)
            if entry is None:
                raise InvalidInput(f"{path} was changed: line {number} is not an entry of the log.")
            if entry["sha256"] != _digest(entry):
                raise InvalidInput(f"{path} was changed: line {number} does not have its own hash.")
            if (entry["previous"], entry["number"]) != (previous, number):
                raise InvalidInput(
                    f"{path} was changed: line {number} does not follow the line before it."
                )
            previous = entry["sha256"]
            yield entry


def keep_audit(handle: RequestHandler, log: AuditLog) -> RequestHandler:
    """Return a client's request handler that records each request, and what is released.

    Nothing is sent if it cannot be recorded.
    """

    def answer(kind: Kind, message: Message) -> Message:
        asked = describe_request(kind, message)
        log.append("asked", **asked, **_describe_privacy(message))
        short = {name: asked[name] for name in ("kind", "run", "round") if name in asked}
        try:
            reply = handle(kind, message)
        except Exception as error:
            is_told = isinstance(error, InvalidInput | MessageError)
            reason = str(error) if is_told else type(error).__name__
            log.append("refused", **short, reason=reason)
            raise
        arrays = {name: list(each.shape) for name, each in sorted(reply.arrays.items())}
        size = sum(each.nbytes for each in reply.arrays.values())
        released = {"values": sorted(reply.values), "arrays": arrays, "array_bytes": size}
        log.append("released", **short, **released)
        return reply

    return answer


def describe_request(kind: Kind, message: Message) -> Entry:
    """Return what identifies a request: kind, run, round, and the experiment's digest."""
    values = message.values
    known = ("run", "round", "stage")
    found = {name: values[name] for name in known if isinstance(values.get(name), str | int)}
    document = values.get("experiment")
    digest = {}
    if isinstance(document, str):
        digest = {"experiment_sha256": hashlib.sha256(document.encode()).hexdigest()}
    return {"kind": kind, **found, **digest}


def _describe_privacy(message: Message) -> Entry:
    """Return method and privacy settings of the experiment in a request, as far as readable."""
    try:
        experiment = tomllib.loads(str(message.values.get("experiment", "")))
    except (tomllib.TOMLDecodeError, RecursionError):
        return {}
    found = {"method": experiment.get("method")}
    privacy = experiment.get("privacy")
    if isinstance(privacy, Mapping) and privacy.get("epsilon") is not None:
        found |= {"privacy_model": privacy.get("model"), "delta": privacy.get("delta")}
        found["epsilon"] = privacy["epsilon"]
    return {name: each for name, each in found.items() if each is not None}


def _find_end(file: Any) -> tuple[int, str, bytes]:
    """Return the next number, the last hash, and the incomplete line at the end, if any."""
    end = file.seek(0, os.SEEK_END)
    start = max(0, end - 2 * _MOST_LINE)
    file.seek(start)
    *lines, removed = file.read().split(b"\n")
    if not lines:
        return 1, FIRST, removed
    if (entry := _parse(lines[-1])) is not None:
        return entry["number"] + 1, entry["sha256"], removed
    # Verification will report this line; the log goes on, so that later events are not lost.
    file.seek(0)
    number = sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(2**20), b""))
    return number + 1, hashlib.sha256(lines[-1]).hexdigest(), removed


def _parse(line: bytes) -> Entry | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    kinds = {"number": int, "event": str, "time": str, "previous": str, "sha256": str}
    if not isinstance(entry, dict):
        return None
    return entry if all(type(entry.get(n)) is kind for n, kind in kinds.items()) else None


def _write_entry(number: int, previous: str, event: str, details: Mapping[str, Any]) -> bytes:
    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    entry = {"number": number, "time": time, "event": event, **details, "previous": previous}
    line = _to_line(entry | {"sha256": _digest(entry)})
    if len(line) > _MOST_LINE:
        # Of a list or a table with very long names.
        entry = {"number": number, "time": time, "event": event, "too_long": len(line)}
        entry["previous"] = previous
        line = _to_line(entry | {"sha256": _digest(entry)})
    return line


def _to_line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, allow_nan=False).encode() + b"\n"


def _digest(entry: Mapping[str, Any]) -> str:
    """Return the hash of an entry without its own hash."""
    content = {name: each for name, each in entry.items() if name != "sha256"}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _hash_of(line: bytes) -> str:
    return str(json.loads(line)["sha256"])


def _shorten(value: Any) -> Any:
    """Return a value of bounded size that JSON can hold."""
    if isinstance(value, str):
        return value[:_LONGEST_TEXT]
    if isinstance(value, bool | int) or value is None:
        return value if not isinstance(value, int) or abs(value) < 2**63 else str(value)[:80]
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    if isinstance(value, Mapping):
        items = list(value.items())[:_LONGEST_LIST]
        return {str(name)[:_LONGEST_TEXT]: _shorten(each) for name, each in items}
    if isinstance(value, list | tuple | set | frozenset):
        return [_shorten(each) for each in list(value)[:_LONGEST_LIST]]
    return str(value)[:_LONGEST_TEXT]
