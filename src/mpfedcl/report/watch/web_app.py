"""The web server of the live page. It only reads; no request names a file."""

import asyncio
import hashlib
import ipaddress
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from mpfedcl.core.errors import InvalidInput
from mpfedcl.report.html import Markup, read_page_file, tag
from mpfedcl.report.watch.pages import show_comparison, show_list, show_run
from mpfedcl.report.watch.runs import WatchedRuns

_SHUTDOWN_SECONDS = 2
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
    try:
        return socket.create_server((str(address), port), family=family, backlog=128)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise InvalidInput(
            f"port is {port}; it cannot be used on {host} ({reason}): give another by "
            "--port, or 0 for any that is free."
        ) from None


def serve(folder: Path, listener: socket.socket) -> None:
    """Serve the runs below a folder until Ctrl-C."""
    config = uvicorn.Config(
        make_app(WatchedRuns(folder)),
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        http="h11",
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
    )
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])


def make_app(runs: WatchedRuns) -> Starlette:
    """Return the application that shows the runs."""
    # One thread: requests wait their turn, and the runs need no locks.
    thread = ThreadPoolExecutor(1, thread_name_prefix="watched-runs")

    async def answer(request: Request, show: Callable[[], Markup | None]) -> Response:
        def refresh_and_show() -> Markup | None:
            runs.refresh()
            return show()

        shown = await asyncio.get_running_loop().run_in_executor(thread, refresh_and_show)
        if shown is None:
            return PlainTextResponse("There is no such run.\n", 404)
        content = shown.encode("utf-8", "replace")
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()[:24]}"'}
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type="text/html", headers=headers)

    async def answer_list(request: Request) -> Response:
        words = request.query_params.get("words", "")[:200]
        return await answer(request, partial(show_list, runs, words))

    async def answer_run(request: Request) -> Response:
        name = request.query_params.get("id", "")
        return await answer(request, partial(show_run, runs, name))

    async def answer_comparison(request: Request) -> Response:
        ids = request.query_params.getlist("id")
        return await answer(request, partial(show_comparison, runs, ids))

    return Starlette(
        routes=[
            *(Route(path, page, methods=["GET"]) for path, page in _static_pages(runs).items()),
            Route("/runs", answer_list),
            Route("/run", answer_run),
            Route("/compare", answer_comparison),
        ],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=_restrict)],
    )


async def _restrict(request: Request, answer: RequestResponseEndpoint) -> Response:
    """Answer only requests for an address of this machine, with restrictive headers."""
    hosts = request.headers.getlist("host") or [""]
    if all(map(is_local_host, hosts)):
        response = await answer(request)
    else:
        response = PlainTextResponse("Use localhost or an address, not a host name.\n", 421)
    response.headers.update(_HEADERS)
    return response


def is_local_host(host: str) -> bool:
    """Return whether a Host header is an address or localhost.

    A foreign page can let its own host name point to this machine (DNS rebinding) and read the
    answers, but the browser then sends that name.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return "@" not in host and (name == "localhost" or bool(ipaddress.ip_address(name)))
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
    script = f"{read_page_file('page.js')}\n{read_own('watch.js')}"
    style = f"{read_page_file('page.css')}\n{read_own('watch.css')}"
    return {
        "/": Response(page.encode("utf-8", "replace"), media_type="text/html"),
        "/watch.js": Response(script, media_type="text/javascript"),
        "/watch.css": Response(style, media_type="text/css"),
        "/icon.svg": Response(read_own("icon.svg"), media_type="image/svg+xml"),
    }
