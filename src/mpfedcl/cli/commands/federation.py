"""`mpfedcl federation init` and `server`."""

import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpfedcl.cli.arguments.federation import FederationInit, FederationServer
from mpfedcl.cli.progress import Milestones, stderr_console, stdout_console
from mpfedcl.core.errors import InvalidInput
from mpfedcl.network.flower.programs import (
    environment,
    is_loopback,
    local_address,
    require_flower,
    server_executor_command,
    superlink_command,
    write_connection,
)
from mpfedcl.network.processes import end_of_log, is_port_in_use, running, wait_for_port
from mpfedcl.network.server.status import read_status
from mpfedcl.network.setup.folders import ServerFolder, make_federation

_POLL_SECONDS = 0.5
_CLIENTS_SECONDS = 5.0
"""Between two checks for clients that were added while the server runs."""
_RESTART_SECONDS = 5.0
"""Before a process for the next run, if the one before ended badly."""


def federation_init_command(arguments: FederationInit) -> int:
    """Make or extend a federation's folder."""
    if (arguments.clients is None) == (not arguments.names):
        raise InvalidInput("one of --clients and --names must be given.")
    if arguments.clients is not None and not 1 <= arguments.clients <= 1000:
        raise InvalidInput(f"clients is {arguments.clients}; it must be from 1 to 1000.")
    if not 1 <= arguments.port <= 65_535:
        raise InvalidInput(f"port is {arguments.port}; it must be from 1 to 65535.")
    require_flower()
    count = arguments.clients or 0
    width = len(str(count - 1))
    names = arguments.names or tuple(f"client-{number:0{width}}" for number in range(count))
    folder = make_federation(arguments.directory, names, arguments.host, arguments.port)
    console = stdout_console()
    console.print(f"{folder.root}: {len(folder.clients)} clients, {', '.join(folder.clients)}")
    console.print(f"Next: mpfedcl federation server {folder.root}")
    console.print(f"What goes to which machine: {folder.root / 'README.md'}")
    return 0


def federation_server_command(arguments: FederationServer) -> int:
    """Run Flower's SuperLink, let the clients' keys in, and run what is submitted."""
    folder = ServerFolder.open(arguments.directory)
    console = stderr_console()
    host = local_address(arguments.bind)
    _check_server(arguments, folder)
    if is_port_in_use(host, folder.port):
        raise InvalidInput(
            f"port is {folder.port}, which is already in use: end what listens there, or make a "
            "federation with another port: mpfedcl federation init NEW_FOLDER --port N."
        )
    write_connection(folder, arguments.bind, is_insecure=arguments.insecure)
    # No run outlives the server that it ran on.
    folder.status.unlink(missing_ok=True)
    log = folder.server / "superlink.log"
    command = superlink_command(folder, arguments.bind, is_insecure=arguments.insecure)
    end_by_signals()
    try:
        with running(command, environment(folder.flower_home), log) as process:
            wait_for_port(process, host, folder.port, log)
            _open_control_path(arguments, folder)
            security = "no TLS, no keys" if arguments.insecure else "TLS, node keys"
            console.print(
                f"Server at {arguments.bind}:{folder.port} ({security}, a secret to start runs); "
                f"log: {log}. Ctrl-C ends it."
            )
            _supervise(arguments, folder, process, log)
            raise InvalidInput(f"the server ended; {log} says why: {end_of_log(log).rstrip('.')}.")
    except KeyboardInterrupt:
        console.print("Server ended.")
        return 0


def _check_server(arguments: FederationServer, folder: ServerFolder) -> None:
    """Refuse what would break a promise, and say what is weaker than it could be."""
    require_flower("mpfedcl.network.flower.control")
    check_folder(folder.server)
    folder.make_secret()
    check_private(folder.secret)
    folder.read_secret()
    if not arguments.insecure:
        check_private(folder.server / "server.key")
    is_local = is_loopback(arguments.bind)
    if arguments.insecure and not is_local:
        raise InvalidInput(
            f"bind is {arguments.bind!r}; with --insecure it must be 127.0.0.1: without TLS the "
            "secret and all that clients send can be read on the network."
        )
    if arguments.insecure:
        stderr_console().print(
            "Without TLS and keys: every user of this machine can take part as a client, under any "
            "name. Starting a run still needs the secret."
        )
    elif not is_local:
        stderr_console().print(
            f"Listening at {arguments.bind}: whoever reaches the port needs a client's key to take "
            "part and the secret to start runs. nginx in front of it (server/nginx.conf) keeps "
            "everybody else out."
        )


