"""Health and metrics of a server, over HTTP for monitoring: /healthz and /metrics.

Metrics are numbers in Prometheus' text format, without names of clients.
"""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mpfedcl.core.errors import InvalidInput

_MOST_CONNECTIONS = 8
"""Connections served at the same time; others are closed at once."""
_READ_SECONDS, _CONNECTION_SECONDS = 2.0, 5.0
"""Time limits of a read, and of a connection from its first to its last byte."""

Metric = tuple[str, str, float | None]
"""Type, help and value; None if it is not known."""


def to_text(metrics: Mapping[str, Metric]) -> str:
    """Return metrics in Prometheus' text format; unknown values are left out."""
    lines = []
    for name, (kind, words, value) in metrics.items():
        if value is not None:
            lines += [f"# HELP mpfedcl_{name} {words}", f"# TYPE mpfedcl_{name} {kind}"]
            lines.append(f"mpfedcl_{name} {value!r}")
    return "\n".join(lines) + "\n"


@contextmanager
def serving_metrics(
    bind: str, port: int, read: Callable[[], Mapping[str, Metric]], is_healthy: Callable[[], bool]
) -> Iterator[int]:
    """Serve metrics in a thread; yield the port."""

    class Handler(_Handler):
        def answer(self) -> tuple[int, str]:
            if self.path == "/metrics":
                return 200, to_text(read())
            if self.path == "/healthz":
                return (200, "ok\n") if is_healthy() else (503, "not healthy\n")
            return super().answer()

    try:
        server = _Server((bind, port), Handler)
    except OSError as error:
        raise InvalidInput(
            f"metrics_port is {port}, which cannot be used on {bind} "
            f"({error.strerror or error}); it must be free."
        ) from None
    with server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()
            thread.join()


class _Server(ThreadingHTTPServer):
    """Serves a few connections at a time, each for a few seconds."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(self, address: tuple[str, int], handler: type["_Handler"]) -> None:
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread, unless too many are open."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection within its time limit."""
        limit = threading.Timer(_CONNECTION_SECONDS, _cut, [request])
        limit.daemon = True
        limit.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            limit.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore broken connections."""


class _Handler(BaseHTTPRequestHandler):
    timeout = _READ_SECONDS
    server_version, sys_version = "mpfedcl", ""

    def answer(self) -> tuple[int, str]:
        """Return code and text of an answer."""
        return 404, "not found\n"

    def do_GET(self) -> None:
        """Answer without reading a body."""
        code, text = self.answer()
        content = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 -- http.server's name
        """Log nothing, because requests come every few seconds."""


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
