"""Run federations over a network: `federation init`, `server`, `client`, `start`, `update`.

Modules that need torch are imported by the functions that use them, because the processes of a
server and of a client run for months and must stay small.
"""

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from rich.progress import Progress, TaskID

from mpfedcl.cli.arguments import (
    FederationClient,
    FederationInit,
    FederationServer,
    FederationStart,
    FederationUpdate,
)
from mpfedcl.cli.terminal import print_json, stdout_console, stop_after_round
from mpfedcl.core.errors import InvalidInput, RunCutShort
from mpfedcl.core.files import lock_folder, unused_folder
from mpfedcl.core.progress import ProgressBar, stderr_console
from mpfedcl.experiment import Experiment
from mpfedcl.network.audit import AUDIT_FILE, AuditLog
from mpfedcl.network.client.policy import ClientPolicy
from mpfedcl.network.flower.programs import (
    LAST_WORDS,
    end,
    end_of_log,
    environment,
    executor_command,
    is_port_in_use,
    local_address,
    require_flower,
    running,
    start,
    superlink_command,
    wait_for_port,
    write_connection,
)
from mpfedcl.network.logs import log_to_operator, logger, rotate_log
from mpfedcl.network.server.status import read_status, stop_file
from mpfedcl.network.setup.folders import (
    LOOPBACK,
    ClientFolder,
    ClientSettings,
    ServerFolder,
    make_federation,
)

if TYPE_CHECKING:
    from mpfedcl.network.flower.monitor import ServerMonitor

_SERVER_POLL_SECONDS, _STATUS_POLL_SECONDS = 0.5, 0.3
_LOG_SECONDS = 60.0
"""Interval of checks of a client's log."""
_EXECUTOR_RESTART_SECONDS, _CLIENT_RESTART_SECONDS = 5.0, 2.0
"""Delay before a failed process is started again."""
_SILENT_SECONDS = 60.0
"""Age of a status at which its process counts as lost; it is touched every second."""
_BEGIN_SECONDS = 120.0
"""Time limit for the first status of a run."""
_ENDS = ("done", "stopped", "failed")
_UPDATE_EVENTS = {"joined": "has joined", "replaced": "has replaced its data in"}


def federation_init_command(arguments: FederationInit) -> None:
    """Create or extend the folder of a federation."""
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
    console.print(f"Files for each machine: {folder.root / 'README.md'}")


def federation_server_command(arguments: FederationServer) -> None:
    """Run Flower's SuperLink, register the clients' keys, and execute submitted runs."""
    folder = ServerFolder.open(arguments.directory)
    log_to_operator(as_json=arguments.log_json)
    host = local_address(arguments.bind)
    _check_server(arguments, folder)
    # Imported late: Flower takes a second to load.
    from mpfedcl.network.flower.monitor import ServerMonitor

    if is_port_in_use(host, folder.port):
        raise InvalidInput(
            f"port is {folder.port}, which is in use; it must be free: end the other process, or "
            "create another federation: mpfedcl federation init NEW_FOLDER --port N."
        )
    write_connection(folder, arguments.bind)
    # A run ends with its server.
    folder.status.unlink(missing_ok=True)
    log = folder.server / "superlink.log"
    command = superlink_command(folder, arguments.bind)
    audit = AuditLog(folder.server / AUDIT_FILE)
    monitor = ServerMonitor(folder.root, audit, log)
    _end_by_signals()
    try:
        with (
            running(command, environment(folder.flower_home), log) as process,
            _serving_metrics(arguments, monitor),
        ):
            wait_for_port(process, host, folder.port, log)
            audit.append("start", address=f"{arguments.bind}:{folder.port}")
            monitor.start()
            logger.info(
                f"Server at {arguments.bind}:{folder.port} (TLS, node keys, a secret to start "
                f"runs); log: {log}. Ctrl-C ends it."
            )
            _supervise_server(folder, process, log)
            reason = end_of_log(log)
            audit.append("stop", reason=reason)
            raise InvalidInput(f"the server ended ({log}): {reason}.")
    except KeyboardInterrupt:
        audit.append("stop", reason="ended by its operator")
        logger.info("Server ended.")


