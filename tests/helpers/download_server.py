"""A real HTTP server on this machine that cuts, stalls, lies and redirects as it is told."""

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Gives the next answer that its server has for a path; the last one stays."""

    server: "BrokenServer"
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.close_connection = True
        with self.server.lock:
            self.server.requests.append((self.path, self.headers.get("Range")))
            answers = self.server.answers[self.path]
            answer = answers.pop(0) if len(answers) > 1 else answers[0]
        # The client may have had enough, which is what some tests are about.
        with suppress(BrokenPipeError, ConnectionResetError):
            answer(self)

    def send_head(self, status: int, **headers: object) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.send_header("Connection", "close")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- the base's name
        pass


class BrokenServer(ThreadingHTTPServer):
    """Answers by path, and what was asked: path and Range header."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.answers: dict[str, list[Answer]] = {}
        self.requests: list[tuple[str, str | None]] = []

    def address(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"

    def answer(self, path: str, *answers: Answer) -> str:
        self.answers[path] = list(answers)
        return self.address(path)

    @property
    def ranges(self) -> list[str | None]:
        return [asked for _, asked in self.requests]


@contextmanager
def run_server() -> Iterator[BrokenServer]:
    server = BrokenServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def free_port() -> int:
    """Return a port without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve(body: bytes, ranges: bool = True, cut: int | None = None) -> Answer:
    """Send a body, or the requested range; `cut` closes the connection after that many bytes."""

    def answer(handler: Handler) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range") or "")
        begin = int(asked[1]) if asked and ranges else 0
        if begin >= len(body) > 0:
            handler.send_head(416, Content_Range=f"bytes */{len(body)}", Content_Length=0)
            return
        rest = body[begin:]
        if asked and ranges:
            whole = f"bytes {begin}-{len(body) - 1}/{len(body)}"
            handler.send_head(206, Content_Length=len(rest), Content_Range=whole)
        else:
            handler.send_head(200, Content_Length=len(rest))
        handler.wfile.write(rest if cut is None else rest[:cut])

    return answer


def answer_range(body: bytes, content_range: str) -> Answer:
    """Claim a range, whatever was asked for, and send a body with it."""

    def answer(handler: Handler) -> None:
        handler.send_head(206, Content_Length=len(body), Content_Range=content_range)
        handler.wfile.write(body)

    return answer


def send(status: int, body: bytes = b"", **headers: object) -> Answer:
    """Send a status, headers and a body, with no Content-Length but a given one."""

    def answer(handler: Handler) -> None:
        handler.send_head(status, **headers)
        handler.wfile.write(body)

    return answer


def trickle(body: bytes, pause: float) -> Answer:
    """Send a byte at a time, never quite silent."""

    def answer(handler: Handler) -> None:
        handler.send_head(200, Content_Length=len(body))
        for byte in body:
            handler.wfile.write(bytes((byte,)))
            handler.wfile.flush()
            time.sleep(pause)

    return answer


def stall(body: bytes, after: int, seconds: float) -> Answer:
    """Send some bytes and then nothing for a while."""

    def answer(handler: Handler) -> None:
        handler.send_head(200, Content_Length=len(body))
        handler.wfile.write(body[:after])
        handler.wfile.flush()
        time.sleep(seconds)

    return answer
