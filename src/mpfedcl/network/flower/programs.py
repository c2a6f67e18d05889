"""Flower's own programs, started with the right flags, and ended again."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli_w

from mpfedcl.errors import InvalidInput
from mpfedcl.files import write_atomically
from mpfedcl.network.setup.folders import ClientFolder, ServerFolder

_CONNECTION = "mpfedcl"
"""What the server is called in Flower's own configuration."""
_POLL = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"
"""Seconds between two looks of Flower for something to start."""
_START_SECONDS = 60.0
_END_SECONDS = 20.0
_ORPHAN_SECONDS = 10.0
_ASK_SECONDS = 120.0


def environment(flower_home: Path, *, looks_often: bool = False) -> dict[str, str]:
    """Return the environment of Flower's programs: nothing calls home, nothing is installed.

    A client looks often for messages that have come, so that they are worked on soon; a server
    has a run to start once in a while.
    """
    here = str(Path(sys.executable).parent)
    return {
        **os.environ,
        # Flower starts its helpers by name.
        "PATH": f"{here}{os.pathsep}{os.environ.get('PATH', '')}",
        "FLWR_HOME": str(flower_home.resolve()),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        _POLL: os.environ.get(_POLL, "0.5" if looks_often else "1"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def superlink_command(folder: ServerFolder, bind: str, *, is_insecure: bool) -> list[str]:
    """Return the command that starts the server."""
    command = [
        program("flower-superlink"),
        *("--host", bind, "--port", str(folder.port)),
        "--disable-runtime-dependency-installation",
    ]
    if is_insecure:
        # Other nodes than those with keys: nothing of what they are may be kept for later.
        return [*command, "--insecure"]
    return [
        *command,
        *("--ssl-ca-certfile", str(folder.authority)),
        *("--ssl-certfile", str(folder.server / "server.pem")),
        *("--ssl-keyfile", str(folder.server / "server.key")),
        "--enable-supernode-auth",
        *("--database", str(folder.server / "state.db")),
    ]


def supernode_command(
    client: ClientFolder, node_config: Path, server: str, *, is_insecure: bool
) -> list[str]:
    """Return the command that starts a client."""
    command = [
        program("flower-supernode"),
        *("--superlink", server),
        *("--node-config", str(node_config)),
        # Several clients on one machine must not want the same port.
        *("--port", str(free_port())),
    ]
    if is_insecure:
        return [*command, "--insecure"]
    return [
        *command,
        *("--root-certificates", str(client.authority)),
        *("--auth-supernode-private-key", str(client.key)),
    ]


def resident_command(node_config: Path, socket: Path) -> list[str]:
    """Return the command that starts the process in which a client's data stay."""
    return [sys.executable, "-m", "mpfedcl.network.client.service", str(node_config), str(socket)]


def reach(bind: str) -> str:
    """Return the address under which this machine itself reaches a server."""
    return "127.0.0.1" if bind in ("0.0.0.0", "localhost", "::") else bind


def write_connection(folder: ServerFolder, bind: str, *, is_insecure: bool) -> None:
    """Tell Flower's own command where the server is: on this machine."""
    place: dict[str, Any] = {"address": f"{reach(bind)}:{folder.port}"}
    if is_insecure:
        place["insecure"] = True
    else:
        place["root-certificates"] = str(folder.authority.resolve())
    folder.flower_home.mkdir(parents=True, exist_ok=True)
    content = {"superlink": {"default": _CONNECTION, _CONNECTION: place}}
    write_atomically(folder.flower_home / "config.toml", tomli_w.dumps(content).encode())


def is_running(folder: ServerFolder) -> bool:
    """Tell whether the server answers where Flower's configuration says that it is."""
    config = tomllib.loads((folder.flower_home / "config.toml").read_text(encoding="utf-8"))
    host, _, port = config["superlink"][_CONNECTION]["address"].rpartition(":")
    return is_taken(host, int(port))


def register_clients(folder: ServerFolder) -> list[str]:
    """Let the keys of all clients in; return the names of those that were not in before."""
    known = {node.get("name") for node in _ask_flower(folder, "supernode", "list")["nodes"]}
    new = [name for name in folder.clients if name not in known]
    for name in new:
        key = str(folder.public_key(name))
        try:
            _ask_flower(folder, "supernode", "register", key, "--name", name)
        except InvalidInput as error:
            # Flower does not list all that it knows at any moment.
            if "already in use" not in str(error):
                raise
    return new


def submit(folder: ServerFolder, order: Mapping[str, str]) -> int:
    """Hand a run to the server; return Flower's number for it."""
    config = folder.server / "run-config.toml"
    write_atomically(config, tomli_w.dumps(dict(order)).encode())
    said = _ask_flower(folder, "run", str(folder.app), "--run-config", str(config))
    return int(said["run-id"])


def stop_run(folder: ServerFolder, number: int) -> None:
    """End a run at once."""
    _ask_flower(folder, "stop", str(number))


def _ask_flower(folder: ServerFolder, *words: str) -> dict[str, Any]:
    """Call Flower's own command and return what it says as JSON."""
    flags = ["--format", "json"]
    # `flwr run APP SUPERLINK`, but `flwr supernode list SUPERLINK`: the server's name comes last.
    count = {"run": 2, "stop": 2, "supernode": 3 if "register" in words else 2}[words[0]]
    ordered = [*words[:count], _CONNECTION, *words[count:], *flags]
    try:
        done = subprocess.run(
            [program("flwr"), *ordered],
            env=environment(folder.flower_home),
            capture_output=True,
            text=True,
            timeout=_ASK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InvalidInput(
            f"the server of {folder.root} did not answer `flwr {' '.join(words[:2])}` within "
            f"{_ASK_SECONDS:g} s; it must be running (mpfedcl federation server {folder.root})."
        ) from None
    # Flower may say other things before the JSON.
    start = done.stdout.find("{")
    with contextlib.suppress(ValueError):
        said: dict[str, Any] = json.loads(done.stdout[start:]) if start >= 0 else {}
        if said.get("success", False):
            return said
    why = " ".join((done.stdout[start:] + done.stderr).split())[-400:]
    raise InvalidInput(
        f"the server of {folder.root} did not take `flwr {' '.join(words[:2])}`; it must "
        f"be running (mpfedcl federation server {folder.root}): {why}"
    )


@contextmanager
def running(
    command: list[str], env: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program with its own children, its words to a file; end all of them at the end."""
    process = start(command, env, log)
    try:
        yield process
    finally:
        end(process)


def start(command: list[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a program in a process group of its own, its words to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    # Whoever kills the command that started it must not leave it behind (Linux alone can).
    follow = [found, "--pdeathsig", "TERM"] if (found := shutil.which("setpriv")) else []
    with log.open("ab") as file:
        return subprocess.Popen(
            [*follow, *command], env=dict(env), stdout=file, stderr=file, start_new_session=True
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask a program and its children to end; those that do not are ended."""
    _end_group(process.pid, process.poll)


def find_starters(process: subprocess.Popen[bytes]) -> set[int]:
    """Return those of Flower's helpers that its server has put into groups of their own (Linux)."""
    found = set()
    for place in Path(f"/proc/{process.pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found |= {int(each) for each in place.read_text().split() if _is_starter(int(each))}
    return found


def end_starters(numbers: Collection[int]) -> None:
    """End helpers that have outlived their server: they would go over to the next one."""
    for number in numbers:
        if _is_starter(number):
            _end_group(number, lambda: None)


def end_orphans(flower_home: str) -> None:
    """End what was started for a client whose own program was killed (Linux).

    Flower's processes notice that themselves, but can hang on their way out.
    """
    # Who was just being started is there by then.
    time.sleep(0.5)
    # Those of now alone: a client that is started again has the same folder.
    orphans = _started_for(flower_home)
    deadline = time.monotonic() + _ORPHAN_SECONDS
    while (orphans := orphans & _started_for(flower_home)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for number in orphans:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def _started_for(flower_home: str) -> set[int]:
    """Return the processes whose Flower folder this is, without this one."""
    found = set()
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"FLWR_HOME={flower_home}".encode() in (place / "environ").read_bytes().split(b"\0"):
                found.add(int(place.name))
    return found - {os.getpid()}


def _is_starter(number: int) -> bool:
    with contextlib.suppress(OSError):
        return b"flower-superexec" in Path(f"/proc/{number}/cmdline").read_bytes()
    return False


def _end_group(number: int, look: Callable[[], object]) -> None:
    for signal_number, seconds in ((signal.SIGTERM, _END_SECONDS), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(number, signal_number)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            look()
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
    raise InvalidInput(f"the server did not start; {log} says why: {last_words(log)}")


def last_words(log: Path) -> str:
    """Return the end of a log on one line."""
    with contextlib.suppress(OSError):
        return " ".join(log.read_text(errors="replace").split())[-300:]
    return "it is empty"


def free_port() -> int:
    """Return a port of this machine that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def is_taken(host: str, port: int) -> bool:
    """Tell whether somebody listens at a port."""
    try:
        socket.create_connection((host, port), 1).close()
    except TimeoutError:
        # Nobody refuses: somebody who is busy.
        return True
    except OSError:
        return False
    return True


def program(name: str) -> str:
    """Return where one of Flower's programs is."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.is_file() else shutil.which(name)
    if not found:
        raise InvalidInput(
            f"{name} is not installed; a federation needs pip install 'mpfedcl[flower]'."
        )
    return found