@contextlib.contextmanager
def _serving_metrics(arguments: FederationServer, monitor: "ServerMonitor") -> Iterator[None]:
    if arguments.metrics_port is None:
        yield
        return
    from mpfedcl.network.server.metrics import serving_metrics

    bind, port = arguments.metrics_bind, arguments.metrics_port
    with serving_metrics(bind, port, monitor.metrics, monitor.is_healthy):
        logger.info(f"Metrics: http://{bind}:{port}/metrics; health: /healthz.")
        yield


def _check_server(arguments: FederationServer, folder: ServerFolder) -> None:
    """Reject unsafe settings, and warn about weak ones."""
    require_flower("mpfedcl.network.flower.control")
    if arguments.metrics_port is not None and not 1 <= arguments.metrics_port <= 65_535:
        raise InvalidInput(f"metrics_port is {arguments.metrics_port}; it must be 1 to 65535.")
    from mpfedcl.network.setup.life_cycle import check_certificates

    _check_folder(folder.server)
    folder.make_secret()
    _check_private(folder.secret)
    folder.read_secret()
    _check_private(folder.server / "server.key")
    # Warnings come from the monitor.
    check_certificates(folder)
    if arguments.bind not in LOOPBACK:
        stderr_console().print(
            f"Listening on {arguments.bind}: taking part requires the key of a client, starting a "
            "run the secret. A reverse proxy (server/nginx.conf) rejects all other connections."
        )


def _supervise_server(folder: ServerFolder, process: subprocess.Popen[bytes], log: Path) -> None:
    """Keep a process ready for the next run while the server runs."""
    command, env = executor_command(folder), environment(folder.flower_home)
    while process.poll() is None:
        with running(command, env, log) as executor:
            while process.poll() is None and executor.poll() is None:
                time.sleep(_SERVER_POLL_SECONDS)
        # A process ends with 0 after its run; after a failure the next one may fail at once.
        if executor.poll() and process.poll() is None:
            time.sleep(_EXECUTOR_RESTART_SECONDS)


def _check_private(path: Path) -> None:
    """Reject a private key or secret that others can read."""
    from mpfedcl.network.setup.keys import is_private

    if not path.is_file():
        raise InvalidInput(f"{path} does not exist; mpfedcl federation init makes it.")
    if not is_private(path):
        raise InvalidInput(f"{path} can be read by others; its mode must be 0600.")


def _check_folder(folder: Path) -> None:
    """Reject a folder that others can change; warn if they can read it."""
    from mpfedcl.network.setup.keys import find_open

    changeable, is_open = find_open(folder)
    if changeable is not None:
        raise InvalidInput(
            f"{changeable} can be changed by others; the mode of {folder} must be 0700."
        )
    if is_open:
        stderr_console().print(
            f"Other users of this machine can read all of {folder} except keys and secrets; "
            f"chmod 700 {folder} prevents this."
        )


