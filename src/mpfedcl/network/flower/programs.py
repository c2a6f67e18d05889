"""The programs of a federation: their commands, their environment, and where the server is."""

import contextlib
import importlib
import importlib.util
import ipaddress
import os
import sys
import tomllib
from pathlib import Path
from typing import Any

import tomli_w

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import write_atomically
from mpfedcl.network.processes import end_of_log, is_port_in_use
from mpfedcl.network.setup.folders import ClientFolder, ServerFolder

_CONNECTION = "mpfedcl"
"""What the server is called in Flower's own configuration."""


LAST_WORDS = "cannot continue: "
"""How a client's process begins the sentence that says why it ends for good."""


def require_flower(module: str | None = None) -> None:
    """Say in one sentence what is missing, if Flower is, or cannot be loaded by one of our modules.

    `module` is one that uses Flower, for whoever will need it anyway.
    """
    if importlib.util.find_spec("flwr") is None:
        raise InvalidInput(
            "Flower is not installed; a federation needs pip install 'mpfedcl[flower]'."
        )
    try:
        if module is not None:
            importlib.import_module(module)
    # Half an installation, or another version, may fail in any way while it is imported.
    except Exception as error:
        raise _broken(f"{type(error).__name__}: {error}") from None


def refuse_broken_flower(log: Path) -> None:
    """Say in one sentence that Flower cannot be loaded, if that is how a program's log ends."""
    if (last := end_of_log(log)).startswith(("ImportError", "ModuleNotFoundError")):
        raise _broken(last)


def _broken(why: str) -> InvalidInput:
    return InvalidInput(
        f"Flower is installed, but it cannot be loaded ({' '.join(why.split()).rstrip('.')}); "
        "pip install --force-reinstall 'mpfedcl[flower]' installs what it needs."
    )


def environment(flower_home: Path) -> dict[str, str]:
    """Return the environment of a federation's programs: nothing calls home."""
    return {
        **os.environ,
        "FLWR_HOME": str(flower_home.resolve()),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def superlink_command(folder: ServerFolder, bind: str, *, is_insecure: bool) -> list[str]:
    """Return the command that starts the server."""
    command = [
        *(sys.executable, "-m", "mpfedcl.network.flower.superlink", str(folder.secret)),
        *("--host", bind, "--port", str(folder.port)),
        # Flower itself starts no app: runs come with an app, and it would be anybody's code.
        *("--isolation", "process"),
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


def server_executor_command(folder: ServerFolder) -> list[str]:
    """Return the command that starts the process which runs the next run."""
    return [sys.executable, "-m", "mpfedcl.flower_app", str(folder.root)]


def client_executor_command(client: ClientFolder) -> list[str]:
    """Return the command that starts the process in which a client works."""
    return [sys.executable, "-m", "mpfedcl.network.flower.client_executor", str(client.root)]


def local_address(bind: str) -> str:
    """Return the address under which this machine itself reaches a server."""
    return "127.0.0.1" if bind in ("0.0.0.0", "localhost", "::") else bind


def is_loopback(bind: str) -> bool:
    """Tell whether only this machine itself can reach an address."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(bind).is_loopback
    return bind == "localhost"


def write_connection(folder: ServerFolder, bind: str, *, is_insecure: bool) -> None:
    """Note where the server is, and as Flower's own command would have it."""
    place: dict[str, Any] = {"address": f"{local_address(bind)}:{folder.port}"}
    if is_insecure:
        place["insecure"] = True
    else:
        place["root-certificates"] = str(folder.authority.resolve())
    folder.flower_home.mkdir(parents=True, exist_ok=True)
    content = {"superlink": {"default": _CONNECTION, _CONNECTION: place}}
    write_atomically(folder.flower_home / "config.toml", tomli_w.dumps(content).encode())


def read_connection(folder: ServerFolder) -> tuple[str, bytes | None]:
    """Return the server's address and the certificate to check it by; None: it has no TLS."""
    path = folder.flower_home / "config.toml"
    with contextlib.suppress(OSError, ValueError, KeyError):
        place = tomllib.loads(path.read_text(encoding="utf-8"))["superlink"][_CONNECTION]
        authority = None if place.get("insecure") else folder.authority.read_bytes()
        return str(place["address"]), authority
    raise InvalidInput(
        f"{path} does not say where the server is; it must have been started "
        f"(mpfedcl federation server {folder.root})."
    )


def is_server_running(folder: ServerFolder) -> bool:
    """Tell whether the server answers where it was started."""
    host, _, port = read_connection(folder)[0].rpartition(":")
    return is_port_in_use(host, int(port))
