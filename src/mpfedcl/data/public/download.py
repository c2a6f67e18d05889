"""Downloads that resume, and end in exactly the published bytes or in a one-line error."""

import hashlib
import os
import shutil
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from mpfedcl.core.errors import InvalidInput, explain
from mpfedcl.core.files import sync_folder
from mpfedcl.data.public.sources import PublicFile, PublicSource

ATTEMPTS = 4
"""Rounds through all addresses."""
PAUSE = 2.0
"""Seconds before the second round; before each later one, twice as many."""
TIMEOUT = 30.0
"""Seconds of silence that end a connection."""
MOST_BYTES = 16 * 2**30
"""The limit if no size is published: more than any file of `sources`."""
_MOST_REDIRECTS = 5

DownloadProgress = Callable[[PublicFile, int], None]
"""Called with a file and how many of its bytes are on disk."""


class _WrongBytes(Exception):  # noqa: N818  -- it names what happened
    """The received bytes are not the beginning of the file, so that none of them may be kept."""


def fetch_source(
    source: PublicSource, folder: Path, report: DownloadProgress = lambda *_: None
) -> list[Path]:
    """Download all files of a source into a folder; correct files are kept."""
    return [fetch_file(each, folder, source.page, report) for each in source.files]


def fetch_file(
    public_file: PublicFile,
    folder: Path,
    page: str,
    report: DownloadProgress = lambda *_: None,
) -> Path:
    """Download one file into a folder and return its path.

    Received bytes are kept in `NAME.part` until size and checksum are right; a later call resumes
    there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, part = folder / public_file.name, folder / f"{public_file.name}.part"
    if path.is_file() and _is_right(public_file, path):
        report(public_file, path.stat().st_size)
        return path
    needed, free = (public_file.size or 0) - _measure(part), shutil.disk_usage(folder).free
    if needed > free:
        raise InvalidInput(
            f"{folder} has {free:,} bytes free, but {public_file.name} needs {needed:,} more; "
            "--root must name a folder with room."
        )
    faults: dict[str, str] = {}
    addresses = list(public_file.addresses)
    for attempt in range(ATTEMPTS):
        if attempt and addresses:
            time.sleep(PAUSE * 2 ** (attempt - 1))
        for address in tuple(addresses):
            try:
                _receive(public_file, address, part, report)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                faults[address] = explain(error)
                if isinstance(error, httpx.HTTPStatusError) and _is_final(error.response):
                    addresses.remove(address)
                continue
            except _WrongBytes as fault:
                part.unlink(missing_ok=True)
                faults[address] = str(fault)
                continue
            with part.open("rb+") as file:
                os.fsync(file.fileno())
            part.replace(path)
            sync_folder(folder)
            return path
    told = ", ".join(f"{address} ({fault})" for address, fault in faults.items())
    raise InvalidInput(
        f"{public_file.name} could not be fetched: {told}; get the file with SHA256 "
        f"{public_file.sha256} by hand from {page}, put it at {path} and run the same command "
        "again."
    )


def _receive(public_file: PublicFile, address: str, part: Path, report: DownloadProgress) -> None:
    """Append the missing bytes from one address to the part file, which is right afterwards."""
    have, limit = _measure(part), public_file.size or MOST_BYTES
    # A part is complete if the process was killed before renaming it.
    if have and _is_right(public_file, part):
        return
    with _request_file(address, have) as response:
        if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise _WrongBytes(f"has no bytes after {have:,}")
        response.raise_for_status()
        if response.status_code != httpx.codes.PARTIAL_CONTENT:
            have = 0
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            raise _WrongBytes(f"sent another part of the file than the bytes from {have:,}")
        with part.open("ab" if have else "wb") as file:
            report(public_file, have)
            for chunk in response.iter_raw():
                have += len(chunk)
                if have > limit:
                    raise _WrongBytes(f"sent more than {limit:,} bytes")
                file.write(chunk)
                report(public_file, have)
    if public_file.size is not None and have < public_file.size:
        raise httpx.RemoteProtocolError(f"closed the connection after {have:,} bytes")
    if not _is_right(public_file, part):
        raise _WrongBytes(f"sent {have:,} bytes that are not the file")


@contextmanager
def _request_file(address: str, begin: int) -> Iterator[httpx.Response]:
    """Request the bytes from `begin`, and give the response at the end of the redirects.

    httpx would follow them too, but it reads all that a redirect carries, however much that is.
    """
    headers = {"User-Agent": "mpfedcl", "Accept-Encoding": "identity"}
    if begin:
        headers["Range"] = f"bytes={begin}-"
    url = httpx.URL(address)
    try:
        # The system's certificates; httpx would trust only the bundled ones.
        client = httpx.Client(timeout=TIMEOUT, verify=ssl.create_default_context())
    except (ImportError, ValueError) as error:
        raise InvalidInput(
            f"the proxy that the environment names cannot be used ({explain(error)}); it must be "
            "one for http and https."
        ) from None
    with client:
        for _ in range(_MOST_REDIRECTS + 1):
            with client.stream("GET", url, headers=headers, follow_redirects=False) as response:
                if response.next_request is None:
                    yield response
                    return
                url = response.next_request.url
    raise httpx.TooManyRedirects(f"redirects more than {_MOST_REDIRECTS} times")


def _is_final(response: httpx.Response) -> bool:
    """Return whether asking again gives the same answer, such as 404."""
    return response.is_client_error and response.status_code not in (408, 425, 429)


def _is_right(public_file: PublicFile, path: Path) -> bool:
    """Return whether a file is the published one."""
    if public_file.size is not None and path.stat().st_size != public_file.size:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == public_file.sha256


def _measure(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
