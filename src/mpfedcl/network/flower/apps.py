"""Flower's part: a ServerApp, a ClientApp, and a courier over its grid. Flower is known here alone.

`flwr run . NAME -c "method='fedproto' rounds=20"` runs these apps; an experiment's settings are
the keys of the run configuration, and an empty text leaves one open.
"""

import itertools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from mpfedcl.errors import InvalidInput, LostWorker
from mpfedcl.network.client.service import ask_resident
from mpfedcl.network.message import MOST_BYTES, Kind, Parcel, ParcelError, from_json, to_json
from mpfedcl.network.transport import Answer

_MESSAGE_TYPES: dict[Kind, str] = {"hello": "query", "round": "train", "close": "evaluate"}
_MOST_ARRAYS = 10_000
_LONGEST_TEXT = 2**26
_LONGEST_REASON = 500
_GONE = {3: "its message was lost", 4: "its answer was lost", 5: "it went away"}
"""Flower's error codes for what is nobody's fault; the SuperLink itself sends these."""
_GRACE_SECONDS = 5.0
"""That Flower has to end a process in good order."""
_LATE_SECONDS = 5.0
"""A message lives so much longer than we wait: what is late is then said by us, not by Flower."""
_FAILED = 400
"""Our own code for a client that says in one sentence why it cannot do what it was asked."""

server_app = ServerApp()
client_app = ClientApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run or resume an experiment with the clients of this Flower federation."""
    # Only now: torch takes a second to load, and whoever lists apps does not need it.
    from mpfedcl.network.flower.run_config import parse_run_config
    from mpfedcl.network.server.serve import serve, serve_again
    from mpfedcl.network.server.status import Status
    from mpfedcl.runs.run_loop import Observer

    # Flower carries what an app prints to `flwr log` and `flwr run --stream`.
    observer = Observer(on_round=lambda record: print(_say_round(record)), on_warning=print)
    place = context.run_config.get("status")
    status = Status(Path(str(place)) if place else None)
    _end_with_parent(status.touch)
    try:
        order = parse_run_config(context.run_config)
        courier = FlowerCourier(grid)
        if order.resume is not None:
            result = serve_again(courier, order.resume, order.rounds, order.status, observer)
        else:
            result = serve(courier, order.experiment, order.out, order.status, observer)
    except (InvalidInput, LostWorker) as error:
        status.say("failed", error=str(error))
        raise
    except Exception as error:
        status.say("failed", error=f"{type(error).__name__}: {error}")
        raise
    is_done = result.summary is not None
    status.say("done" if is_done else "stopped", path=str(result.path.resolve()))


def _end_with_parent(live: Callable[[], object] = lambda: None) -> None:
    """End with the process that started this one, and show once a second that it lives.

    Flower's own way to end can hang. What was done is in the run directory or in a client's
    memory, so that this process may end at any moment.
    """
    parent = os.getppid()
    # Flower names it too: it may have gone before, and somebody else have taken its place.
    named = dict(itertools.pairwise(sys.argv)).get("--parent-pid", "")

    def watch() -> None:
        while os.getppid() == parent and _may_live(named):
            live()
            time.sleep(1)
        time.sleep(_GRACE_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _may_live(number: str) -> bool:
    """Tell whether there is such a process, or none was named."""
    if number.isdecimal():
        try:
            os.kill(int(number), 0)
        except ProcessLookupError:
            return False
    return True


def _say_round(record: Mapping[str, Any]) -> str:
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
def introduce(message: Message, context: Context) -> Message:
    """Say who this client is and what it has."""
    return _answer("hello", message, context)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Read the round before, if asked to, and train."""
    return _answer("round", message, context)


@client_app.evaluate()
def close(message: Message, context: Context) -> Message:
    """Read the last round."""
    return _answer("close", message, context)


