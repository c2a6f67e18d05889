"""Processes of a federation's programs: start, wait, and end with all child processes."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from mpfedcl.core.errors import InvalidInput

_START_SECONDS = 60.0
_END_SECONDS = 20.0
_TRACEBACK = "Traceback (most recent call last):"
_LINES_OF_AN_ERROR = 3
"""With more lines after a traceback, the log does not end with that error."""


@contextmanager
def running(
    command: list[str], env: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program with output to a file; end it and its children on exit."""
    process = start(command, env, log)
    try:
        yield process
    finally:
        end(process)


def start(
    command: list[str], env: Mapping[str, str], log: Path, *, reads: bool = False
) -> subprocess.Popen[bytes]:
    """Start a program in a new process group; with `reads` its stdout is a pipe."""
    log.parent.mkdir(parents=True, exist_ok=True)
    # The program ends with the command that started it, even if that is killed (Linux only).
    follow = [found, "--pdeathsig", "TERM"] if (found := shutil.which("setpriv")) else []
    with log.open("ab") as file:
        return subprocess.Popen(
            [*follow, *command],
            env=dict(env),
            stdout=subprocess.PIPE if reads else file,
            stderr=file,
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """Terminate a program and its children, and kill them after a timeout."""
    end_group(process.pid, process.poll)


def end_group(number: int, poll: Callable[[], object] = lambda: None) -> None:
    """Terminate a process group, and kill the rest after a timeout."""
    for signal_number, seconds in ((signal.SIGTERM, _END_SECONDS), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(number, signal_number)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            poll()
            try:
                os.killpg(number, 0)
            except (ProcessLookupError, PermissionError):
                return
            time.sleep(0.1)


def wait_for_port(process: subprocess.Popen[bytes], host: str, port: int, log: Path) -> None:
    """Wait until a program accepts connections at a port; raise if it does not."""
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection((host, port), 1):
            return
        time.sleep(0.1)
    raise InvalidInput(f"the server did not start; {log} ends with: {end_of_log(log).rstrip('.')}.")


def end_of_log(log: Path) -> str:
    """Return the end of a log on one line: the error of a final traceback, or the last text."""
    with contextlib.suppress(OSError):
        text = log.read_text(errors="replace").rstrip()
        last = text.rpartition(_TRACEBACK)[2] if _TRACEBACK in text else ""
        # In a traceback, code is indented and the error is not.
        said = [line for line in last.splitlines()[1:] if line and not line.startswith(" ")]
        is_end = 0 < len(said) <= _LINES_OF_AN_ERROR
        return " ".join((" ".join(said) if is_end else text).split())[-300:]
    return "it is empty"


def is_port_in_use(host: str, port: int) -> bool:
    """Return whether a program listens at a port."""
    try:
        socket.create_connection((host, port), 1).close()
    except TimeoutError:
        # A free port refuses at once; a timeout means a busy server.
        return True
    except OSError:
        return False
    return True
