"""Programs as processes of this machine: started, waited for, and ended with all they started."""

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
"""More lines after a traceback, and it is not what a log ends with."""


@contextmanager
def running(
    command: list[str], env: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program with its own children, its output to a file; end all of them at the end."""
    process = start(command, env, log)
    try:
        yield process
    finally:
        end(process)


def start(
    command: list[str], env: Mapping[str, str], log: Path, *, reads: bool = False
) -> subprocess.Popen[bytes]:
    """Start a program in a process group of its own, its output to a file or to be read."""
    log.parent.mkdir(parents=True, exist_ok=True)
    # Whoever kills the command that started it must not leave it behind (Linux alone can).
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
    """Ask a program and its children to end; those that do not are ended."""
    end_group(process.pid, process.poll)


def end_group(number: int, poll: Callable[[], object] = lambda: None) -> None:
    """Ask a process group to end; whatever is left of it then is ended."""
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
    """Wait until a program answers at a port; say in one sentence if it never does."""
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection((host, port), 1):
            return
        time.sleep(0.1)
    raise InvalidInput(f"the server did not start; {log} says why: {end_of_log(log).rstrip('.')}.")


def end_of_log(log: Path) -> str:
    """Return the end of a log on one line; of a traceback what it ends with: half tells nothing."""
    with contextlib.suppress(OSError):
        text = log.read_text(errors="replace").rstrip()
        last = text.rpartition(_TRACEBACK)[2] if _TRACEBACK in text else ""
        # Lines of code are indented; what went wrong is not.
        said = [line for line in last.splitlines()[1:] if line and not line.startswith(" ")]
        is_end = 0 < len(said) <= _LINES_OF_AN_ERROR
        return " ".join((" ".join(said) if is_end else text).split())[-300:]
    return "it is empty"


def free_port() -> int:
    """Return a port of this machine that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def is_port_in_use(host: str, port: int) -> bool:
    """Tell whether somebody listens at a port."""
    try:
        socket.create_connection((host, port), 1).close()
    except TimeoutError:
        # Nobody refuses: somebody who is busy.
        return True
    except OSError:
        return False
    return True
