"""The programs of a federation: commands, processes, and the connection to the server."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import write_atomically
from mpfedcl.core.processes import PARENT
from mpfedcl.network.flower.interfaces import SUPPORTED
from mpfedcl.network.setup.folders import ClientFolder, ServerFolder

_CONNECTION = "address.json"
LAST_WORDS = "cannot continue: "
"""Prefix of the final error message of a client's process."""
_START_SECONDS = 60.0
_END_SECONDS = 20.0


def require_flower(module: str | None = None) -> None:
    """Raise `InvalidInput` if Flower is missing, not supported, or fails to load in a module."""
    if importlib.util.find_spec("flwr") is None:
        raise InvalidInput(
            "Flower is not installed; a federation needs pip install 'mpfedcl[flower]'."
        )
    found = importlib.metadata.version("flwr")
    if ".".join(found.split(".")[:2]) not in SUPPORTED:
        raise InvalidInput(
            f"Flower {found} is installed; mpfedcl works with {' and '.join(SUPPORTED)}: "
            "pip install 'mpfedcl[flower]'."
        )
    try:
        if module is not None:
            importlib.import_module(module)
    # A broken installation may fail in any way during the import.
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
        raise InvalidInput(
            f"Flower is installed, but it cannot be loaded ({why}); "
            "pip install --force-reinstall 'mpfedcl[flower]' installs what it needs."
        ) from None


def environment(flower_home: Path) -> dict[str, str]:
    """Return the environment of a federation's programs, without telemetry."""
    return {
        **os.environ,
        "FLWR_HOME": str(flower_home.resolve()),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def superlink_command(folder: ServerFolder, bind: str) -> list[str]:
    """Return the command that starts the server."""
    return [
        *(sys.executable, "-m", "mpfedcl.network.flower.superlink", str(folder.secret)),
        *("--host", bind, "--port", str(folder.port)),
        # Flower must not start the app that is submitted with a run: it may contain any code.
        *("--isolation", "process"),
        "--disable-runtime-dependency-installation",
        *("--ssl-ca-certfile", str(folder.authority)),
        *("--ssl-certfile", str(folder.server / "server.pem")),
        *("--ssl-keyfile", str(folder.server / "server.key")),
        "--enable-supernode-auth",
        *("--database", str(folder.server / "state.db")),
    ]


def executor_command(folder: ServerFolder | ClientFolder) -> list[str]:
    """Return the command that starts a client's process, or the server's for the next run."""
    is_client = isinstance(folder, ClientFolder)
    module = "mpfedcl.network.flower.client" if is_client else "mpfedcl.flower_app"
    return [sys.executable, "-m", module, str(folder.root)]


def local_address(bind: str) -> str:
    """Return the address of a server as seen from this machine."""
    return "127.0.0.1" if bind in ("0.0.0.0", "localhost", "::") else bind


def write_connection(folder: ServerFolder, bind: str) -> None:
    """Store how the programs of this machine reach the server."""
    content = {"address": f"{local_address(bind)}:{folder.port}"}
    write_atomically(folder.server / _CONNECTION, json.dumps(content).encode())


def read_address(folder: ServerFolder) -> str:
    """Return the server's address on this machine."""
    path = folder.server / _CONNECTION
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(path.read_bytes())["address"])
    raise InvalidInput(
        f"{path} has no address of the server; the server must have been started "
        f"(mpfedcl federation server {folder.root})."
    )


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
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            # The program ends with the command that started it, even if that is killed.
            env={**env, PARENT: str(os.getpid())},
            stdout=subprocess.PIPE if reads else file,
            stderr=file,
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """Terminate a program and its children, and kill the rest after a timeout."""
    for signal_number, seconds in ((signal.SIGTERM, _END_SECONDS), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal_number)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            process.poll()
            try:
                os.killpg(process.pid, 0)
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
    raise InvalidInput(f"the server did not start; {log} ends with: {end_of_log(log)}.")


def end_of_log(log: Path) -> str:
    """Return the last line of a log, which is the error of a final traceback."""
    with contextlib.suppress(OSError):
        if text := log.read_text(errors="replace").strip():
            return text.splitlines()[-1].rstrip(".")[-300:]
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
