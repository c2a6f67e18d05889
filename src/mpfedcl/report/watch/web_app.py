"""The live page's web server: it only reads, and no request names a file."""

import asyncio
import hashlib
import ipaddress
import re
import signal
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.json_files import Json
from mpfedcl.report.document import compare_runs
from mpfedcl.report.html import (
    Markup,
    block,
    page_style,
    read_page_file,
    sentence,
    show_costs,
    show_rounds,
    show_table,
    tag,
)
from mpfedcl.report.run import describe_run
from mpfedcl.report.watch.files import MOST_FOLDERS, find_locked_inodes, find_runs
from mpfedcl.report.watch.run_list import RunListEntry, show_list
from mpfedcl.report.watch.run_page import RunPage

_SHUTDOWN_SECONDS = 2
_SECONDS_BETWEEN_SEARCHES = 1.0
"""Between two reads of all runs; those that are running are read at every request."""
_MOST_OPEN = 24
MOST_COMPARED = 20
_MOST_ROWS = 5000
_HOST = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9.-]+))(?::[0-9]{1,5})?")
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def open_listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an unused port."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise InvalidInput(
            f"host is {host!r}; it must be an address of this machine, such as 127.0.0.1 or ::1."
        ) from None
    if not 0 <= port <= 65535:
        raise InvalidInput(f"port is {port}; it must be from 0 (any that is free) to 65535.")
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    # A server that has just ended leaves its port waiting.
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((str(address), port))
        found.listen(128)
    except OSError as error:
        found.close()
        raise InvalidInput(
            f"port is {port}; it cannot be used on {host} ({error.strerror}): give another by "
            "--port, or 0 for any that is free."
        ) from None
    return found


def serve(folder: Path, listener: socket.socket, on_start: Callable[[], None]) -> None:
    """Serve the runs below a folder until Ctrl-C."""
    asyncio.run(_serve(folder, listener, on_start))


async def _serve(folder: Path, listener: socket.socket, on_start: Callable[[], None]) -> None:
    config = uvicorn.Config(
        make_app(WatchedRuns(folder)),
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        http="h11",
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
    )
    await _Server(config, on_start).serve(sockets=[listener])


