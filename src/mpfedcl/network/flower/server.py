"""The server side of a run in Flower: the ServerApp, and the executor that runs it.

Flower's own executor would unpack and run the app that is submitted with a run, which may contain
any code. The executor of this module never opens that app, and runs the installed package. One
process executes one run; it starts before it is needed.
"""

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import httpx
from flwr.app import Context
from flwr.common.constant import SubStatus
from flwr.common.serde import run_from_proto
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PullTaskInputResponse,
    PushTaskOutputRequest,
)
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.run import Run
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from mpfedcl.core.errors import InvalidInput, LostWorker
from mpfedcl.network.flower.control import ShowSecret, open_client
from mpfedcl.network.flower.programs import read_connection
from mpfedcl.network.flower.transport import FlowerTransport
from mpfedcl.network.setup.folders import ServerFolder

if TYPE_CHECKING:
    from mpfedcl.runs.observer import Callbacks

_POLL_SECONDS = 0.5
_OUR_APPS = ("mpfedcl/mpfedcl-app", "mpfedcl/mpfedcl")
"""Accepted names of a run's app: from `federation start` and from a checkout."""
_GRACE_SECONDS = 5.0
"""Time for a process to end after its parent has ended."""


def make_server_app(find_callbacks: "Callable[[], Callbacks]") -> ServerApp:
    """Return the Flower app that runs or resumes an experiment."""
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        run_experiment(cast("HttpGrid", grid), context.run_config, find_callbacks())

    return server_app


def run_experiment(grid: HttpGrid, run_config: Mapping[str, Any], callbacks: "Callbacks") -> None:
    """Run or resume an experiment with the clients of this Flower federation."""
    # Imported here, because torch takes a second to load and listing apps does not need it.
    from mpfedcl.network.flower.run_config import parse_run_config
    from mpfedcl.network.server.serve import resume_serving, serve
    from mpfedcl.network.server.status import Status
    from mpfedcl.runs.observer import Observer

    transport = FlowerTransport(grid)
    # Output goes to the server's log.
    observer = Observer(on_round=lambda record: print(_describe(record)), on_warning=print)
    place = run_config.get("status")
    status = Status(Path(str(place)) if place else None)
    _end_with_parent(status.show_alive)
    try:
        request = parse_run_config(run_config)
        shared = (request.status, observer, callbacks)
        if request.update is not None:
            change = callbacks.change_exchange(
                transport,
                request.update,
                request.client,
                leave=request.leave,
                status=request.status,
            )
            status.write("done", path=str(request.update.resolve()), change=dict(change))
            return
        if request.resume is not None:
            result = resume_serving(transport, request.resume, request.rounds, *shared)
        else:
            result = serve(transport, request.experiment, request.out, *shared)
    except Exception as error:
        is_explained = isinstance(error, (InvalidInput, LostWorker))
        status.write(
            "failed", error=f"{'' if is_explained else f'{type(error).__name__}: '}{error}"
        )
        raise
    is_done = result.summary is not None
    status.write("done" if is_done else "stopped", path=str(result.path.resolve()))


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


def _describe(record: Mapping[str, Any]) -> str:
    known = [value for value in (record["accuracy_per_client"] or {}).values() if value is not None]
    accuracy = f", accuracy {sum(known) / len(known):.1f} %" if known else ""
    clients = record["clients"]
    absent = "".join(
        f", {what}: {', '.join(clients[what])}" for what in ("missing", "rejected") if clients[what]
    )
    return f"round {record['round']}: {len(clients['answered'])} answered{accuracy}{absent}"


class _Grid(HttpGrid):
    """Flower's grid with the server's secret on every request."""

    def __init__(self, folder: ServerFolder, token: str) -> None:
        address, authority = read_connection(folder)
        super().__init__(address, authority is None, authority, token=token)
        self._secret = folder.read_secret()

    def _connect(self) -> None:
        super()._connect()
        client = self._runtime_client
        client._interceptors = (*client._interceptors, ShowSecret(self._secret))


def execute_next_run(folder: ServerFolder, find_callbacks: "Callable[[], Callbacks]") -> int:
    """Wait for a run, execute it, and return the exit code of this process."""
    token = _wait_for_task(folder)
    signal.signal(signal.SIGINT, _end_now)
    grid = _Grid(folder, token)
    client = grid._runtime_client
    # The heartbeat interrupts this process when the run is stopped.
    HeartbeatSender(make_task_heartbeat_fn_http(client)).start()
    task = client.PullTaskInput(PullTaskInputRequest())
    try:
        run = _open(task)
        grid.set_run(run)
        run_experiment(grid, run.override_config, find_callbacks())
        status, details = SubStatus.COMPLETED, ""
    except (InvalidInput, LostWorker) as error:
        status, details = SubStatus.FAILED, str(error)
        print(error, flush=True)
    except Exception as error:
        status, details = SubStatus.FAILED, f"{type(error).__name__}: {error}"
        traceback.print_exc()
    client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=details))
    return 0


def _wait_for_task(folder: ServerFolder) -> str:
    """Return the token of the next run, which authorizes its messages."""
    wanted = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
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


def _open(task: PullTaskInputResponse) -> Run:
    """Return the run without opening the app that was submitted with it."""
    run = run_from_proto(task.run)
    TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, run.run_id
    TaskIdentity.node_id = task.context.node_id
    if run.fab_id not in _OUR_APPS:
        raise InvalidInput(
            f"the run's app is {run.fab_id[:80]!r}; this server runs only mpfedcl's, which is "
            "installed here."
        )
    return run


def _end_now(_number: int, _frame: FrameType | None) -> None:
    os._exit(1)
