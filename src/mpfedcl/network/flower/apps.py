"""Flower's part: a ServerApp and a ClientApp; only `flower/` knows it.

The executors of a federation run what is here for each run and each message. In a Flower federation
that somebody else has set up, `flwr run . NAME -c "settings='method=fedproto rounds=20'"` runs the
two apps; `run_config.py` has the keys of the run configuration.
"""

import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from flwr.app import Context, Error
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from mpfedcl.core.errors import InvalidInput, LostWorker
from mpfedcl.network.flower.records import from_records, to_records
from mpfedcl.network.flower.transport import FlowerTransport
from mpfedcl.network.message import Kind, Message, MessageError

if TYPE_CHECKING:
    from flwr.superlink.grid import HttpGrid

    from mpfedcl.runs.observer import Callbacks

RequestHandler = Callable[[Kind, Message], Message]

_GRACE_SECONDS = 5.0
"""Seconds that a process has to end in good order."""
FAILED = 400
"""Our own error code for a client that says in one sentence why it cannot do what it was asked."""
_KINDS: dict[str, Kind] = {
    "query": "hello",
    "query.secure": "secure",
    "train": "round",
    "evaluate": "close",
}
"""What is asked, by Flower's types of messages."""

client_app = ClientApp()


def make_server_app(find_callbacks: "Callable[[], Callbacks]") -> ServerApp:
    """Return the app that runs or resumes an experiment, with what accompanies its run."""
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        run_experiment(cast("HttpGrid", grid), context.run_config, find_callbacks())

    return server_app


def run_experiment(grid: "HttpGrid", run_config: Mapping[str, Any], callbacks: "Callbacks") -> None:
    """Run or resume an experiment with the clients of this Flower federation."""
    # Only now: torch takes a second to load, and whoever lists apps does not need it.
    from mpfedcl.network.flower.run_config import parse_run_config
    from mpfedcl.network.server.serve import resume_serving, serve
    from mpfedcl.network.server.status import Status
    from mpfedcl.runs.observer import Observer

    transport = FlowerTransport(grid)
    # What is printed is in the server's log.
    observer = Observer(on_round=lambda record: print(_describe(record)), on_warning=print)
    place = run_config.get("status")
    status = Status(Path(str(place)) if place else None)
    _end_with_parent(status.show_alive)
    try:
        request = parse_run_config(run_config)
        shared = (request.status, observer, callbacks)
        if request.update is not None:
            told = callbacks.change_exchange(
                transport,
                request.update,
                request.client,
                leave=request.leave,
                status=request.status,
            )
            status.write("done", path=str(request.update.resolve()), change=dict(told))
            return
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


def _end_with_parent(show_alive: Callable[[], object]) -> None:
    """End with the process that started this one, and show once per second that it lives.

    What was done is in the run directory, so that this process may end at any moment.
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
    absent = [
        f", {what}: {', '.join(clients[what])}" for what in ("missing", "rejected") if clients[what]
    ]
    return f"round {record['round']}: {len(clients['answered'])} answered{accuracy}" + "".join(
        absent
    )


def answer(
    request: FlowerMessage, read: Callable[[], Message], handle: RequestHandler
) -> FlowerMessage:
    """Return a client's answer to a request, or in one sentence why there is none."""
    try:
        kind = _KINDS.get(request.metadata.message_type)
        if kind is None:
            raise MessageError(f"it has no answer to {request.metadata.message_type[:40]!r}")
        return FlowerMessage(to_records(handle(kind, read())), reply_to=request)
    except (InvalidInput, MessageError) as error:
        reason = str(error)
    except Exception as error:
        # The server learns what kind of error it was; where in whose code stays in this log.
        traceback.print_exc()
        reason = f"it failed with {type(error).__name__}"
    return FlowerMessage(Error(FAILED, reason), reply_to=request)


@client_app.query()
@client_app.query("secure")
@client_app.train()
@client_app.evaluate()
def answer_alone(request: FlowerMessage, context: Context) -> FlowerMessage:
    """Answer a message in a process that was started for it."""

    def handle(kind: Kind, message: Message) -> Message:
        # Only now: torch takes a second to load, and whoever lists apps does not need it.
        from mpfedcl.network.client.client import ClientSettings, NetworkClient

        return NetworkClient(ClientSettings.parse(context.node_config)).answer(kind, message)

    return answer(request, lambda: from_records(request.content), handle)
