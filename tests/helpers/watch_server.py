"""A real `mpfedcl watch` over a folder, and what to ask it."""

import http.client
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from command_processes import CommandProcess

Json = dict[str, Any]


@dataclass(frozen=True)
class Server:
    """A server that runs."""

    folder: Path
    port: int
    process: CommandProcess

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def ask(
        self, path: str, method: str = "GET", headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Send one request, its path as it stands; return status, headers and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in ({"Host": f"localhost:{self.port}"} | (headers or {})).items():
                connection.putheader(name, value)
            connection.endheaders()
            answer = connection.getresponse()
            names = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, names, answer.read()
        finally:
            connection.close()

    def interrupt(self) -> int:
        """Press Ctrl-C; return the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(20)


@contextmanager
def watched(folder: Path, *words: object) -> Iterator[Server]:
    """Run `mpfedcl watch` on a free port."""
    process = CommandProcess(["watch", folder, "--port", 0, *words], Path.cwd())
    try:
        said = process.first_line()
        found = re.search(r"http://\S+:(\d+)/", said)
        assert found, said or process.communicate()[1]
        yield Server(folder, int(found[1]), process)
    finally:
        process.kill()
        process.communicate()
