"""Flower's part: a ServerApp, a ClientApp, and a transport over its grid; only `flower/` knows it.

`flwr run . NAME -c "settings='method=fedproto rounds=20'"` runs these apps; `run_config.py` has the
keys of the run configuration.
"""

import itertools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from psutil import pid_exists

from mpfedcl.errors import InvalidInput, LostWorker
from mpfedcl.network.client.service import call_service
from mpfedcl.network.message import MOST_BYTES, Kind, Message, MessageError, from_json, to_json
from mpfedcl.network.transport import Reply

if TYPE_CHECKING:
    from mpfedcl.runs.observer import Companions

_MESSAGE_TYPES: dict[Kind, str] = {"hello": "query", "round": "train", "close": "evaluate"}
_MOST_ARRAYS = 10_000
LONGEST_TEXT = 2**26
_LONGEST_REASON = 500
_GONE = {3: "its message was lost", 4: "its answer was lost", 5: "it went away"}
"""Flower's error codes for what is nobody's fault; the SuperLink itself sends these."""
_GRACE_SECONDS = 5.0
"""Seconds that Flower has to end a process in good order."""
_LATE_SECONDS = 5.0
"""Seconds that a message outlives our waiting: then we report a late reply, and not Flower."""
PULL_SECONDS = 5.0
"""After which a pull is left to finish in the background."""
_MOST_SLOW_PULLS = 100
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
    transport: "FlowerTransport", run_config: Mapping[str, Any], companions: "Companions"
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


def to_records(message: Message) -> RecordDict:
    """Return a message as Flower's records."""
    return RecordDict(
        {
            "values": ConfigRecord({"json": to_json(message.values)}),
            "arrays": ArrayRecord({name: Array(array) for name, array in message.arrays.items()}),
        }
    )


def from_records(content: RecordDict) -> Message:
    """Read Flower's records; what is too large or no array is refused before it is opened."""
    try:
        text = content.config_records["values"]["json"]
        arrays = content.array_records["arrays"]
    except KeyError as error:
        raise MessageError(f"the record {error} is missing") from None
    if not isinstance(text, str):
        raise MessageError("its values are no text")
    if (
        len(text) > LONGEST_TEXT
        or len(arrays) > _MOST_ARRAYS
        or sum(len(each.data) for each in arrays.values()) > MOST_BYTES
    ):
        raise MessageError("it is too large")
    opened = {}
    for name, array in arrays.items():
        try:
            opened[name] = array.numpy()
        # Whatever a stranger calls an array: numpy has many ways to find that it is none.
        except Exception as error:
            raise MessageError(
                f"array {name[:80]!r} cannot be read ({type(error).__name__})"
            ) from None
    return Message(from_json(text), opened)


class FlowerTransport:
    """Carries messages over Flower's grid, polling for replies as often as it is asked."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._slow_pulls: dict[str, Future[list[FlowerMessage]]] = {}

    def connected_nodes(self) -> Mapping[int, str]:
        """Return the nodes that are online, with the names they are registered under."""
        return {node.node_id: node.name for node in self._grid.get_nodes()}

    def send(self, kind: Kind, messages: Mapping[int, Message], timeout: float) -> dict[int, str]:
        """Push one message to each node."""
        sent = {}
        seconds = timeout + _LATE_SECONDS
        for node, message in messages.items():
            pushed = FlowerMessage(to_records(message), node, _MESSAGE_TYPES[kind], ttl=seconds)
            identities: list[Any] = list(self._grid.push_messages([pushed]))
            if identities and identities[0]:
                sent[node] = str(identities[0])
        return sent

    def receive(self, request_ids: Iterable[str]) -> list[Reply]:
        """Pull the replies that have come.

        Flower waits for minutes within one pull for the rest of a reply whose client was killed
        while sending it. So each is pulled by itself, and one that takes long in the background.
        """
        replies: list[Reply] = []
        for request_id in request_ids:
            slow = self._slow_pulls.pop(request_id, None)
            pull = slow or self._start_pull(request_id)
            wait([pull], 0 if slow else PULL_SECONDS)
            if pull.done():
                replies += map(_read, pull.result())
            else:
                self._slow_pulls[request_id] = pull
        # Of rounds long over: nobody asks for them any more.
        for oldest in list(self._slow_pulls)[:-_MOST_SLOW_PULLS]:
            del self._slow_pulls[oldest]
        return replies

    def _start_pull(self, request_id: str) -> "Future[list[FlowerMessage]]":
        future: Future[list[FlowerMessage]] = Future()

        def pull() -> None:
            try:
                future.set_result(list(self._grid.pull_messages([request_id])))
            except BaseException as error:
                future.set_exception(error)

        # An executor would be waited for when this process ends.
        threading.Thread(target=pull, daemon=True).start()
        return future


def _read(reply: FlowerMessage) -> Reply:
    request_id = reply.metadata.reply_to_message_id
    if reply.has_error():
        code, reason = reply.error.code, _on_one_line(reply.error.reason or "")
        if code in _GONE:
            return Reply(request_id, failure="gone", reason=_GONE[code])
        return Reply(request_id, failure="failed", reason=reason or f"Flower's error {code}")
    try:
        return Reply(request_id, from_records(reply.content))
    except MessageError as error:
        reason = f"its answer cannot be read: {error}"
        return Reply(request_id, failure="unreadable", reason=reason)


def _on_one_line(text: str) -> str:
    """Return a stranger's words as they may stand in a record or on a terminal."""
    line = " ".join(text[: 4 * _LONGEST_REASON].split())
    return "".join(sign for sign in line if sign.isprintable())[:_LONGEST_REASON]
