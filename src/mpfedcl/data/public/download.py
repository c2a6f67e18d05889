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

from mpfedcl.core.errors import InvalidInput, explain
from mpfedcl.core.files import sync_folder
from mpfedcl.data.public.sources import PublicFile, PublicSource

_MOST_REDIRECTS = 5
MOST_BYTES = 16 * 2**30
"""The limit if no size is published: more than any file of `sources`."""

_PASSING_STATUSES = (408, 425, 429)
"""Client errors that may succeed when tried again."""
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
_LONGEST_PAUSE = 30.0
_WORTHWHILE = 2**20
"""Bytes of progress after which an attempt does not count as failed."""

DownloadProgress = Callable[[PublicFile, int], None]
"""Called with a file and how many of its bytes are on disk."""


class _Failure(Exception):  # noqa: N818  -- it names what happened
    """An address did not give the file this time."""

    def __init__(
        self, what: str, *, final: bool = False, unreachable: bool = False, wrong: bool = False
    ) -> None:
        super().__init__(what)
        self.final = final
        """Whether asking again cannot help."""
        self.unreachable = unreachable
        """Whether there was no connection at all."""
        self.wrong = wrong
        """Whether the received bytes are not the file, so that none of them may be kept."""


@dataclass(frozen=True)
class RetryPolicy:
    """How often a download is retried."""

    attempts: int = 5
    """Rounds through all addresses."""
    timeout: float = 30.0
    """Seconds of silence that end a connection."""
    sleep: Callable[[float], None] = time.sleep


def fetch_source(
    source: PublicSource,
    folder: Path,
    retries: RetryPolicy | None = None,
    report: DownloadProgress = lambda *_: None,
) -> list[Path]:
    """Download all files of a source into a folder; correct files are kept."""
    retries = retries or RetryPolicy()
    return [fetch_file(each, folder, source.page, retries, report) for each in source.files]


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
    faults: dict[str, _Failure] = {}
    failures, most_bytes = 0, _measure(part)
    while addresses and failures < retries.attempts:
        # Without any connection, report that quickly.
        if failures == 2 and most_bytes == 0 and _is_offline(faults):
            break
        if faults:
            retries.sleep(min(_LONGEST_PAUSE, 2.0 ** max(0, failures - 1)))
        for address in tuple(addresses):
            try:
                _transfer(public_file, address, part, retries.timeout, report)
                _accept(public_file, part, path)
                return path
            except _Failure as fault:
                faults[address] = fault
                if fault.wrong:
                    part.unlink(missing_ok=True)
                if fault.final:
                    addresses.remove(address)
        # A server that cuts often is asked again as long as the file grows.
        if _measure(part) < most_bytes + _WORTHWHILE:
            failures += 1
        most_bytes = max(most_bytes, _measure(part))
    told = ", ".join(f"{address} {fault}" for address, fault in faults.items())
    expected = "" if public_file.size is None else f"{public_file.size:,} bytes, "
    guess = "this computer may be offline, so " if _is_offline(faults) else ""
    raise InvalidInput(
        f"{public_file.name} (expected: {expected}SHA256 {public_file.sha256}) could not be "
        f"fetched: {told}; {guess}get the file by hand from {page}, put it at {path} and run the "
        "same command again."
    )


def _transfer(
    public_file: PublicFile, address: str, part: Path, timeout: float, report: DownloadProgress
) -> None:
    """Append the missing bytes from one address to the part file."""
    limit = public_file.size or MOST_BYTES
    if _measure(part) > limit:
        part.unlink()
    have = _measure(part)
    # A part may be complete if the process was killed before renaming it.
    if have and _find_fault(public_file, part) is None:
        return
    with _request_file(address, have, timeout) as response:
        have, end = _read_head(response, have)
        # Another file is rejected before its gigabytes are downloaded.
        if public_file.size is not None and end not in (None, public_file.size):
            raise _Failure(f"announced {end:,} bytes")
        with part.open("ab" if have else "wb") as file:
            report(public_file, have)
            try:
                for chunk in response.iter_raw():
                    file.write(chunk)
                    have += len(chunk)
                    report(public_file, have)
                    if have > limit:
                        raise _Failure(f"sent more than {limit:,} bytes", wrong=True)
            except httpx.RemoteProtocolError:
                # If the size is known, the gap is noticed below, and the received bytes are kept.
                if end is None:
                    raise
    if end is not None and have < end:
        raise _Failure(f"closed the connection after {have:,} of {end:,} bytes")


