"""The web server: a handful of addresses, all to read, none of which names a file."""

import asyncio
import ipaddress
import re
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mpfedcl.core.errors import InvalidInput
from mpfedcl.report.html import SCRIPTS, STYLES, read_page_file
from mpfedcl.report.watch.event_stream import EventStream
from mpfedcl.report.watch.watched_runs import WatchedRuns

_SHUTDOWN_SECONDS = 2
"""What answers under way have to end."""
_OWN_SCRIPTS = ("run_views.js", "run_list.js", "pages.js", "watch.js")
_HOST = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9.-]+))(?::[0-9]{1,5})?")
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
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
    """Return a socket that nobody else has."""
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
    # A server that has just ended leaves its port waiting; that is not somebody else's.
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
    """Show the runs below a folder until the user ends it."""
    asyncio.run(_serve(folder, listener, on_start))


async def _serve(folder: Path, listener: socket.socket, on_start: Callable[[], None]) -> None:
    runs = WatchedRuns(folder)
    events = EventStream(runs)
    # Before anybody asks: the first page then opens at once.
    await events.call(runs.refresh)
    config = uvicorn.Config(
        make_app(runs, events),
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        http="h11",
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
    )
    server = _Server(config, events, on_start)
    await server.serve(sockets=[listener])


class _Server(uvicorn.Server):
    """Ends the open streams at Ctrl-C: it would wait for them, and they never end."""

    def __init__(
        self, config: uvicorn.Config, events: EventStream, on_start: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._events = events
        self._on_start = on_start
        self._loop = asyncio.get_running_loop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Tell the user once the page can be opened."""
        await super().startup(sockets)
        if self.started:
            self._on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End at the first Ctrl-C, at once at the second."""
        self._loop.call_soon_threadsafe(self._events.close)
        # Not the server's own way: it raises the signal again after its end.
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


def make_app(runs: WatchedRuns, events: EventStream) -> Starlette:
    """Return the application that shows the runs."""

    async def show_run(request: Request) -> Response:
        return _json(await events.call(runs.describe, request.query_params.get("id", "")))

    async def show_map(request: Request) -> Response:
        return _json(await events.call(runs.describe_map, request.query_params.get("id", "")))

    async def compare(request: Request) -> Response:
        return _json(await events.call(runs.compare, request.query_params.getlist("id")))

    async def listen(request: Request) -> Response:
        kind = "text/event-stream"
        if request.method == "HEAD":
            return Response(media_type=kind)
        return StreamingResponse(events.stream(), media_type=kind)

    @asynccontextmanager
    async def refresh_while_running(_: Starlette) -> AsyncIterator[None]:
        refreshing = asyncio.create_task(events.run())
        yield
        events.close()
        await refreshing
        events.stop()

    return Starlette(
        routes=[
            *(Route(address, page) for address, page in _static_pages().items()),
            Route("/events", listen),
            Route("/run", show_run),
            Route("/map", show_map),
            Route("/compare", compare),
        ],
        middleware=[Middleware(ReadOnlyMiddleware)],
        lifespan=refresh_while_running,
    )


class ReadOnlyMiddleware:
    """Answers GET and HEAD under an address of this machine, with headers that forbid the rest."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or pass on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        app = self._refuse(scope) or self._app
        # A browser that goes away in the midst of an answer is no trouble of ours.
        with suppress(OSError):
            await app(scope, receive, send_with_headers)

    def _refuse(self, scope: Scope) -> ASGIApp | None:
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("Only reading is allowed.\n", 405, {"Allow": "GET, HEAD"})
        if not all(is_local_host(host) for host in Headers(scope=scope).getlist("host") or [""]):
            return PlainTextResponse("Use localhost or an address, not a host name.\n", 421)
        return None


def is_local_host(host: str) -> bool:
    """Tell whether a Host header can come from who opened this very server's address.

    A page elsewhere can have its own name lead to this machine (DNS rebinding) and then read what
    is answered; it cannot make the browser send an address or localhost instead of its name.
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


def _json(content: bytes | None) -> Response:
    if content is None:
        return PlainTextResponse("There is no such run.\n", 404)
    return Response(content, media_type="application/json")


def _static_pages() -> dict[str, Response]:
    """Return the parts of the page by address, read once: no request leads to a file."""
    read_own = partial(read_page_file, package="mpfedcl.report.watch")
    script = "\n".join([*map(read_page_file, SCRIPTS), *map(read_own, _OWN_SCRIPTS)])
    style = "\n".join([*map(read_page_file, STYLES), read_own("watch.css")])
    return {
        "/": Response(read_own("watch.html"), media_type="text/html"),
        "/watch.js": Response(script, media_type="text/javascript"),
        "/watch.css": Response(style, media_type="text/css"),
        "/icon.svg": Response(read_own("icon.svg"), media_type="image/svg+xml"),
    }