def _end_by_signals() -> None:
    """Handle SIGTERM, which systemd sends, like Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)


def federation_client_command(arguments: FederationClient) -> None:
    """Run the process of a client, and restart it whenever it ends."""
    client = ClientFolder.open(arguments.directory, arguments.name)
    log_to_operator(as_json=arguments.log_json)
    if (arguments.data is None) == (arguments.share is None):
        raise InvalidInput("one of --data and --share must be given.")
    policy = ClientPolicy.read(arguments.policy or client.policy)
    if arguments.data is not None:
        from mpfedcl.data.sample_index import check_own_samples

        # Checked now, while the user is watching, and not in the first round.
        check_own_samples(arguments.data)
    require_flower("mpfedcl.network.flower.client")
    _check_folder(client.root)
    _check_private(client.key)
    server = arguments.server or client.server
    host, _, port = server.rpartition(":")
    if not host or not port.isdigit() or not 1 <= int(port) <= 65_535:
        raise InvalidInput(f"server is {server!r}; it must be host:port.")
    settings = ClientSettings(
        name=client.name,
        server=server,
        state=client.memory,
        key=client.key,
        known_clients=client.known_clients,
        data=arguments.data,
        share=arguments.share,
        encoder=arguments.encoder,
        encoder_weights=arguments.encoder_weights,
        policy=policy,
        device=arguments.device,
    )
    _end_by_signals()
    try:
        with lock_folder(client.flower_home):
            settings.write(client.settings)
            _supervise_client(client)
    except KeyboardInterrupt:
        logger.info(f"{client.name} has left.")


def _supervise_client(client: ClientFolder) -> None:
    """Start the client's process, and restart it whenever it ends, until interrupted."""
    command, env = executor_command(client), environment(client.flower_home)
    while True:
        process = start(command, env, client.log, reads=True)
        last: list[str] = []
        try:
            listener = threading.Thread(target=_relay, args=(process, last), daemon=True)
            listener.start()
            while (code := process.poll()) is None:
                rotate_log(client.log)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LOG_SECONDS)
            listener.join(1)
        finally:
            end(process)
        if code == 2:
            # Invalid input, which the process has reported: a restart would not help.
            raise InvalidInput(last[0] if last else f"the client ended; see {client.log}.")
        ended = f"was killed (signal {-code})" if code < 0 else f"ended: {end_of_log(client.log)}"
        logger.warning(f"{client.name}: its process {ended} and is restarted; log: {client.log}.")
        time.sleep(_CLIENT_RESTART_SECONDS)


def _relay(process: subprocess.Popen[bytes], last: list[str]) -> None:
    """Print the messages of the client's process, and keep its final error."""
    assert process.stdout is not None
    for line in process.stdout:
        words = line.decode(errors="replace").strip()
        if words.startswith(LAST_WORDS):
            last.append(words.removeprefix(LAST_WORDS))
        else:
            logger.info(words)


def federation_start_command(arguments: FederationStart) -> int:
    """Run or resume an experiment with the clients of a federation."""
    folder = ServerFolder.open(arguments.directory)
    path = _choose_path(arguments)
    require_flower("mpfedcl.network.flower.control")
    if arguments.resume is None:
        # Checked now, while the user is watching, and not by the server.
        from mpfedcl.runs.plan import plan

        plan(arguments.settings, over_network=True)
    again = f"mpfedcl federation start {folder.root} --resume {path}"
    follower = _follow_run(folder, path, _run_config(arguments, folder, path), again)
    return _report_end(arguments, follower, path)


def _follow_run(
    folder: ServerFolder, path: Path, run_config: dict[str, str], again: str
) -> "RunFollower":
    """Submit a request to the server and show its progress until it ends.

    `path` is the run directory, `again` the command that continues after an interruption.
    """
    under_way = read_status(folder.status)
    if under_way.get("what", "done") not in _ENDS and _is_alive(under_way):
        raise InvalidInput(f"{folder.root} is executing a run; it must end first.")
    # Imported late: Flower takes a second to load.
    from mpfedcl.network.flower.control import stop_run, submit

    console = stderr_console()
    with stop_after_round(console) as stop, ProgressBar(console, "rounds") as bar:
        task = bar.add_task("starting", total=None, note="")
        folder.status.unlink(missing_ok=True)
        stop_file(folder.status).unlink(missing_ok=True)
        number = submit(folder, run_config)
        follower = RunFollower(folder, path, bar, task, again)
        try:
            while follower.is_running():
                if stop():
                    stop_file(folder.status).touch()
                time.sleep(_STATUS_POLL_SECONDS)
        except KeyboardInterrupt:
            with contextlib.suppress(InvalidInput):
                stop_run(folder, number)
            raise
        finally:
            stop_file(folder.status).unlink(missing_ok=True)
    if follower.status["what"] == "failed":
        raise RunCutShort(str(follower.status.get("error", "see the log of the server")))
    return follower


