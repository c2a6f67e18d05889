"""`mpfedcl federation client`: keep one client in a federation, whatever ends its process."""

import subprocess
import threading
import time

import tomli_w

from mpfedcl.cli.arguments.federation import FederationClient
from mpfedcl.cli.commands.federation import check_folder, check_private, end_by_signals
from mpfedcl.cli.progress import stderr_console
from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import lock_folder, write_atomically
from mpfedcl.network.flower.programs import (
    LAST_WORDS,
    check_connection,
    client_executor_command,
    environment,
    refuse_broken_flower,
    require_flower,
)
from mpfedcl.network.processes import end, start
from mpfedcl.network.setup.folders import ClientFolder

_RESTART_SECONDS = 2.0
"""Before a process that has ended is started again."""


def federation_client_command(arguments: FederationClient) -> int:
    """Run the process in which a client works, and start it again whenever it ends."""
    client = ClientFolder.open(arguments.directory, arguments.name)
    if (arguments.data is None) == (arguments.share is None):
        raise InvalidInput("one of --data and --share must be given.")
    if arguments.min_cluster_size < 1:
        raise InvalidInput(
            f"min_cluster_size is {arguments.min_cluster_size}; it must be at least 1."
        )
    if arguments.max_epsilon is not None and not 0 < arguments.max_epsilon <= 100:
        raise InvalidInput(
            f"max_epsilon is {arguments.max_epsilon:g}; it must be above 0 and at most 100."
        )
    if arguments.data is not None:
        from mpfedcl.data.reader import open_own_samples

        # Now, not in the first round: whoever starts a client is still watching.
        open_own_samples(arguments.data, None)
    require_flower()
    check_folder(client.root)
    if not arguments.insecure:
        check_private(client.key)
    server = arguments.server or client.server
    console = stderr_console()
    authority = None if arguments.insecure else client.authority
    if why := check_connection(server, authority):
        console.print(f"No server at {server} yet ({why}); {client.name} waits for it.")
    if arguments.insecure:
        console.print(
            "Without TLS and keys: anybody on the network can read and change what is sent, and "
            "anybody can pretend to be the server. Only for experiments on one machine."
        )
    end_by_signals()
    try:
        with lock_folder(client.flower_home):
            values = {**_node_config(arguments, client), "server": server}
            write_atomically(client.settings, tomli_w.dumps(values).encode())
            _supervise(client)
    except KeyboardInterrupt:
        console.print(f"{client.name} has left.")
    return 0


def _supervise(client: ClientFolder) -> None:
    """Start the client's process, and start it again whenever it ends, until interrupted."""
    console = stderr_console()
    while True:
        process = start(
            client_executor_command(client),
            environment(client.flower_home),
            client.log,
            reads=True,
        )
        last: list[str] = []
        try:
            listener = threading.Thread(target=_relay, args=(process, last), daemon=True)
            listener.start()
            code = process.wait()
            listener.join(1)
        finally:
            end(process)
        if code == 2:
            # It has said why it will not work: starting it again would not help.
            raise InvalidInput(last[0] if last else f"{client.log} says why it ended.")
        if code == 1:
            refuse_broken_flower(client.log)
        ended = f"was killed (signal {-code})" if code < 0 else f"ended with {code}"
        console.print(
            f"{client.name}: its process {ended} and is started again; log: {client.log}."
        )
        time.sleep(_RESTART_SECONDS)


def _relay(process: subprocess.Popen[bytes], last: list[str]) -> None:
    """Show what the client's process says to its operator, and keep its last words."""
    console = stderr_console()
    assert process.stdout is not None
    for line in process.stdout:
        words = line.decode(errors="replace").strip()
        if words.startswith(LAST_WORDS):
            last.append(words.removeprefix(LAST_WORDS))
        else:
            console.print(words, markup=False)


def _node_config(arguments: FederationClient, client: ClientFolder) -> dict[str, str | int | float]:
    """Return the settings of the client's own process; none of it is sent to the server."""
    paths = {
        "memory": client.memory,
        "data": arguments.data,
        "encoder-weights": arguments.encoder_weights,
        "key": None if arguments.insecure else client.key,
    }
    values: dict[str, str | int | float] = {
        "name": client.name,
        "device": arguments.device,
        "min-cluster-size": arguments.min_cluster_size,
        "methods": " ".join(arguments.methods),
        "encoder": arguments.encoder or "",
        "insecure": arguments.insecure,
        "secure-aggregation": arguments.secure_aggregation,
        **{key: str(path.resolve()) for key, path in paths.items() if path is not None},
    }
    if arguments.max_epsilon is not None:
        values["max-epsilon"] = arguments.max_epsilon
    return values if arguments.share is None else {**values, "share": arguments.share}