def _accept(public_file: PublicFile, part: Path, path: Path) -> None:
    """Move the part file into its place if it is right."""
    if public_file.size is not None and _measure(part) < public_file.size:
        raise _Failure(f"closed the connection after {_measure(part):,} bytes")
    fault = _find_fault(public_file, part)
    if fault is not None:
        raise _Failure(f"sent {fault}", wrong=True)
    with part.open("rb+") as file:
        os.fsync(file.fileno())
    part.replace(path)
    sync_folder(path.parent)


def _find_fault(public_file: PublicFile, path: Path) -> str | None:
    """Describe how a file differs from the published one; None if it does not."""
    size = path.stat().st_size
    if size != (public_file.size or size):
        return f"{size:,} bytes"
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    return None if found == public_file.sha256 else f"{size:,} bytes with SHA256 {found}"


def _measure(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _is_offline(faults: dict[str, _Failure]) -> bool:
    return all(fault.unreachable for fault in faults.values())


@contextmanager
def _request_file(address: str, begin: int, timeout: float) -> Iterator[httpx.Response]:
    """Request the bytes from `begin`, and give the response at the end of the redirects.

    httpx would follow them too, but it reads all that a redirect carries, however much that is.
    """
    headers = {"User-Agent": "mpfedcl", "Accept-Encoding": "identity"}
    if begin:
        headers["Range"] = f"bytes={begin}-"
    _check_scheme(httpx.URL(address), address)
    request: httpx.Request | None = httpx.Request("GET", address, headers=headers)
    try:
        for _ in range(_MOST_REDIRECTS + 1):
            assert request is not None
            with (
                _open_client(request.url, timeout) as client,
                closing(client.send(request, stream=True)) as response,
            ):
                request = response.next_request
                if request is None:
                    yield response
                    return
    except httpx.TimeoutException:
        raise _Failure("fell silent") from None
    except httpx.TransportError as error:
        if isinstance(error, httpx.ConnectError | httpx.ProxyError):
            raise _Failure(f"cannot be reached ({explain(error)})", unreachable=True) from None
        raise _Failure(f"broke off ({explain(error)})") from None
    raise _Failure(f"redirects more than {_MOST_REDIRECTS} times", final=True)


def _open_client(url: httpx.URL, timeout: float) -> httpx.Client:
    # httpx's own use of the environment fails if there is a SOCKS proxy for another scheme.
    proxy = None if proxy_bypass(url.netloc.decode()) else getproxies().get(url.scheme)
    if proxy and "://" not in proxy:
        proxy = f"http://{proxy}"
    # The system's certificates; httpx would trust only the bundled ones.
    certificates, hooks = ssl.create_default_context(), {"response": [_check_redirect]}
    try:
        return httpx.Client(
            timeout=timeout, proxy=proxy, trust_env=False, verify=certificates, event_hooks=hooks
        )
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        raise _Failure(f"has a proxy that cannot be used ({error})", final=True) from None


def _check_redirect(response: httpx.Response) -> None:
    """Reject a redirect to anything but http and https, or from https to http."""
    if not response.has_redirect_location:
        return
    location = response.headers["Location"]
    try:
        target = response.url.join(location)
    except (httpx.InvalidURL, ValueError):
        raise _Failure(f"leads to {location!r}, which is not an address", final=True) from None
    _check_scheme(target, location)
    if (response.url.scheme, target.scheme) == ("https", "http"):
        raise _Failure(f"leads from https to the unprotected {target}", final=True)


def _check_scheme(url: httpx.URL, shown: str) -> None:
    if url.scheme not in ("http", "https"):
        raise _Failure(f"leads to {shown}, but only http and https are followed", final=True)


def _read_head(response: httpx.Response, begin: int) -> tuple[int, int | None]:
    """Return the first byte of a response and the size of the file, None if it is unknown."""
    status, headers = response.status_code, response.headers
    if status not in (200, 206, 416):
        is_final = 400 <= status < 500 and status not in _PASSING_STATUSES
        raise _Failure(f"answered {status} {response.reason_phrase}".rstrip(), final=is_final)
    encoding = headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise _Failure(f"sends the file in the encoding {encoding}", final=True)
    if status == 200:
        length = headers.get("Content-Length", "")
        return 0, int(length) if length.isdecimal() else None
    match = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", ""))
    first, last, size = (int(number) for number in match.groups()) if match else (-1, -1, -1)
    if not begin or (first, last + 1) != (begin, size):
        # The next attempt starts from the beginning.
        raise _Failure(f"sent another part of the file than the bytes from {begin:,}", wrong=True)
    return begin, size
