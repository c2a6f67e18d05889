"""Requests over http and https alone, from a given byte on, with bounded redirects."""

import re
import ssl
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from urllib.request import getproxies, proxy_bypass

import httpx

MOST_REDIRECTS = 5

_PASSING_STATUSES = (408, 425, 429)
"""Of the statuses that blame the request, those that may be otherwise the next time."""
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
    """A body on its way: from byte `begin` to byte `end` of the file, None if nobody said."""

    begin: int
    end: int | None
    _response: httpx.Response

    def chunks(self) -> Iterator[bytes]:
        """Yield bytes as they arrive; they end where the body does, or the connection."""
        try:
            yield from self._response.iter_raw()
        except httpx.RemoteProtocolError:
            # Whoever knows the end sees what is missing, and keeps what came.
            if self.end is None:
                raise


@contextmanager
def request_file(address: str, begin: int, timeout: float) -> Iterator[FileResponse]:
    """Ask for the bytes from `begin` on; the reply begins there or, where ranges fail, at 0."""
    try:
        # From the start, where the server answers another range than it was asked for.
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
            # The system's certificates; httpx alone would trust only those that it brings.
            verify=ssl.create_default_context(),
            event_hooks={"response": [_check_redirect]},
        )
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        raise DownloadError(f"has a proxy that cannot be used ({error})", final=True) from None


def _check_redirect(response: httpx.Response) -> None:
    """Refuse a redirect to anything but http and https, or from https to http."""
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
    """Return the reply as its headers tell it, or None if it is not from `begin` on."""
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