def _answer(kind: Kind, message: Message, context: Context) -> Message:
    try:
        parcel = unpack(message.content)
        reply = pack(_ask_site(kind, parcel, context.node_config, message.metadata.ttl))
    except (InvalidInput, ParcelError) as error:
        return Message(Error(_FAILED, str(error)), reply_to=message)
    except Exception as error:
        # The server learns what kind of error it was; where in whose code stays in this log.
        traceback.print_exc()
        return Message(Error(_FAILED, f"it failed with {type(error).__name__}"), reply_to=message)
    return Message(reply, reply_to=message)


def _ask_site(kind: Kind, parcel: Parcel, node_config: Mapping[str, Any], seconds: float) -> Parcel:
    """Return what this client's site answers: the one that stays, else one for this message."""
    if socket := node_config.get("resident"):
        _end_with_parent()
        answer = ask_resident(Path(str(socket)), kind, parcel, seconds)
        if answer is not None:
            return answer
    from mpfedcl.network.client.client import Site, SiteSettings

    return Site(SiteSettings.parse(node_config)).answer(kind, parcel)


def pack(parcel: Parcel) -> RecordDict:
    """Return a parcel as Flower's records."""
    return RecordDict(
        {
            "values": ConfigRecord({"json": to_json(parcel.values)}),
            "arrays": ArrayRecord({name: Array(array) for name, array in parcel.arrays.items()}),
        }
    )


def unpack(content: RecordDict) -> Parcel:
    """Read Flower's records; what is too large or no array is refused before it is opened."""
    try:
        text = content.config_records["values"]["json"]
        arrays = content.array_records["arrays"]
    except KeyError as error:
        raise ParcelError(f"the record {error} is missing") from None
    if not isinstance(text, str):
        raise ParcelError("its values are no text")
    if (
        len(text) > _LONGEST_TEXT
        or len(arrays) > _MOST_ARRAYS
        or sum(len(each.data) for each in arrays.values()) > MOST_BYTES
    ):
        raise ParcelError("it is too large")
    opened = {}
    for name, array in arrays.items():
        try:
            opened[name] = array.numpy()
        # Whatever a stranger calls an array: numpy has many ways to find that it is none.
        except Exception as error:
            raise ParcelError(
                f"array {name[:80]!r} cannot be read ({type(error).__name__})"
            ) from None
    return Parcel(from_json(text), opened)


class FlowerCourier:
    """Carries parcels over Flower's grid, looking for answers as often as it is asked."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def present(self) -> Mapping[int, str]:
        """Return the nodes that are online, with the names they are registered under."""
        return {node.node_id: node.name for node in self._grid.get_nodes()}

    def send(self, kind: Kind, parcels: Mapping[int, Parcel], timeout: float) -> dict[int, str]:
        """Push one message to each node."""
        sent = {}
        for node, parcel in parcels.items():
            seconds = timeout + _LATE_SECONDS
            message = Message(pack(parcel), node, _MESSAGE_TYPES[kind], ttl=seconds)
            identities: list[Any] = list(self._grid.push_messages([message]))
            if identities and identities[0]:
                sent[node] = str(identities[0])
        return sent

    def collect(self, messages: Iterable[str]) -> list[Answer]:
        """Pull the replies that have come."""
        return [_open(reply) for reply in self._grid.pull_messages(list(messages))]


def _open(reply: Message) -> Answer:
    asked = reply.metadata.reply_to_message_id
    if reply.has_error():
        code, reason = reply.error.code, _on_one_line(reply.error.reason or "")
        if code in _GONE:
            return Answer(asked, trouble="gone", reason=_GONE[code])
        return Answer(asked, trouble="failed", reason=reason or f"Flower's error {code}")
    try:
        return Answer(asked, unpack(reply.content))
    except ParcelError as error:
        return Answer(asked, trouble="unreadable", reason=f"its answer cannot be read: {error}")


def _on_one_line(text: str) -> str:
    """Return a stranger's words as they may stand in a record or on a terminal."""
    line = " ".join(text[: 4 * _LONGEST_REASON].split())
    return "".join(sign for sign in line if sign.isprintable())[:_LONGEST_REASON]
