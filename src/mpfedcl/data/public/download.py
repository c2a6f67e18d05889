"""Downloads that resume and retry, and end in exactly the published bytes or in a one-line error.

Only http and https are followed, with bounded redirects and bounded sizes.
"""

import hashlib
import os
import re
import shutil
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import getproxies, proxy_bypass

import httpx

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import sync_folder
from mpfedcl.data.public.sources import PublicFile, PublicSource

MOST_REDIRECTS = 5

_PASSING_STATUSES = (408, 425, 429)
"""Client errors that may succeed when tried again."""
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")


class DownloadError(Exception):
    """An address did not give the file this time; `final` if asking again cannot help."""

    def __init__(self, what: str, final: bool = False) -> None:
        super().__init__(what)
        self.final = final


class ServerUnreachableError(DownloadError):
    """There was no connection at all."""


@dataclass(frozen=True)
class FileResponse:
    """A response body with the bytes from `begin` to `end` of the file; None if unknown."""

    begin: int
    end: int | None
    _response: httpx.Response

    def chunks(self) -> Iterator[bytes]:
        """Yield bytes as they arrive, until the body or the connection ends."""
        try:
            yield from self._response.iter_raw()
        except httpx.RemoteProtocolError:
            # If the length is known, the caller notices the gap and keeps the received bytes.
            if self.end is None:
                raise


@contextmanager
def request_file(address: str, begin: int, timeout: float) -> Iterator[FileResponse]:
    """Request the bytes from `begin`; the reply starts there, or at 0 if ranges fail."""
    try:
        # From the start if the server sends another range than requested.
        for first in dict.fromkeys((begin, 0)):
            with _follow_redirects(address, first, timeout) as response:
                reply = _read_head(response, first)
                if reply is not None:
                    yield reply
                    return
        raise DownloadError("sent a part of the file although all of it was asked for")
    except httpx.ConnectTimeout:
        raise DownloadError("did not answer in time") from None
    except httpx.TimeoutException:
        raise DownloadError("fell silent") from None
    except (httpx.ConnectError, httpx.ProxyError) as error:
        raise ServerUnreachableError(f"cannot be reached ({_reason(error)})") from None
    except httpx.TransportError as error:
        raise DownloadError(f"broke off ({_reason(error)})") from None


@contextmanager
def _follow_redirects(address: str, begin: int, timeout: float) -> Iterator[httpx.Response]:
    """Give the response at the end of the redirects.

    httpx would follow them too, but it reads all that a redirect carries, however much that is.
    """
    headers = {"User-Agent": "mpfedcl", "Accept-Encoding": "identity"}
    if begin:
        headers["Range"] = f"bytes={begin}-"
    _check_scheme(httpx.URL(address), address)
    request: httpx.Request | None = httpx.Request("GET", address, headers=headers)
    for _ in range(MOST_REDIRECTS + 1):
        assert request is not None
        with (
            _open_client(request.url, timeout) as client,
            closing(client.send(request, stream=True)) as response,
        ):
            request = response.next_request
            if request is None:
                yield response
                return
    raise DownloadError(f"redirects more than {MOST_REDIRECTS} times", final=True)


def _open_client(url: httpx.URL, timeout: float) -> httpx.Client:
    # Not httpx's own predictor of the environment, which fails on a SOCKS proxy for other schemes.
    proxy = None if proxy_bypass(url.netloc.decode()) else getproxies().get(url.scheme)
    if proxy and "://" not in proxy:
        proxy = f"http://{proxy}"
    try:
        return httpx.Client(
            timeout=timeout,
            proxy=proxy,
            trust_env=False,
            # The system's certificates; httpx would trust only the bundled ones.
            verify=ssl.create_default_context(),
            event_hooks={"response": [_check_redirect]},
        )
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        raise DownloadError(f"has a proxy that cannot be used ({error})", final=True) from None


def _check_redirect(response: httpx.Response) -> None:
    """Reject a redirect to anything but http and https, or from https to http."""
    if not response.has_redirect_location:
        return
    location = response.headers["Location"]
    try:
        target = response.url.join(location)
    except (httpx.InvalidURL, ValueError):
        raise DownloadError(f"leads to {location!r}, which is not an address", final=True) from None
    _check_scheme(target, location)
    if (response.url.scheme, target.scheme) == ("https", "http"):
        raise DownloadError(f"leads from https to the unprotected {target}", final=True)


def _check_scheme(url: httpx.URL, shown: str) -> None:
    if url.scheme not in ("http", "https"):
        raise DownloadError(f"leads to {shown}, but only http and https are followed", final=True)


def _read_head(response: httpx.Response, begin: int) -> FileResponse | None:
    """Return the reply described by its headers, or None if it does not start at `begin`."""
    status, headers = response.status_code, response.headers
    if status == 416 and begin:
        return None
    if status not in (200, 206):
        is_final = 400 <= status < 500 and status not in _PASSING_STATUSES
        raise DownloadError(f"answered {status} {response.reason_phrase}".rstrip(), is_final)
    encoding = headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise DownloadError(f"sends the file in the encoding {encoding}", final=True)
    if status == 206:
        match = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", ""))
        if match is None or begin == 0:
            return None
        first, last, size = (int(number) for number in match.groups())
        return FileResponse(begin, size, response) if (first, last + 1) == (begin, size) else None
    length = headers.get("Content-Length", "")
    return FileResponse(0, int(length) if length.isdecimal() else None, response)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


MOST_BYTES = 16 * 2**30
"""The limit if no size is published: more than any file of `sources`."""

_WORTHWHILE = 2**20


@dataclass(frozen=True)
class RetryPolicy:
    """How often a download is retried; the clock can be replaced in tests."""

    attempts: int = 5
    """Failed rounds through all addresses; a round that brings a new MiB does not count."""
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
    """The received bytes are not the file, so none of them may be kept."""


def fetch_source(
    source: PublicSource,
    folder: Path,
    retries: RetryPolicy | None = None,
    report: DownloadProgress = lambda *_: None,
) -> list[Path]:
    """Download all files of a source into a folder; correct files are kept."""
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
    """Download one file into a folder and return its path.

    Received bytes are kept in `NAME.part` until size and checksum are right; a later call resumes
    there. Wrong bytes are deleted and requested again.
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
        # Without any connection, report that quickly.
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
        # Counted from the maximum so far, so that bytes received twice earn no extra attempt.
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
    """Append the missing bytes from one address to the part file."""
    limit = public_file.size or MOST_BYTES
    # Without a checksum, a file joined from two versions would go unnoticed.
    if _measure(part) > limit or not (public_file.sha256 or public_file.md5):
        part.unlink(missing_ok=True)
    have = _measure(part)
    # A part may be complete if the process was killed before renaming it.
    if have and _find_fault(public_file, part) is None:
        return
    with request_file(address, have, retries.timeout) as reply:
        # Another file is rejected before its gigabytes are downloaded.
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
    """Describe how a file differs from the published one; None if it does not."""
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
