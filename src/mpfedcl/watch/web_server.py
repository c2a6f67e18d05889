"""From a folder and a port to a server that runs until Ctrl-C."""

import asyncio
import ipaddress
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn

from mpfedcl.errors import InvalidInput
from mpfedcl.watch.event_stream import EventStream
from mpfedcl.watch.watched_runs import WatchedRuns
from mpfedcl.watch.web_app import make_app

_SHUTDOWN_SECONDS = 2
"""What answers under way have to end."""


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
