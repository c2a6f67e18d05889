"""Flower's own programs, started with the right flags, and ended again."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import psutil
import tomli_w

from mpfedcl.errors import InvalidInput
from mpfedcl.files import write_atomically
from mpfedcl.network.processes import end_group, free_port, is_port_in_use
from mpfedcl.network.setup.folders import ClientFolder, ServerFolder, write_app

_CONNECTION = "mpfedcl"
"""What the server is called in Flower's own configuration."""
_POLL = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"
"""Seconds between two looks of Flower for something to start."""
_CALL_SECONDS = 120.0


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


def service_command(node_config: Path, socket: Path) -> list[str]:
    """Return the command that starts the process in which a client's data stay."""
    return [sys.executable, "-m", "mpfedcl.network.client.service", str(node_config), str(socket)]


def local_address(bind: str) -> str:
    """Return the address under which this machine itself reaches a server."""
    return "127.0.0.1" if bind in ("0.0.0.0", "localhost", "::") else bind


def write_connection(folder: ServerFolder, bind: str, *, is_insecure: bool) -> None:
    """Tell Flower's own command where the server is: on this machine."""
    place: dict[str, Any] = {"address": f"{local_address(bind)}:{folder.port}"}
    if is_insecure:
        place["insecure"] = True
    else:
        place["root-certificates"] = str(folder.authority.resolve())
    folder.flower_home.mkdir(parents=True, exist_ok=True)
    content = {"superlink": {"default": _CONNECTION, _CONNECTION: place}}
    write_atomically(folder.flower_home / "config.toml", tomli_w.dumps(content).encode())


def is_server_running(folder: ServerFolder) -> bool:
    """Tell whether the server answers where Flower's configuration says that it is."""
    config = tomllib.loads((folder.flower_home / "config.toml").read_text(encoding="utf-8"))
    host, _, port = config["superlink"][_CONNECTION]["address"].rpartition(":")
    return is_port_in_use(host, int(port))


def register_clients(folder: ServerFolder) -> list[str]:
    """Let the keys of all clients in; return the names of those that were not in before."""
    known = {node.get("name") for node in _call_flower(folder, "supernode", "list")["nodes"]}
    new = [name for name in folder.clients if name not in known]
    for name in new:
        key = str(folder.public_key(name))
        try:
            _call_flower(folder, "supernode", "register", key, "--name", name)
        except InvalidInput as error:
            # Flower does not list all that it knows at any moment.
            if "already in use" not in str(error):
                raise
    return new


def submit(folder: ServerFolder, run_config: Mapping[str, str]) -> int:
    """Hand a run to the server; return Flower's number for it."""
    # A folder made by an older version names the apps of that version.
    write_app(folder.app)
    config = folder.server / "run-config.toml"
    write_atomically(config, tomli_w.dumps(dict(run_config)).encode())
    answer = _call_flower(folder, "run", str(folder.app), "--run-config", str(config))
    return int(answer["run-id"])


def stop_run(folder: ServerFolder, number: int) -> None:
    """End a run at once."""
    _call_flower(folder, "stop", str(number))


def _call_flower(folder: ServerFolder, *words: str) -> dict[str, Any]:
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
            timeout=_CALL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InvalidInput(
            f"the server of {folder.root} did not answer `flwr {' '.join(words[:2])}` within "
            f"{_CALL_SECONDS:g} s; it must be running (mpfedcl federation server {folder.root})."
        ) from None
    # Flower may say other things before the JSON.
    start = done.stdout.find("{")
    with contextlib.suppress(ValueError):
        answer: dict[str, Any] = json.loads(done.stdout[start:]) if start >= 0 else {}
        if answer.get("success", False):
            return answer
    why = " ".join((done.stdout[start:] + done.stderr).split())[-400:]
    raise InvalidInput(
        f"the server of {folder.root} did not take `flwr {' '.join(words[:2])}`; it must "
        f"be running (mpfedcl federation server {folder.root}): {why}"
    )


def find_app_starters(process: subprocess.Popen[bytes]) -> set[psutil.Process]:
    """Return those of Flower's helpers that its server has put into groups of their own."""
    with contextlib.suppress(psutil.Error):
        children = psutil.Process(process.pid).children()
        return {each for each in children if _is_app_starter(each)}
    return set()


def end_app_starters(starters: Collection[psutil.Process]) -> None:
    """End helpers that have outlived their server: they would go over to the next one."""
    for each in starters:
        if each.is_running() and _is_app_starter(each):
            end_group(each.pid)


def _is_app_starter(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "flower-superexec" in " ".join(process.cmdline())
    return False


def program(name: str) -> str:
    """Return where one of Flower's programs is."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.is_file() else shutil.which(name)
    if not found:
        raise InvalidInput(
            f"{name} is not installed; a federation needs pip install 'mpfedcl[flower]'."
        )
    return found
