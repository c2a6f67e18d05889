"""Downloads that resume, retry, and end in exactly the published bytes or in one sentence.

Tested against a local server only, one that cuts, stalls, lies and redirects; the public addresses
of `originals` could not be reached where this was written.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mpfedcl.data.fetch.http import Reply, Trouble, Unreachable, open_reply
from mpfedcl.data.fetch.originals import Collection, Original
from mpfedcl.errors import InvalidInput
from mpfedcl.files import sync_folder

MOST_BYTES = 16 * 2**30
"""Where no size is published, more than any original here has."""

_PIECE = 2**18
_WORTHWHILE = 2**20


@dataclass(frozen=True)
class Patience:
    """How long a download is tried before it is given up; time itself can be replaced."""

    attempts: int = 5
    """Rounds through all addresses that may fail; one that brings a new MiB is free."""
    timeout: float = 30.0
    """Seconds of silence, or of fewer than `slowest` bytes a second, that end a connection."""
    slowest: float = 1024.0
    first_pause: float = 1.0
    longest_pause: float = 30.0
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def pause(self, failures: int) -> None:
        """Wait, twice as long after each failure."""
        self.sleep(min(self.longest_pause, self.first_pause * 2 ** max(0, failures - 1)))


Report = Callable[[Original, int], None]
"""Called with a file and how many of its bytes are on disk."""


def keep_silent(_original: Original, _on_disk: int) -> None:
    """Report nothing."""


class _WrongBytes(Trouble):
    """What came is not the file, so that nothing of it may stay."""


def fetch_collection(
    collection: Collection,
    folder: Path,
    patience: Patience | None = None,
    report: Report = keep_silent,
) -> list[Path]:
    """Bring all files of a collection into a folder; what is there and right stays."""
    patience = patience or Patience()
    return [
        fetch_file(original, folder, collection.page, patience, report)
        for original in collection.files
    ]


def fetch_file(
    original: Original, folder: Path, page: str, patience: Patience, report: Report = keep_silent
) -> Path:
    """Bring one file into a folder and return its path.

    What has arrived lies in `NAME.part` until size and checksum are right; a later call goes on
    from there. Wrong bytes are deleted and asked for again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, part = folder / original.name, folder / f"{original.name}.part"
    if path.is_file() and _find_fault(original, path) is None:
        report(original, path.stat().st_size)
        return path
    _check_space(original, part)
    addresses = list(original.addresses)
    troubles: dict[str, Trouble] = {}
    failures, most_bytes = 0, _measure(part)
    while addresses and failures < patience.attempts:
        # Who has no connection from the start should not wait for it to be said.
        if failures == 2 and most_bytes == 0 and _is_offline(troubles):
            break
        if troubles:
            patience.pause(failures)
        for address in tuple(addresses):
            try:
                _transfer(original, address, part, patience, report)
                _accept(original, part, path)
                return path
            except Trouble as trouble:
                troubles[address] = trouble
                if isinstance(trouble, _WrongBytes):
                    part.unlink(missing_ok=True)
                if trouble.final:
                    addresses.remove(address)
        # Counted from the most there ever was, so that bytes brought twice never buy a round.
        if _measure(part) < most_bytes + _WORTHWHILE:
            failures += 1
        most_bytes = max(most_bytes, _measure(part))
    raise InvalidInput(_describe_failure(original, troubles, path, page))


def _transfer(
    original: Original, address: str, part: Path, patience: Patience, report: Report
) -> None:
    """Bring the bytes that are missing from one address into the part file."""
    limit = original.size or MOST_BYTES
    # Without a checksum nobody would notice pieces of two versions of a file joined into one.
    if _measure(part) > limit or not (original.sha256 or original.md5):
        part.unlink(missing_ok=True)
    have = _measure(part)
    # A part may be whole, if the program was killed between its last byte and its renaming.
    if have and _find_fault(original, part) is None:
        return
    with open_reply(address, have, patience.timeout) as reply:
        _check_announcement(original, reply)
        have = reply.begin
        with part.open("ab" if have else "wb") as file:
            report(original, have)
            deadline, brought = patience.clock() + patience.timeout, 0
            while piece := reply.read(_PIECE):
                file.write(piece)
                have += len(piece)
                brought += len(piece)
                report(original, have)
                if have > limit:
                    raise _WrongBytes(f"sent more than {limit:,} bytes")
                if brought >= patience.slowest * patience.timeout:
                    deadline, brought = patience.clock() + patience.timeout, 0
                elif patience.clock() > deadline:
                    raise Trouble(f"sent only {brought:,} bytes in {patience.timeout:g} seconds")
        if reply.end is not None and have < reply.end:
            raise Trouble(f"closed the connection after {have:,} of {reply.end:,} bytes")


def _check_announcement(original: Original, reply: Reply) -> None:
    """Refuse another file before its gigabytes are downloaded."""
    if original.size is not None and reply.end not in (None, original.size):
        raise Trouble(f"announced {reply.end:,} bytes")


def _accept(original: Original, part: Path, path: Path) -> None:
    """Move the part file into its place if it is right."""
    if original.size is not None and _measure(part) < original.size:
        raise Trouble(f"closed the connection after {_measure(part):,} bytes")
    fault = _find_fault(original, part)
    if fault is not None:
        raise _WrongBytes(f"sent {fault}")
    with part.open("rb+") as file:
        os.fsync(file.fileno())
    part.replace(path)
    sync_folder(path.parent)


def _find_fault(original: Original, path: Path) -> str | None:
    """Return what a file is instead of the original, or None if it is right."""
    size = path.stat().st_size
    if size == 0 or size != (original.size or size):
        return f"{size:,} bytes"
    algorithm, expected = ("sha256", original.sha256) if original.sha256 else ("md5", original.md5)
    if expected is None:
        return None
    with path.open("rb") as file:
        # MD5 stands here against accidents, not against malice.
        found = hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False))
    if found.hexdigest() == expected:
        return None
    return f"{size:,} bytes with {algorithm.upper()} {found.hexdigest()}"


def _check_space(original: Original, part: Path) -> None:
    needed = (original.size or 0) - _measure(part)
    free = shutil.disk_usage(part.parent).free
    if needed > free:
        raise InvalidInput(
            f"{part.parent} has {free:,} bytes free, but {original.name} needs {needed:,} more; "
            "--root must name a folder with room."
        )


def _measure(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _is_offline(troubles: dict[str, Trouble]) -> bool:
    return all(isinstance(trouble, Unreachable) for trouble in troubles.values())


def _describe_failure(
    original: Original, troubles: dict[str, Trouble], path: Path, page: str
) -> str:
    expected = [f"{original.size:,} bytes"] if original.size is not None else []
    if original.sha256 is not None:
        expected.append(f"SHA256 {original.sha256}")
    elif original.md5 is not None:
        expected.append(f"MD5 {original.md5}")
    wanted = f" (expected: {', '.join(expected)})" if expected else ""
    told = ", ".join(f"{address} {trouble}" for address, trouble in troubles.items())
    guess = "this computer may be offline, so " if _is_offline(troubles) else ""
    return (
        f"{original.name}{wanted} could not be fetched: {told}; {guess}get the file by hand from "
        f"{page}, put it at {path} and run the same command again."
    )
