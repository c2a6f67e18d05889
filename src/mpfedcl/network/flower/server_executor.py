"""The server's executor: it waits for a run and runs it with the app that is installed here.

Flower's own executor would unpack the app that came with the run, and run that: whoever can start a
run could run any code. This one never opens it. One process for one run, begun before it is needed.
"""

import os
import signal
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import httpx
from flwr.common.constant import SubStatus
from flwr.common.serde import run_from_proto
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PullTaskInputResponse,
    PushTaskOutputRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.run import Run
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from mpfedcl.core.errors import InvalidInput, LostWorker
from mpfedcl.network.flower.access import ShowSecret
from mpfedcl.network.flower.apps import run_experiment
from mpfedcl.network.flower.programs import read_connection
from mpfedcl.network.flower.secret_client import open_client
from mpfedcl.network.setup.folders import ServerFolder

if TYPE_CHECKING:
    from mpfedcl.runs.observer import Callbacks

_POLL_SECONDS = 0.5
_OUR_APPS = ("mpfedcl/mpfedcl-app", "mpfedcl/mpfedcl")
"""What runs call the app that we run: as `federation start` and as a checkout names it."""


class _Grid(HttpGrid):
    """Flower's grid, with the server's secret on every request."""

    def __init__(self, folder: ServerFolder, token: str) -> None:
        address, authority = read_connection(folder)
        super().__init__(address, authority is None, authority, token=token)
        self._secret = folder.read_secret()

    def _connect(self) -> None:
        super()._connect()
        client = self._runtime_client
        client._interceptors = (*client._interceptors, ShowSecret(self._secret))


def execute_next_run(folder: ServerFolder, find_callbacks: "Callable[[], Callbacks]") -> int:
    """Wait for a run, run it, and return the exit code of this process."""
    token = _wait_for_task(folder)
    signal.signal(signal.SIGINT, _end_now)
    grid = _Grid(folder, token)
    client = grid._runtime_client
    # It asks for this process to be interrupted when the run is stopped.
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
    """Return the token of the next run, which shows that its messages are ours."""
    wanted = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
    with open_client(RuntimeHttpClient, folder) as client:
        while True:
            try:
                found = client.AcquireTask(wanted)
            except httpx.TransportError:
                # Busy, or ending: then this process is ended too.
                found = None
            if found is not None and found.token:
                return str(found.token)
            time.sleep(_POLL_SECONDS)


def _open(task: PullTaskInputResponse) -> Run:
    """Return the run, and never look at the app that came with it."""
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
    # What was done is in the run directory.
    os._exit(1)
