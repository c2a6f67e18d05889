"""`mpfedcl federation client`: keep one client in a federation, whatever ends its programs."""

import subprocess
import tempfile
import time
from pathlib import Path

import tomli_w

from mpfedcl.cli.arguments.federation import FederationClient
from mpfedcl.cli.commands.federation import check_private, end_by_signals
from mpfedcl.cli.progress import stderr_console
from mpfedcl.errors import InvalidInput
from mpfedcl.files import write_atomically
from mpfedcl.network.flower.connection import check_connection
from mpfedcl.network.flower.programs import environment, program, service_command, supernode_command
from mpfedcl.network.processes import end, start
from mpfedcl.network.setup.folders import ClientFolder

_POLL_SECONDS = 0.5
_RESTART_SECONDS = 5.0
"""Before a program that has ended is started again."""
_REFUSED_SECONDS = 90.0
"""A server takes up to 60 seconds to notice that a client was killed, and refuses another with the
same key for as long; one that is refused for longer may not take part."""
_SERVICE, _NODE = "its service", "its Flower process"
_REFUSAL = "Failed to activate SuperNode"
_ACCEPTED = "SuperNode ID:"


def federation_client_command(arguments: FederationClient) -> int:
    """Run Flower's SuperNode for one client, and the service that keeps its data loaded."""
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
        from mpfedcl.data.own_samples import open_own_samples

        # Now, not in the first round: whoever starts a client is still watching.
        open_own_samples(arguments.data, None)
    if not arguments.insecure:
        check_private(client.key)
    program("flower-supernode")
    server = arguments.server or client.server
    console = stderr_console()
    authority = None if arguments.insecure else client.authority
    if why := check_connection(server, authority):
        console.print(f"No server at {server} yet ({why}); {client.name} waits for it.")
    end_by_signals()
    try:
        # Not in the client's folder: the path of a socket must be short.
        with tempfile.TemporaryDirectory(prefix="mpfedcl-") as place:
            _ClientSupervisor(arguments, client, server, Path(place) / "service").supervise()
    except KeyboardInterrupt:
        console.print(f"{client.name} has left.")
    return 0


class _ClientSupervisor:
    """Keeps a client's two programs running, and says so when one had to be started again."""

    def __init__(
        self, arguments: FederationClient, client: ClientFolder, server: str, socket: Path
    ) -> None:
        self._client, self._server = client, server
        self._is_insecure = arguments.insecure
        self._log = client.root / "supernode.log"
        self._config, self._socket = client.root / "node.toml", socket
        values = {**_node_config(arguments, client), "service": str(socket)}
        write_atomically(self._config, tomli_w.dumps(values).encode())
        self._refused_since: float | None = None
        self._log_before = 0
        self._console = stderr_console()

    def supervise(self) -> None:
        """Start both programs, and start them again whenever they end, until interrupted."""
        running: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for what in (_SERVICE, _NODE):
                running[what] = self._start(what)
            self._console.print(
                f"{self._client.name} takes part at {self._server}; log: {self._log}. "
                "Ctrl-C ends it."
            )
            while True:
                time.sleep(_POLL_SECONDS)
                for what, process in list(running.items()):
                    if process.poll() is not None:
                        # Its children, if any are left.
                        end(running.pop(what))
                        self._explain(what, process.returncode)
                        time.sleep(_RESTART_SECONDS)
                        running[what] = self._start(what)
        finally:
            for process in running.values():
                end(process)

    def _explain(self, what: str, code: int) -> None:
        # What the SuperNode has logged since it was last started.
        with self._log.open("rb") as file:
            file.seek(self._log_before)
            log = file.read().decode(errors="replace")
        if _ACCEPTED in log:
            self._refused_since = None
        if what == _NODE and _REFUSAL in log and _ACCEPTED not in log:
            self._wait_out_refusal()
            return
        ended = f"was killed (signal {-code})" if code < 0 else f"ended with {code}"
        self._console.print(
            f"{self._client.name}: {what} {ended} and is started again; log: {self._log}."
        )

    def _wait_out_refusal(self) -> None:
        now = time.monotonic()
        if self._refused_since is None:
            self._refused_since = now
            self._console.print(
                f"The server does not let {self._client.name} in: it takes a minute to notice that "
                f"a client was killed. Trying again for {_REFUSED_SECONDS:g} s."
            )
        elif now - self._refused_since > _REFUSED_SECONDS:
            raise InvalidInput(
                f"the server at {self._server} does not let {self._client.name} in: another "
                "process with this key takes part, or the key is not among those of "
                "mpfedcl federation init on the server."
            )

    def _start(self, what: str) -> subprocess.Popen[bytes]:
        if what == _SERVICE:
            command = service_command(self._config, self._socket)
        else:
            self._log_before = self._log.stat().st_size if self._log.is_file() else 0
            command = supernode_command(
                self._client, self._config, self._server, is_insecure=self._is_insecure
            )
        variables = environment(self._client.flower_home, looks_often=True)
        return start(command, variables, self._log)


def _node_config(arguments: FederationClient, client: ClientFolder) -> dict[str, str | int | float]:
    """Return the settings of the client's own processes; none of it is sent to the server."""
    paths = {
        "memory": client.memory,
        "data": arguments.data,
        "encoder-weights": arguments.encoder_weights,
    }
    values: dict[str, str | int | float] = {
        "name": client.name,
        "device": arguments.device,
        "min-cluster-size": arguments.min_cluster_size,
        "methods": " ".join(arguments.methods),
        "encoder": arguments.encoder or "",
        **{key: str(path.resolve()) for key, path in paths.items() if path is not None},
    }
    if arguments.max_epsilon is not None:
        values["max-epsilon"] = arguments.max_epsilon
    return values if arguments.share is None else {**values, "share": arguments.share}
