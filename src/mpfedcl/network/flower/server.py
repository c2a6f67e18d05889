"""The server's executor, the process that runs an experiment with the clients of a federation.

Flower's own executor would unpack and run the app that is submitted with a run, which may contain
any code. This one never opens that app, and runs the installed package. One process executes one
run; it starts before it is needed.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
from flwr.common.constant import SubStatus
from flwr.common.serde import run_from_proto
from flwr.proto import runtime_pb2
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.run import Run
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from mpfedcl.core.errors import InvalidInput, LostWorker
from mpfedcl.experiment import Experiment
from mpfedcl.methods import find_method
from mpfedcl.network.audit import AUDIT_FILE, AuditLog
from mpfedcl.network.flower.control import ShowSecret, admits, open_client
from mpfedcl.network.flower.programs import read_address
from mpfedcl.network.flower.transport import FlowerTransport
from mpfedcl.network.logs import logger
from mpfedcl.network.server.operations import AuditedTransport, RunRecorder
from mpfedcl.network.server.serve import resume_serving, serve
from mpfedcl.network.server.status import Status
from mpfedcl.network.setup.folders import REQUEST_KEYS, ServerFolder
from mpfedcl.network.transport import Transport
from mpfedcl.runs.observer import Callbacks, Observer

_POLL_SECONDS = 0.5
_OUR_APP = "mpfedcl/mpfedcl-app"
"""The accepted name of a run's app."""
_GRACE_SECONDS = 5.0
"""Time for a process to end after its parent has ended."""


def run_experiment(
    transport: Transport,
    run_config: Mapping[str, Any],
    callbacks: Callbacks,
    recorder: RunRecorder,
) -> None:
    """Execute a request with the clients of this federation; its keys are `REQUEST_KEYS`."""
    # Warnings go to the server's log; all else is in the run directory.
    observer = recorder.watch(Observer(on_warning=logger.warning))
    given = {key: str(run_config.get(key, "")) for key in REQUEST_KEYS}
    place = Path(given["status"]) if given["status"] else None
    status, shared = Status(place), (place, observer, callbacks)
    _end_with_parent(status.show_alive)
    try:
        if given["update"]:
            path = Path(given["update"])
            change = callbacks.change_exchange(transport, path, given["client"], status=place)
            recorder.end("done", change=change.get("event"), client=given["client"])
            status.write("done", path=str(path.resolve()), change=dict(change))
            return
        if given["resume"]:
            rounds = int(given["rounds"]) if given["rounds"] else None
            result = resume_serving(transport, Path(given["resume"]), rounds, *shared)
        else:
            out = Path(given["out"]) if given["out"] else None
            result = serve(transport, _read_experiment(given["experiment"]), out, *shared)
    except Exception as error:
        is_explained = isinstance(error, (InvalidInput, LostWorker))
        reason = f"{'' if is_explained else f'{type(error).__name__}: '}{error}"
        status.write("failed", error=reason)
        recorder.end("failed", reason=reason)
        raise
    is_done = result.summary is not None
    recorder.end("done" if is_done else "stopped")
    status.write("done" if is_done else "stopped", path=str(result.path.resolve()))


def _read_experiment(document: str) -> Experiment:
    experiment = Experiment.parse_toml(document, Path("experiment"))
    # Importing the method registers its settings, which are checked only then.
    find_method(experiment.method)
    return experiment.replace()


def _end_with_parent(show_alive: Callable[[], object]) -> None:
    """End with the parent process, and show once per second that this process is alive.

    Completed rounds are in the run directory, so this process may end at any moment.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            show_alive()
            time.sleep(1)
        time.sleep(_GRACE_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class _Grid(HttpGrid):
    """Flower's grid with the server's secret on every request."""

    def __init__(self, folder: ServerFolder, token: str) -> None:
        super().__init__(read_address(folder), False, folder.authority.read_bytes(), token=token)
        self._secret = folder.read_secret()

    def _connect(self) -> None:
        super()._connect()
        client = self._runtime_client
        client._interceptors = (*client._interceptors, ShowSecret(self._secret))


def execute_next_run(folder: ServerFolder, callbacks: Callbacks) -> int:
    """Wait for a run, execute it, and return the exit code of this process."""
    token = _wait_for_task(folder)
    signal.signal(signal.SIGINT, _end_now)
    grid = _Grid(folder, token)
    client = grid._runtime_client
    # The heartbeat interrupts this process when the run is stopped.
    HeartbeatSender(make_task_heartbeat_fn_http(client)).start()
    task = client.PullTaskInput(runtime_pb2.PullTaskInputRequest())
    try:
        run = _open(task)
        grid.set_run(run)
        log = AuditLog(folder.server / AUDIT_FILE)
        transport = AuditedTransport(FlowerTransport(grid, partial(admits, folder)), log)
        recorder = RunRecorder(log, folder.totals)
        run_experiment(transport, run.override_config, callbacks, recorder)
        status, details = SubStatus.COMPLETED, ""
    except (InvalidInput, LostWorker) as error:
        status, details = SubStatus.FAILED, str(error)
        logger.error("%s", error)
    except Exception as error:
        status, details = SubStatus.FAILED, f"{type(error).__name__}: {error}"
        logger.exception("The run has failed.")
    client.PushTaskOutput(runtime_pb2.PushTaskOutputRequest(sub_status=status, details=details))
    return 0


def _wait_for_task(folder: ServerFolder) -> str:
    """Return the token of the next run, which authorizes its messages."""
    wanted = runtime_pb2.AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
    with open_client(RuntimeHttpClient, folder) as client:
        while True:
            try:
                found = client.AcquireTask(wanted)
            except httpx.TransportError:
                # The server is busy, or ends and takes this process with it.
                found = None
            if found is not None and found.token:
                return str(found.token)
            time.sleep(_POLL_SECONDS)


def _open(task: runtime_pb2.PullTaskInputResponse) -> Run:
    """Return the run without opening the app that was submitted with it."""
    run = run_from_proto(task.run)
    TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, run.run_id
    TaskIdentity.node_id = task.context.node_id
    if run.fab_id != _OUR_APP:
        raise InvalidInput(
            f"the run's app is {run.fab_id[:80]!r}; this server runs only mpfedcl's, which is "
            "installed here."
        )
    return run


def _end_now(_number: int, _frame: FrameType | None) -> None:
    os._exit(1)