def _choose_path(arguments: FederationStart) -> Path:
    if arguments.resume is not None:
        return arguments.resume
    method = arguments.settings.method.rpartition(":")[2]
    path = arguments.out or unused_folder(Path("runs") / f"{method}-{arguments.directory.name}")
    if path.exists() and any(path.iterdir()):
        raise InvalidInput(
            f"out is {str(path)!r}; it must be a new or an empty folder; --resume continues a run."
        )
    return path


def _run_config(arguments: FederationStart, folder: ServerFolder, path: Path) -> dict[str, str]:
    """Return the run configuration: the experiment, and paths on this machine."""
    experiment, config = arguments.settings, {"status": str(folder.status.resolve())}
    if arguments.resume is not None:
        kept = Experiment.from_toml(path / "experiment.toml", complete=True)
        if experiment.rounds != kept.rounds:
            config["rounds"] = str(experiment.rounds)
        return {**config, "resume": str(path.resolve())}
    if experiment.clients is None:
        # All clients of the federation, instead of the data set's default.
        experiment = experiment.replace(clients=len(folder.clients))
    return {**config, "experiment": experiment.to_toml(), "out": str(path.resolve())}


class RunFollower:
    """Reads and shows the status that the server's process writes."""

    def __init__(
        self, folder: ServerFolder, path: Path, bar: Progress, task: TaskID, again: str
    ) -> None:
        self.status: dict[str, Any] = {}
        self.round = 0
        """The last round that has begun."""
        self._folder, self._path = folder, path
        self._bar, self._task, self._again = bar, task, again
        self._began = self._moved = time.monotonic()
        self._modified = 0.0
        self._refusals: dict[str, str] = {}
        """Clients that do not take part, with the reasons shown so far."""

    def is_running(self) -> bool:
        """Show the progress; return whether the run continues."""
        self.status = read_status(self._folder.status) or self.status
        if not self.status:
            if time.monotonic() - self._began > _BEGIN_SECONDS:
                raise RunCutShort(
                    f"the server did not begin within {_BEGIN_SECONDS:g} s; see "
                    f"{self._folder.server / 'superlink.log'}."
                )
        elif self.status.get("what") not in _ENDS and not (
            self._is_moving() and _is_alive(self.status)
        ):
            # It may have written its last status between the two checks.
            self.status = read_status(self._folder.status)
            if self.status.get("what") not in _ENDS:
                raise RunCutShort(
                    "the server's process was lost; completed rounds are kept. Resume with: "
                    f"{self._again}"
                )
        if self.status.get("what") in _ENDS:
            return False
        if self.status:
            self._show()
        return True

    def _is_moving(self) -> bool:
        """Return whether the run's process has touched its status recently."""
        with contextlib.suppress(OSError):
            modified = self._folder.status.stat().st_mtime
            if modified != self._modified:
                self._modified, self._moved = modified, time.monotonic()
        return time.monotonic() - self._moved < _SILENT_SECONDS

    def _show(self) -> None:
        from mpfedcl.report.wording import describe_round
        from mpfedcl.runs.directory import RunDirectory

        status = self.status
        if "wanted" in status:
            note = f"{len(status['here'])} of {status['wanted']} clients are connected"
            self._bar.update(self._task, description=status["what"], note=note)
            self._show_refusals(status.get("refused", {}))
            return
        self.round = status["round"]
        records = RunDirectory(self._path).read_records()
        accuracy = f"{describe_round(records[-1])}  " if records else ""
        waiting = ", ".join(status["waiting"][:4]) + (" ..." if len(status["waiting"]) > 4 else "")
        missing = f"  missing: {', '.join(status['missing'][:4])}" if status["missing"] else ""
        round_now = f"round {status['round']} of {status['rounds']}"
        self._bar.update(
            self._task,
            description=round_now if status["what"] == "training" else status["what"],
            total=status["rounds"],
            completed=min(status["round"] - 1, status["rounds"]),
            note=f"{accuracy}{status['answered']} answered, waiting for: {waiting}{missing}",
        )

    def _show_refusals(self, refusals: Mapping[str, str]) -> None:
        """Report at once which clients cannot take part, because the wait may be long."""
        for name, why in sorted(refusals.items()):
            if self._refusals.get(name) != why:
                self._bar.console.print(f"{name} does not take part: {why}")
        self._refusals = dict(refusals)


