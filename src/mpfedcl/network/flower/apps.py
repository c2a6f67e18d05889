"""Flower's part: a ServerApp and a ClientApp; only `flower/` knows it.

`flwr run . NAME -c "settings='method=fedproto rounds=20'"` runs these apps; `run_config.py` has the
keys of the run configuration.
"""

import itertools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Error
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from psutil import pid_exists

from mpfedcl.errors import InvalidInput, LostWorker
from mpfedcl.network.client.service import call_service
from mpfedcl.network.flower.records import from_records, to_records
from mpfedcl.network.flower.transport import FlowerTransport
from mpfedcl.network.message import Kind, Message, MessageError

if TYPE_CHECKING:
    from mpfedcl.runs.observer import Companions

_GRACE_SECONDS = 5.0
"""Seconds that Flower has to end a process in good order."""
_FAILED = 400
"""Our own error code for a client that says in one sentence why it cannot do what it was asked."""

client_app = ClientApp()


def make_server_app(find_companions: "Callable[[], Companions]") -> ServerApp:
    """Return the app that runs or resumes an experiment, with what accompanies its run."""
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        _run(FlowerTransport(grid), context.run_config, find_companions())

    return server_app


def _run(
    transport: FlowerTransport, run_config: Mapping[str, Any], companions: "Companions"
) -> None:
    """Run or resume an experiment with the clients of this Flower federation."""
    # Only now: torch takes a second to load, and whoever lists apps does not need it.
    from mpfedcl.network.flower.run_config import parse_run_config
    from mpfedcl.network.server.serve import resume_serving, serve
    from mpfedcl.network.server.status import Status
    from mpfedcl.runs.observer import Observer

    # Flower carries what an app prints to `flwr log` and `flwr run --stream`.
    observer = Observer(on_round=lambda record: print(_describe(record)), on_warning=print)
    place = run_config.get("status")
    status = Status(Path(str(place)) if place else None)
    _end_with_parent(status.show_alive)
    try:
        request = parse_run_config(run_config)
        shared = (request.status, observer, companions)
        if request.resume is not None:
            result = resume_serving(transport, request.resume, request.rounds, *shared)
        else:
            result = serve(transport, request.experiment, request.out, *shared)
    except (InvalidInput, LostWorker) as error:
        status.write("failed", error=str(error))
        raise
    except Exception as error:
        status.write("failed", error=f"{type(error).__name__}: {error}")
        raise
    is_done = result.summary is not None
    status.write("done" if is_done else "stopped", path=str(result.path.resolve()))


def _end_with_parent(show_alive: Callable[[], object] = lambda: None) -> None:
    """End with the process that started this one, and show once a second that it lives.

    Flower's own way to end can hang. What was done is in the run directory or in a client's
    state, so that this process may end at any moment.
    """
    parent = os.getppid()
    # Flower names it too: it may have gone before, and somebody else have taken its place.
    named = dict(itertools.pairwise(sys.argv)).get("--parent-pid", "")

    def watch() -> None:
        while os.getppid() == parent and (not named.isdecimal() or pid_exists(int(named))):
            show_alive()
            time.sleep(1)
        time.sleep(_GRACE_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _describe(record: Mapping[str, Any]) -> str:
    known = [value for value in (record["accuracy_per_client"] or {}).values() if value is not None]
    accuracy = f", accuracy {sum(known) / len(known):.1f} %" if known else ""
    clients = record["clients"]
    absent = [
        f", {what}: {', '.join(clients[what])}" for what in ("missing", "rejected") if clients[what]
    ]
    return f"round {record['round']}: {len(clients['answered'])} answered{accuracy}" + "".join(
        absent
    )


@client_app.query()
def introduce(request: FlowerMessage, context: Context) -> FlowerMessage:
    """Say who this client is and what it has."""
    return _answer("hello", request, context)


@client_app.train()
def train(request: FlowerMessage, context: Context) -> FlowerMessage:
    """Evaluate the round before, if asked to, and train."""
    return _answer("round", request, context)


@client_app.evaluate()
def evaluate_last_round(request: FlowerMessage, context: Context) -> FlowerMessage:
    """Evaluate the last round."""
    return _answer("close", request, context)


def _answer(kind: Kind, request: FlowerMessage, context: Context) -> FlowerMessage:
    try:
        message, seconds = from_records(request.content), request.metadata.ttl
        answer = to_records(_call_client(kind, message, context.node_config, seconds))
    except (InvalidInput, MessageError) as error:
        return FlowerMessage(Error(_FAILED, str(error)), reply_to=request)
    except Exception as error:
        # The server learns what kind of error it was; where in whose code stays in this log.
        traceback.print_exc()
        reason = f"it failed with {type(error).__name__}"
        return FlowerMessage(Error(_FAILED, reason), reply_to=request)
    return FlowerMessage(answer, reply_to=request)


def _call_client(
    kind: Kind, message: Message, node_config: Mapping[str, Any], seconds: float
) -> Message:
    """Return what the client service answers; without one, a client made for this message."""
    if socket := node_config.get("service"):
        _end_with_parent()
        answer = call_service(Path(str(socket)), kind, message, seconds)
        if answer is not None:
            return answer
    from mpfedcl.network.client.client import ClientSettings, NetworkClient

    return NetworkClient(ClientSettings.parse(node_config)).answer(kind, message)
