"""Downloads that resume, retry, and end in exactly the published bytes or in one sentence.

The tests use a local server that cuts, stalls, lies and redirects, never a public address.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import sync_folder
from mpfedcl.data.public.fetch.http import DownloadError, ServerUnreachableError, request_file
from mpfedcl.data.public.fetch.public_sources import PublicFile, PublicSource

MOST_BYTES = 16 * 2**30
"""Where no size is published, more than any file of `public_sources` has."""

_WORTHWHILE = 2**20


@dataclass(frozen=True)
class RetryPolicy:
    """How long a download is tried before it is given up; time itself can be replaced."""

    attempts: int = 5
    """Rounds through all addresses that may fail; one that brings a new MiB is free."""
    timeout: float = 30.0
    """Seconds of silence, or of fewer than `slowest` bytes per second, that end a connection."""
    slowest: float = 1024.0
    first_pause: float = 1.0
    longest_pause: float = 30.0
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def pause(self, failures: int) -> None:
        """Wait, twice as long after each failure."""
        self.sleep(min(self.longest_pause, self.first_pause * 2 ** max(0, failures - 1)))


DownloadProgress = Callable[[PublicFile, int], None]
"""Called with a file and how many of its bytes are on disk."""


class _WrongContentError(DownloadError):
    """What came is not the file, so that nothing of it may stay."""


def fetch_source(
    source: PublicSource,
    folder: Path,
    retries: RetryPolicy | None = None,
    report: DownloadProgress = lambda *_: None,
) -> list[Path]:
    """Bring all files of a source into a folder; what is there and right stays."""
    retries = retries or RetryPolicy()
    return [
        fetch_file(public_file, folder, source.page, retries, report)
        for public_file in source.files
    ]


def fetch_file(
    public_file: PublicFile,
    folder: Path,
    page: str,
    retries: RetryPolicy,
    report: DownloadProgress = lambda *_: None,
) -> Path:
    """Bring one file into a folder and return its path.

    What has arrived lies in `NAME.part` until size and checksum are right; a later call resumes
    from there. Wrong bytes are deleted and asked for again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, part = folder / public_file.name, folder / f"{public_file.name}.part"
    if path.is_file() and _find_fault(public_file, path) is None:
        report(public_file, path.stat().st_size)
        return path
    needed, free = (public_file.size or 0) - _measure(part), shutil.disk_usage(folder).free
    if needed > free:
        raise InvalidInput(
            f"{folder} has {free:,} bytes free, but {public_file.name} needs {needed:,} more; "
            "--root must name a folder with room."
        )
    addresses = list(public_file.addresses)
    faults: dict[str, DownloadError] = {}
    failures, most_bytes = 0, _measure(part)
    while addresses and failures < retries.attempts:
        # Who has no connection from the start should not wait for it to be said.
        if failures == 2 and most_bytes == 0 and _is_offline(faults):
            break
        if faults:
            retries.pause(failures)
        for address in tuple(addresses):
            try:
                _transfer(public_file, address, part, retries, report)
                _accept(public_file, part, path)
                return path
            except DownloadError as fault:
                faults[address] = fault
                if isinstance(fault, _WrongContentError):
                    part.unlink(missing_ok=True)
                if fault.final:
                    addresses.remove(address)
        # Counted from the most there ever was, so that bytes brought twice never buy a round.
        if _measure(part) < most_bytes + _WORTHWHILE:
            failures += 1
        most_bytes = max(most_bytes, _measure(part))
    raise InvalidInput(_describe_failure(public_file, faults, path, page))


def _transfer(
    public_file: PublicFile,
    address: str,
    part: Path,
    retries: RetryPolicy,
    report: DownloadProgress,
) -> None:
    """Bring the bytes that are missing from one address into the part file."""
    limit = public_file.size or MOST_BYTES
    # Without a checksum nobody would notice pieces of two versions of a file joined into one.
    if _measure(part) > limit or not (public_file.sha256 or public_file.md5):
        part.unlink(missing_ok=True)
    have = _measure(part)
    # A part may be whole, if the program was killed between its last byte and its renaming.
    if have and _find_fault(public_file, part) is None:
        return
    with request_file(address, have, retries.timeout) as reply:
        # Another file is refused before its gigabytes are downloaded.
        if public_file.size is not None and reply.end not in (None, public_file.size):
            raise DownloadError(f"announced {reply.end:,} bytes")
        have = reply.begin
        with part.open("ab" if have else "wb") as file:
            report(public_file, have)
            deadline, brought = retries.clock() + retries.timeout, 0
            for chunk in reply.chunks():
                file.write(chunk)
                have += len(chunk)
                brought += len(chunk)
                report(public_file, have)
                if have > limit:
                    raise _WrongContentError(f"sent more than {limit:,} bytes")
                if brought >= retries.slowest * retries.timeout:
                    deadline, brought = retries.clock() + retries.timeout, 0
                elif retries.clock() > deadline:
                    raise DownloadError(
                        f"sent only {brought:,} bytes in {retries.timeout:g} seconds"
                    )
        if reply.end is not None and have < reply.end:
            raise DownloadError(f"closed the connection after {have:,} of {reply.end:,} bytes")


def _accept(public_file: PublicFile, part: Path, path: Path) -> None:
    """Move the part file into its place if it is right."""
    if public_file.size is not None and _measure(part) < public_file.size:
        raise DownloadError(f"closed the connection after {_measure(part):,} bytes")
    fault = _find_fault(public_file, part)
    if fault is not None:
        raise _WrongContentError(f"sent {fault}")
    with part.open("rb+") as file:
        os.fsync(file.fileno())
    part.replace(path)
    sync_folder(path.parent)


def _find_fault(public_file: PublicFile, path: Path) -> str | None:
    """Return what a file is instead of the published one, or None if it is right."""
    size = path.stat().st_size
    if size == 0 or size != (public_file.size or size):
        return f"{size:,} bytes"
    algorithm, expected = (
        ("sha256", public_file.sha256) if public_file.sha256 else ("md5", public_file.md5)
    )
    if expected is None:
        return None
    with path.open("rb") as file:
        # MD5 stands here against accidents, not against malice.
        found = hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False))
    if found.hexdigest() == expected:
        return None
    return f"{size:,} bytes with {algorithm.upper()} {found.hexdigest()}"


def _measure(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _is_offline(faults: dict[str, DownloadError]) -> bool:
    return all(isinstance(fault, ServerUnreachableError) for fault in faults.values())


def _describe_failure(
    public_file: PublicFile, faults: dict[str, DownloadError], path: Path, page: str
) -> str:
    expected = [f"{public_file.size:,} bytes"] if public_file.size is not None else []
    if public_file.sha256 is not None:
        expected.append(f"SHA256 {public_file.sha256}")
    elif public_file.md5 is not None:
        expected.append(f"MD5 {public_file.md5}")
    wanted = f" (expected: {', '.join(expected)})" if expected else ""
    told = ", ".join(f"{address} {fault}" for address, fault in faults.items())
    guess = "this computer may be offline, so " if _is_offline(faults) else ""
    return (
        f"{public_file.name}{wanted} could not be fetched: {told}; {guess}get the file by hand "
        f"from {page}, put it at {path} and run the same command again."
    )