def _supervise(
    arguments: FederationServer, folder: ServerFolder, process: subprocess.Popen[bytes], log: Path
) -> None:
    """Keep a process ready for the next run, and let new clients in, while the server runs."""
    known, checked = folder.clients, time.monotonic()
    run_lines = RunLines()
    while process.poll() is None:
        with running(
            server_executor_command(folder), environment(folder.flower_home), log
        ) as executor:
            while process.poll() is None and executor.poll() is None:
                time.sleep(_POLL_SECONDS)
                if line := run_lines.read(read_status(folder.status)):
                    stderr_console().print(line)
                if time.monotonic() - checked > _CLIENTS_SECONDS:
                    checked = time.monotonic()
                    known = _register_new_clients(arguments, folder.root, known)
        # One that has done its run ends with 0; another may end again at once.
        if executor.poll() and process.poll() is None:
            time.sleep(_RESTART_SECONDS)


class RunLines:
    """Lines for the server's log of the run under way: one every few rounds, and how it ended."""

    def __init__(self) -> None:
        self._milestones = Milestones()
        self._last = ""

    def read(self, status: Mapping[str, Any]) -> str:
        """Return the next line of what the run's process says of itself; empty if nothing is new.

        Whoever starts a run removes what was said of the one before.
        """
        before, self._last = self._last, str(status.get("what", ""))
        if not status:
            self._milestones = Milestones()
        elif "round" in status:
            done, rounds = int(status["round"]), int(status["rounds"])
            if self._milestones.is_new(done, rounds):
                missing = f", missing: {len(status['missing'])}" if status["missing"] else ""
                return f"Run: round {done} of {rounds}{missing}."
        elif self._last != before:
            details = status.get("error") or status.get("path")
            return f"Run: {self._last}{f', {details}' if details else ''}."
        return ""


def _open_control_path(arguments: FederationServer, folder: ServerFolder) -> None:
    """Let clients in, and the server's user at the control path."""
    # Only now: Flower takes a second to load.
    from mpfedcl.network.flower.control import lend_secret, register_clients

    lend_secret(folder)
    if not arguments.insecure:
        register_clients(folder)


def _register_new_clients(
    arguments: FederationServer, root: Path, known: tuple[str, ...]
) -> tuple[str, ...]:
    """Register clients that `init` has added since; return who is known now."""
    try:
        folder = ServerFolder.open(root)
        if folder.clients != known and not arguments.insecure:
            _open_control_path(arguments, folder)
            new = [name for name in folder.clients if name not in known]
            stderr_console().print(f"New clients: {', '.join(new)}")
    except InvalidInput as error:
        # Whatever is wrong with a new client must not end a federation that works.
        stderr_console().print(f"New clients cannot be let in yet: {error}")
        return known
    return folder.clients


def check_private(path: Path) -> None:
    """Refuse a private key or secret that others can read."""
    from mpfedcl.network.setup.keys import is_private

    if not path.is_file():
        raise InvalidInput(f"{path} does not exist; mpfedcl federation init makes it.")
    if not is_private(path):
        raise InvalidInput(f"{path} can be read by others; its mode must be 0600.")


def check_folder(folder: Path) -> None:
    """Refuse a folder that others can change; warn where they can look into it."""
    from mpfedcl.network.setup.keys import find_open

    changeable, is_open = find_open(folder)
    if changeable is not None:
        raise InvalidInput(
            f"{changeable} can be changed by others; the mode of {folder} must be 0700."
        )
    if is_open:
        stderr_console().print(
            f"{folder} can be entered by other users of this machine, who can read all in it "
            f"except keys and secrets; chmod 700 {folder} closes it."
        )


def end_by_signals() -> None:
    """Let SIGTERM, which systemd sends, end a program as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)
