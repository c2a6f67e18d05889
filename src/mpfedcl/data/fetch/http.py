"""Requests over http and https alone, from a given byte on, with bounded redirects."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from ssl import SSLError
from urllib.error import URLError
from urllib.parse import urljoin, urlsplit
from urllib.request import HTTPHandler, HTTPSHandler, OpenerDirector, ProxyHandler, Request

MOST_REDIRECTS = 5

_REDIRECTS = (301, 302, 303, 307, 308)
_PASSING_STATUSES = (408, 425, 429)
"""Of the statuses that blame the request, those that may be otherwise the next time."""
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class Trouble(Exception):  # noqa: N818  -- an event on the way, which the downloader gets over
    """An address did not give the file this time; `final` if asking again cannot help."""

    def __init__(self, what: str, final: bool = False) -> None:
        super().__init__(what)
        self.final = final


class Unreachable(Trouble):
    """There was no connection at all."""


@dataclass
class Reply:
    """A body on its way: from byte `begin` to byte `end` of the file, None if nobody said."""

    begin: int
    end: int | None
    _response: HTTPResponse

    def read(self, most: int) -> bytes:
        """Return what has arrived, at most so many bytes; nothing at the end.

        A plain `read` would wait until all of them are there, and a trickle would never be seen.
        """
        return self._response.read1(most)


@contextmanager
def open_reply(address: str, begin: int, timeout: float) -> Iterator[Reply]:
    """Ask for the bytes from `begin` on; the reply begins there or, where ranges fail, at 0."""
    try:
        with _follow(address, begin, timeout) as response:
            reply = _read_head(response, begin)
            if reply is not None:
                yield reply
                return
        # The server answered another range than the one it was asked for.
        with _follow(address, 0, timeout) as response:
            reply = _read_head(response, 0)
            if reply is None:
                raise Trouble("sent a part of the file although all of it was asked for")
            yield reply
    except URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise Trouble("did not answer in time") from None
        reason = getattr(error.reason, "strerror", None) or error.reason
        raise Unreachable(f"cannot be reached ({reason})") from None
    except TimeoutError:
        raise Trouble("fell silent") from None
    # Not OSError: a full disk on this side is nothing that another request could mend.
    except (HTTPException, ConnectionError, SSLError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise Trouble(f"broke off ({reason})") from None


def _follow(address: str, begin: int, timeout: float) -> HTTPResponse:
    """Return the response at the end of the redirects.

    urllib would follow them too, but it reads all that a redirect carries, however much that is.
    """
    headers = {"User-Agent": "mpfedcl", "Accept-Encoding": "identity"}
    if begin:
        headers["Range"] = f"bytes={begin}-"
    opener = _build_opener()
    for _ in range(MOST_REDIRECTS + 1):
        if urlsplit(address).scheme not in ("http", "https"):
            raise Trouble(f"leads to {address}, but only http and https are followed", final=True)
        response: HTTPResponse = opener.open(Request(address, headers=headers), timeout=timeout)
        if response.status not in _REDIRECTS:
            return response
        response.close()
        location = response.headers.get("Location", "")
        try:
            target = urljoin(address, location)
            is_downgrade = (urlsplit(address).scheme, urlsplit(target).scheme) == ("https", "http")
        except ValueError:
            raise Trouble(f"leads to {location!r}, which is no address", final=True) from None
        if is_downgrade:
            raise Trouble(f"leads from https to the unprotected {target}", final=True)
        address = target
    raise Trouble(f"redirects more than {MOST_REDIRECTS} times", final=True)


def _build_opener() -> OpenerDirector:
    """Return an opener that cannot read files, FTP or data addresses: it has no hands for them."""
    opener = OpenerDirector()
    for handler in (ProxyHandler(), HTTPHandler(), HTTPSHandler()):
        opener.add_handler(handler)
    return opener


def _read_head(response: HTTPResponse, begin: int) -> Reply | None:
    """Return the reply as its headers tell it, or None if it is not from `begin` on."""
    status = response.status
    if status == 416 and begin:
        return None
    if status not in (200, 206):
        is_final = 400 <= status < 500 and status not in _PASSING_STATUSES
        raise Trouble(f"answered {status} {response.reason}".rstrip(), is_final)
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise Trouble(f"sends the file in the encoding {encoding}", final=True)
    if status == 206:
        match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if match is None or begin == 0:
            return None
        first, last, size = (int(number) for number in match.groups())
        return Reply(begin, size, response) if (first, last + 1) == (begin, size) else None
    length = response.headers.get("Content-Length", "")
    return Reply(0, int(length) if length.isdecimal() else None, response)
