"""`mpfedcl federation init` and `server`."""

import signal
import time
from pathlib import Path

import psutil

from mpfedcl.cli.arguments.federation import FederationInit, FederationServer
from mpfedcl.cli.progress import stderr_console, stdout_console
from mpfedcl.errors import InvalidInput
from mpfedcl.network.flower.programs import (
    end_app_starters,
    environment,
    find_app_starters,
    local_address,
    program,
    register_clients,
    superlink_command,
    write_connection,
)
from mpfedcl.network.processes import end_of_log, is_port_in_use, running, wait_for_port
from mpfedcl.network.setup.folders import ServerFolder, make_federation

_POLL_SECONDS = 5.0
"""Between two checks for clients that were added while the server runs."""


def federation_init_command(arguments: FederationInit) -> int:
    """Make or extend a federation's folder."""
    if (arguments.clients is None) == (not arguments.names):
        raise InvalidInput("one of --clients and --names must be given.")
    if arguments.clients is not None and not 1 <= arguments.clients <= 1000:
        raise InvalidInput(f"clients is {arguments.clients}; it must be from 1 to 1000.")
    if not 1 <= arguments.port <= 65_535:
        raise InvalidInput(f"port is {arguments.port}; it must be from 1 to 65535.")
    program("flower-superlink")
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
    """Run Flower's SuperLink, and let the clients' keys in."""
    folder = ServerFolder.open(arguments.directory)
    console = stderr_console()
    host = local_address(arguments.bind)
    if is_port_in_use(host, folder.port):
        raise InvalidInput(f"port is {folder.port}; it is already in use: end that server first.")
    if not arguments.insecure:
        check_private(folder.server / "server.key")
    write_connection(folder, arguments.bind, is_insecure=arguments.insecure)
    # No run outlives the server that it ran on.
    folder.status.unlink(missing_ok=True)
    log = folder.server / "superlink.log"
    command = superlink_command(folder, arguments.bind, is_insecure=arguments.insecure)
    starters: set[psutil.Process] = set()
    end_by_signals()
    try:
        with running(command, environment(folder.flower_home), log) as process:
            wait_for_port(process, host, folder.port, log)
            if not arguments.insecure:
                register_clients(folder)
            security = "without TLS or keys" if arguments.insecure else "TLS, node keys"
            console.print(
                f"Server at {arguments.bind}:{folder.port} ({security}); log: {log}. "
                "Ctrl-C ends it."
            )
            known = folder.clients
            starters |= find_app_starters(process)
            while process.poll() is None:
                time.sleep(_POLL_SECONDS)
                starters |= find_app_starters(process)
                known = _register_new_clients(arguments, folder.root, known)
            raise InvalidInput(f"the server ended; {log} says why: {end_of_log(log)}")
    except KeyboardInterrupt:
        console.print("Server ended.")
        return 0
    finally:
        end_app_starters(starters)


def _register_new_clients(
    arguments: FederationServer, root: Path, known: tuple[str, ...]
) -> tuple[str, ...]:
    """Register clients that `init` has added since; return who is known now."""
    try:
        folder = ServerFolder.open(root)
        if folder.clients != known and not arguments.insecure:
            register_clients(folder)
            new = [name for name in folder.clients if name not in known]
            stderr_console().print(f"New clients: {', '.join(new)}")
    except InvalidInput as error:
        # Whatever is wrong with a new client must not end a federation that works.
        stderr_console().print(f"New clients cannot be let in yet: {error}")
        return known
    return folder.clients


def check_private(path: Path) -> None:
    """Refuse a private key that others can read."""
    from mpfedcl.network.setup.keys import is_private

    if not path.is_file():
        raise InvalidInput(f"{path} does not exist; mpfedcl federation init makes it.")
    if not is_private(path):
        raise InvalidInput(f"{path} can be read by others; its mode must be 0600.")


def end_by_signals() -> None:
    """Let SIGTERM, which systemd sends, end a program as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)