class _Server(uvicorn.Server):
    """Tells when it has started, and ends quietly at Ctrl-C."""

    def __init__(self, config: uvicorn.Config, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Call `on_start` once the page can be opened."""
        await super().startup(sockets)
        if self.started:
            self._on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End at the first Ctrl-C, at once at the second."""
        # The base class would raise the signal again after its end.
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


class WatchedRuns:
    """All runs below a folder, read once however many pages are open. For one thread only."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runs: dict[str, RunListEntry] = {}
        self.open_pages: OrderedDict[str, RunPage] = OrderedDict()
        self.searched_at = float("-inf")
        self._search_seconds = 0.0
        self._is_too_large = False
        self._compared: OrderedDict[tuple[str, ...], tuple[Json, Markup]] = OrderedDict()

    def refresh(self) -> tuple[list[str], list[str]]:
        """Read what is new; return the ids of changed runs and of deleted ones."""
        began = time.monotonic()
        # A folder that takes long to search is searched less often.
        is_due = began - self.searched_at >= max(
            _SECONDS_BETWEEN_SEARCHES, 20 * self._search_seconds
        )
        gone = self.find_runs() if is_due else []
        locked = find_locked_inodes()
        changed = [
            name
            for name, run in self.runs.items()
            if (is_due or run.is_active or not run.entry) and _refresh_entry(run, locked)
        ]
        if is_due:
            self.searched_at = began
            # Measured when nothing has changed; the first time everything has.
            self._search_seconds = self._search_seconds if changed else time.monotonic() - began
        return changed, gone

    def find_runs(self) -> list[str]:
        """Search for runs below the root; return those that were deleted."""
        places, self._is_too_large = find_runs(self.root)
        found = {place.id: place for place in places}
        gone = [name for name in self.runs if name not in found]
        for name in gone:
            del self.runs[name]
            self.open_pages.pop(name, None)
        for name, place in found.items():
            if name not in self.runs:
                self.runs[name] = RunListEntry(place)
        return gone

    def show_list(self, words: str, state: str, most: int) -> Markup:
        """Return the list of the runs that match."""
        self.refresh()
        too_many = f"There are more than {MOST_FOLDERS:,} folders; runs beyond them are not shown."
        entries = [run.entry for run in self.runs.values() if run.entry]
        note = too_many if self._is_too_large else ""
        return show_list(entries, words=words, state=state, most=most, note=note)

    def show_run(self, name: str) -> Markup | None:
        """Return the page of a run; None if there is no such run."""
        self.refresh()
        opened = self.open_run(name)
        return None if opened is None else opened.show(self.runs[name].entry, str(self.root))

    def compare(self, ids: Sequence[str]) -> Json:
        """Return chosen runs side by side: groups, tables, troubles; unknown ones are left out."""
        found, troubles = [], []
        for name in dict.fromkeys(ids[:MOST_COMPARED]):
            if (opened := self.open_run(name)) is None:
                continue
            try:
                if opened.records is None or not opened.records.rounds:
                    raise InvalidInput(f"{self.runs[name].location.path.name} has no round yet.")
                found.append((opened.records, describe_run(opened.records)))
            except InvalidInput as error:
                troubles.append(str(error))
        told = compare_runs(found) if found else {"groups": [], "tables": []}
        return told | {"troubles": troubles}

    def show_comparison(self, ids: Sequence[str]) -> Markup:
        """Return the page of chosen runs, made again when one of them has changed."""
        self.refresh()
        opened = {name: self.open_run(name) for name in ids[:MOST_COMPARED]}
        versions = {name: page.version for name, page in opened.items() if page}
        key = tuple(versions)
        if key in self._compared and self._compared[key][0] == versions:
            return self._compared[key][1]
        shown = self._show_compared(ids)
        self._compared[key] = versions, shown
        while len(self._compared) > _MOST_OPEN:
            self._compared.popitem(last=False)
        return shown

    def _show_compared(self, ids: Sequence[str]) -> Markup:
        entries = [self.runs[name].entry for name in ids if name in self.runs]
        links = [
            tag(
                "li",
                tag("a", each["name"], href=f"#run={each['id']}"),
                f" {each['state']}, round {each['round']}",
            )
            for each in entries
        ]
        found = self.compare(ids)
        parts = [sentence(each) for each in found["troubles"]]
        if found["groups"]:
            parts += [
                block("Result", [show_table(each) for each in found["tables"][:2]], key="result"),
                show_rounds(found["groups"], key="rounds"),
                show_costs(found["groups"], key="costs"),
            ]
        else:
            parts.append(sentence("None of these runs can be shown."))
        about = "Runs that differ only in their seed are one line with a band."
        return tag(
            "div",
            tag("p", about, class_="about"),
            tag("ul", links, id_="compared"),
            tag("div", parts, class_="flow"),
            data_title=f"{len(entries)} runs compared",
        )

    def open_run(self, name: str) -> RunPage | None:
        """Return the page of a run with its newest records; None if there is no such run."""
        if name not in self.runs:
            return None
        if name not in self.open_pages:
            self.open_pages[name] = RunPage(self.runs[name].location)
        self.open_pages.move_to_end(name)
        while len(self.open_pages) > _MOST_OPEN:
            self.open_pages.popitem(last=False)
        self.open_pages[name].refresh()
        return self.open_pages[name]


def _refresh_entry(run: RunListEntry, locked: set[int]) -> bool:
    try:
        return run.refresh(locked)
    # A damaged run must not affect the others.
    except Exception as error:
        return run.mark_damaged(error)


def make_app(runs: WatchedRuns) -> Starlette:
    """Return the application that shows the runs."""
    # One thread: requests wait their turn, and the runs need no locks.
    thread = ThreadPoolExecutor(1, thread_name_prefix="watched-runs")

    async def answer(request: Request, show: Callable[[], Markup | None]) -> Response:
        shown = await asyncio.get_running_loop().run_in_executor(thread, show)
        if shown is None:
            return PlainTextResponse("There is no such run.\n", 404)
        content = shown.encode("utf-8", "replace")
        tag_of_content = f'"{hashlib.sha256(content).hexdigest()[:24]}"'
        headers = {"ETag": tag_of_content}
        if request.headers.get("if-none-match") == tag_of_content:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type="text/html", headers=headers)

    async def list_runs(request: Request) -> Response:
        asked = request.query_params
        most = asked.get("most", "300")
        shown = min(int(most), _MOST_ROWS) if most.isascii() and most.isdigit() else 300
        state, words = asked.get("state", ""), asked.get("words", "")
        return await answer(request, lambda: runs.show_list(words[:200], state, shown))

    async def show_run(request: Request) -> Response:
        return await answer(request, lambda: runs.show_run(request.query_params.get("id", "")))

    async def compare(request: Request) -> Response:
        ids = request.query_params.getlist("id")
        return await answer(request, lambda: runs.show_comparison(ids))

    return Starlette(
        routes=[
            *(Route(address, page) for address, page in _static_pages(runs).items()),
            Route("/runs", list_runs),
            Route("/run", show_run),
            Route("/compare", compare),
        ],
        middleware=[Middleware(ReadOnlyMiddleware)],
    )


class ReadOnlyMiddleware:
    """Answers GET and HEAD for an address of this machine, with restrictive headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reject a request, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        app = self._refuse(scope) or self._app
        # A browser may close the connection at any time.
        with suppress(OSError):
            await app(scope, receive, send_with_headers)

    def _refuse(self, scope: Scope) -> ASGIApp | None:
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("Only reading is allowed.\n", 405, {"Allow": "GET, HEAD"})
        if not all(is_local_host(host) for host in Headers(scope=scope).getlist("host") or [""]):
            return PlainTextResponse("Use localhost or an address, not a host name.\n", 421)
        return None


def is_local_host(host: str) -> bool:
    """Return whether a Host header is an address or localhost.

    A foreign page can let its own host name point to this machine (DNS rebinding) and read the
    answers, but the browser then sends that name.
    """
    found = _HOST.fullmatch(host)
    if found is None:
        return False
    if found["name"] is not None and found["name"].lower() == "localhost":
        return True
    try:
        return bool(
            ipaddress.IPv6Address(found["six"])
            if found["six"] is not None
            else ipaddress.IPv4Address(found["name"])
        )
    except ValueError:
        return False


def _static_pages(runs: WatchedRuns) -> dict[str, Response]:
    """Return the parts of the page by address, read once."""
    read_own = partial(read_page_file, package="mpfedcl.report.watch")
    footer = tag(
        "p",
        f"mpfedcl {version('mpfedcl')}, watching ",
        tag("span", str(runs.root), class_="folder"),
        ". This page only reads. Accuracies are of the last evaluated round, not of the best one.",
    )
    page = read_own("watch.html").replace("@@BOTTOM@@", footer)
    return {
        "/": Response(page.encode("utf-8", "replace"), media_type="text/html"),
        "/watch.js": Response(
            f"{read_page_file('page.js')}\n{read_own('watch.js')}", media_type="text/javascript"
        ),
        "/watch.css": Response(f"{page_style()}\n{read_own('watch.css')}", media_type="text/css"),
        "/icon.svg": Response(read_own("icon.svg"), media_type="image/svg+xml"),
    }