def _report_end(arguments: FederationStart, follower: RunFollower, path: Path) -> int:
    from mpfedcl.cli.run import show_result
    from mpfedcl.runs.directory import RunDirectory
    from mpfedcl.runs.failure import describe_failure
    from mpfedcl.runs.observer import RunResult

    directory = RunDirectory(path)
    records, experiment = directory.read_records(), directory.read_experiment()
    if follower.status["what"] == "stopped":
        # Clients evaluate a round with the next one, so the last record may be incomplete.
        done = max(len(records), follower.round)
        stderr_console().print(
            f"Stopped after round {done} of {experiment.rounds}. Resume with: mpfedcl "
            f"federation start {arguments.directory} --resume {path}"
        )
        return 130
    summary = directory.read_summary()
    assert summary is not None
    result = RunResult(path, experiment, summary["accuracy"], records, None, summary)
    show_result(result, arguments)
    if failure := describe_failure(path):
        stderr_console().print(failure)
    return 0


def _is_alive(status: Mapping[str, Any]) -> bool:
    """Return whether the process that wrote a status runs."""
    try:
        # A zombie has ended, but its parent has not noticed yet.
        return bool(psutil.Process(int(status["pid"])).status() != psutil.STATUS_ZOMBIE)
    except psutil.AccessDenied:
        return True
    except psutil.NoSuchProcess:
        return False


def federation_update_command(arguments: FederationUpdate) -> None:
    """Let one client join a finished one-shot run, or replace its data in it."""
    from mpfedcl.inference.one_shot import check_change, is_one_shot

    folder = ServerFolder.open(arguments.directory)
    run, client = arguments.run, arguments.client
    # Invalid input is rejected before the server is contacted.
    if not is_one_shot(run):
        raise InvalidInput(
            f"run is {str(run)!r}; it must be a run of a one-shot method, such as fedgauss: other "
            "models have been trained with their clients."
        )
    check_change(run, client)
    require_flower("mpfedcl.network.flower.control")
    request = {
        "status": str(folder.status.resolve()),
        "update": str(run.resolve()),
        "client": client,
    }
    again = f"mpfedcl federation update {folder.root} --run {run} --client {client}"
    _show_update(arguments, _follow_run(folder, run, request, again).status["change"])


def _show_update(arguments: FederationUpdate, change: dict[str, Any]) -> None:
    from mpfedcl.report.wording import percent

    client = change["client"]
    if arguments.json:
        print_json(change)
    if change["event"] == "rejected":
        raise InvalidInput(f"{client} was rejected, and nothing was changed: {change['reason']}.")
    if arguments.json:
        return
    console = stdout_console()
    console.print(
        f"{client} {_UPDATE_EVENTS[change['event']]} {arguments.run}, "
        f"which has {len(change['clients'])} clients now"
    )
    if change["after"] is not None:
        console.print(
            f"accuracy % on its local test set: {percent(change['before'])} with the run's "
            f"classifier before, {percent(change['after'])} with the client's classifier now"
        )
    else:
        console.print(
            f"{client} did not receive its classifier, because it disconnected. Repeat the command "
            "when it is connected."
        )
