"""`mpfedcl federation init`, `server` and `client`."""

import signal
import tempfile
import time
from pathlib import Path

import tomli_w

from mpfedcl.errors import InvalidInput
from mpfedcl.files import write_atomically
from mpfedcl.network.arguments import FederationClient, FederationInit, FederationServer
from mpfedcl.network.folder import ClientFolder, ServerFolder, make_federation
from mpfedcl.network.processes import (
    environment,
    is_taken,
    last_words,
    program,
    register_clients,
    resident_command,
    running,
    superlink_command,
    supernode_command,
    wait_for_port,
    write_connection,
)
from mpfedcl.progress import messages, results

_LOOK_SECONDS = 5.0
"""Between two looks for clients that were added while the server runs."""


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
    console = results()
    console.print(f"{folder.root}: {len(folder.clients)} clients, {', '.join(folder.clients)}")
    console.print(f"Next: mpfedcl federation server {folder.root}")
    console.print(f"What goes to which machine: {folder.root / 'README.md'}")
    return 0


def federation_server_command(arguments: FederationServer) -> int:
    """Run Flower's SuperLink, and let the clients' keys in."""
    folder = ServerFolder.open(arguments.directory)
    console = messages()
    if is_taken("127.0.0.1", folder.port):
        raise InvalidInput(
            f"port is {folder.port}; somebody listens there already: end that server first."
        )
    if not arguments.insecure:
        _check_private(folder.server / "server.key")
    write_connection(folder, is_insecure=arguments.insecure)
    log = folder.server / "superlink.log"
    command = superlink_command(folder, arguments.bind, is_insecure=arguments.insecure)
    _end_by_signals()
    try:
        with running(command, environment(folder.flower_home), log) as process:
            wait_for_port(process, folder.port, log)
            if not arguments.insecure:
                register_clients(folder)
            words = "without TLS or keys" if arguments.insecure else "TLS, node keys"
            console.print(
                f"Server at {arguments.bind}:{folder.port} ({words}); log: {log}. Ctrl-C ends it."
            )
            seen = folder.clients
            while process.poll() is None:
                time.sleep(_LOOK_SECONDS)
                seen = _let_in_new(arguments, folder.root, seen)
            raise InvalidInput(f"the server ended; {log} says why: {last_words(log)}")
    except KeyboardInterrupt:
        console.print("Server ended.")
        return 0


def _let_in_new(arguments: FederationServer, root: Path, seen: tuple[str, ...]) -> tuple[str, ...]:
    """Register clients that `init` has added since; return who is known now."""
    folder = ServerFolder.open(root)
    if folder.clients != seen and not arguments.insecure:
        new = register_clients(folder)
        if new:
            messages().print(f"New clients: {', '.join(new)}")
    return folder.clients


def federation_client_command(arguments: FederationClient) -> int:
    """Run Flower's SuperNode for one client."""
    client = ClientFolder.open(arguments.directory, arguments.name)
    if (arguments.data is None) == (arguments.share is None):
        raise InvalidInput("one of --data and --share must be given.")
    if arguments.min_cluster_size < 1:
        raise InvalidInput(
            f"min_cluster_size is {arguments.min_cluster_size}; it must be at least 1."
        )
    if arguments.data is not None:
        from mpfedcl.data.own_images import open_own_images

        # Now, not in the first round: whoever starts a client is still looking.
        open_own_images(arguments.data, None)
    if not arguments.insecure:
        _check_private(client.key)
    server = arguments.server or client.server
    log = client.root / "supernode.log"
    console = messages()
    _end_by_signals()
    try:
        # Not in the client's folder: the path of a socket must be short.
        with tempfile.TemporaryDirectory(prefix="mpfedcl-") as place:
            config, socket = client.root / "node.toml", Path(place) / "site"
            values = {**_node_config(arguments, client), "resident": str(socket)}
            write_atomically(config, tomli_w.dumps(values).encode())
            command = supernode_command(client, config, server, is_insecure=arguments.insecure)
            variables = environment(client.flower_home)
            with (
                running(resident_command(config, socket), variables, log),
                running(command, variables, log) as process,
            ):
                console.print(f"{client.name} takes part at {server}; log: {log}. Ctrl-C ends it.")
                while process.poll() is None:
                    time.sleep(0.5)
            raise InvalidInput(f"the client ended; {log} says why: {last_words(log)}")
    except KeyboardInterrupt:
        console.print(f"{client.name} has left.")
        return 0


def _node_config(arguments: FederationClient, client: ClientFolder) -> dict[str, str | int]:
    """Return what the client's own process is told; none of it is sent to the server."""
    paths = {
        "memory": client.memory,
        "data": arguments.data,
        "encoder-weights": arguments.encoder_weights,
    }
    values: dict[str, str | int] = {
        "name": client.name,
        "device": arguments.device,
        "min-cluster-size": arguments.min_cluster_size,
        "methods": " ".join(arguments.methods),
        "encoder": arguments.encoder or "",
        **{key: str(path.resolve()) for key, path in paths.items() if path is not None},
    }
    return values if arguments.share is None else {**values, "share": arguments.share}


def _check_private(path: Path) -> None:
    from mpfedcl.network.keys import is_private

    if not path.is_file():
        raise InvalidInput(f"{path} does not exist; mpfedcl federation init makes it.")
    if not is_private(path):
        raise InvalidInput(f"{path} can be read by others; its mode must be 0600.")


def _end_by_signals() -> None:
    """Let SIGTERM, which systemd sends, end a program as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)
