"""The client side of a run in Flower: the ClientApp, and the executor of a federation's client.

The executor is one resident process. It speaks to the server as Flower's SuperNode does, with
Flower's own parts, and trains in the same process. Unlike a SuperNode it fetches no app, starts no
process and listens on no port, so that neither the server nor another user can run code here.

    python -m mpfedcl.network.flower.client FOLDER

In a Flower federation without this executor, `flwr run` starts the ClientApp for each message.
"""

import contextlib
import json
import os
import signal
import sys
import time
import tomllib
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from flwr.app import Context, Error
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import write_atomically
from mpfedcl.network.flower.fleet import (
    FleetNode,
    RefusedError,
    RejectedError,
    Request,
    read_request,
    write_request,
)
from mpfedcl.network.flower.programs import LAST_WORDS
from mpfedcl.network.flower.records import MESSAGE_TYPES, from_records, to_records
from mpfedcl.network.setup.folders import ClientFolder
from mpfedcl.network.transport import Kind, Message, MessageError

if TYPE_CHECKING:
    pass

_SHORTEST_POLL, _LONGEST_POLL, _POLL_GROWTH = 0.5, 3.0, 1.1
"""Seconds between two polls; the interval grows while there is no request."""
_LOAD_FACTOR = 10.0
"""The poll interval is at least this many times the server's response time, so that many clients
do not overload it."""
_REFUSED_SECONDS = 90.0
"""Time to insist after a refusal. The server needs up to 60 s to notice that a client was killed,
and until then refuses another process with the same key."""
_ASK_SECONDS = 2.0
_BUSY_SECONDS = 20.0
"""Maximum seconds between two attempts to reach the server."""

RequestHandler = Callable[[Kind, Message], Message]

FAILED = 400
"""Our error code for a client that reports a failure in one sentence."""
_KINDS: dict[str, Kind] = {flower_type: kind for kind, flower_type in MESSAGE_TYPES.items()}

client_app = ClientApp()

Say = Callable[[str], None]
"""Prints a sentence for the operator of the client."""


def answer(
    request: FlowerMessage, read: Callable[[], Message], handle: RequestHandler
) -> FlowerMessage:
    """Return a client's answer to a request, or an error with the reason."""
    try:
        kind = _KINDS.get(request.metadata.message_type)
        if kind is None:
            raise MessageError(f"it cannot answer {request.metadata.message_type[:40]!r}")
        return FlowerMessage(to_records(handle(kind, read())), reply_to=request)
    except (InvalidInput, MessageError) as error:
        reason = str(error)
    except Exception as error:
        # The server gets only the type of the error; the traceback stays in this log.
        traceback.print_exc()
        reason = f"it failed with {type(error).__name__}"
    return FlowerMessage(Error(FAILED, reason), reply_to=request)


@client_app.query()
@client_app.query("secure")
@client_app.train()
@client_app.evaluate()
def answer_alone(request: FlowerMessage, context: Context) -> FlowerMessage:
    """Answer a message in a process that Flower started for it."""

    def handle(kind: Kind, message: Message) -> Message:
        # Imported here, because torch takes a second to load and listing apps does not need it.
        from mpfedcl.network.client.client import ClientSettings, NetworkClient

        return NetworkClient(ClientSettings.parse(context.node_config)).answer(kind, message)

    return answer(request, lambda: from_records(request.content), handle)


def take_part(folder: ClientFolder, handle: RequestHandler, say: Say) -> None:
    """Answer the server's requests until this process ends."""
    values = tomllib.loads(folder.settings.read_text(encoding="utf-8"))
    is_insecure = bool(values.get("insecure", False))
    place = _Place(folder)
    node = FleetNode(
        str(values.get("server", folder.server)),
        key=None if is_insecure else folder.key,
        authority=None if is_insecure else folder.authority,
    )
    try:
        _enter(node, folder, place, say)
        _give_up_unfinished(node, place)
        wait = _SHORTEST_POLL
        while True:
            if (request := _receive(node, folder, place, say)) is not None:
                place.begin(request.header)
                _send(node, answer(request.header, partial(node.open, request), handle))
                place.finish()
                wait = _SHORTEST_POLL
            else:
                time.sleep(max(wait, min(_LOAD_FACTOR * node.look_seconds, _BUSY_SECONDS)))
                wait = min(wait * _POLL_GROWTH, _LONGEST_POLL)
    finally:
        node.close()
        place.leave()


class _Place:
    """Node number and current request on disk, for the next process after a kill."""

    def __init__(self, folder: ClientFolder) -> None:
        self._node = folder.flower_home / "node.json"
        self._request = folder.flower_home / "request"
        # A copy of the folder elsewhere must not replace this client.
        self._here = {"folder": str(folder.root.resolve()), "boot": _identify_boot()}
        folder.flower_home.mkdir(exist_ok=True)

    def enter(self, node: int) -> None:
        """Store the node number that the server has assigned."""
        self._write({"node": node, "is_in": True, **self._here})

    def leave(self) -> None:
        """Note that the client has left."""
        if known := self._read():
            self._write({**known, "is_in": False})

    def known_node(self) -> int | None:
        """Return the last node number, or None."""
        return self._read().get("node")

    def lost_node(self) -> int | None:
        """Return the node number of a process of this folder that was killed."""
        known = self._read()
        is_ours = known.get("is_in") and self._here.items() <= known.items()
        return known["node"] if is_ours else None

    def begin(self, request: FlowerMessage) -> None:
        """Store the request that is being answered."""
        write_atomically(self._request, write_request(request), durable=False)

    def finish(self) -> None:
        """Note that the request was answered."""
        self._request.unlink(missing_ok=True)

    def unfinished(self) -> FlowerMessage | None:
        """Return the request during which the previous process was killed."""
        with contextlib.suppress(OSError, ValueError):
            return read_request(self._request.read_bytes())
        return None

    def _read(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(self._node.read_bytes())
            if isinstance(found, dict) and isinstance(found.get("node"), int):
                return found
        return {}

    def _write(self, values: dict[str, Any]) -> None:
        write_atomically(self._node, json.dumps(values).encode())


def _identify_boot() -> str:
    """Return the boot id of this machine (Linux only)."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def _enter(node: FleetNode, folder: ClientFolder, place: _Place, say: Say) -> None:
    """Register with the server; report a refusal and retry for a while."""
    refused_since: float | None = None
    wait = 1.0
    while True:
        try:
            place.enter(node.enter(place.lost_node()))
        except httpx.TransportError as error:
            print(f"No server at {node.address}: {error}", file=sys.stderr, flush=True)
            time.sleep(wait)
            wait = min(2 * wait, _BUSY_SECONDS)
        except RefusedError as error:
            now = time.monotonic()
            why = _explain(node, place, error)
            if refused_since is None:
                refused_since = now
                say(
                    f"The server refuses {folder.name}: {why}. "
                    f"Trying again for {_REFUSED_SECONDS:g} s."
                )
            elif now - refused_since > _REFUSED_SECONDS:
                raise InvalidInput(
                    f"the server at {node.address} refuses {folder.name}: {why}."
                ) from None
            time.sleep(_ASK_SECONDS)
        else:
            print(f"SuperNode ID: {node.number}", flush=True)
            say(f"{folder.name} is connected to {node.address}; log: {folder.log}. Ctrl-C ends it.")
            return


def _explain(node: FleetNode, place: _Place, error: RefusedError) -> str:
    """Return the likely reason for a refusal."""
    if error.is_unsigned:
        return (
            "it does not accept the signature of the client's key; the clocks of both machines "
            "must agree within minutes"
        )
    known = place.known_node()
    if known is None:
        return (
            "it does not know the client's key yet (a new key is registered within seconds), or "
            "another process already uses it"
        )
    if node.is_known_as(known):
        return (
            "the client's key is already in use by another process, or by one that was killed "
            "less than a minute ago, which the server has not noticed yet"
        )
    return (
        "it no longer knows the client's key; it must be among those of mpfedcl federation init "
        "on the server"
    )


def _receive(node: FleetNode, folder: ClientFolder, place: _Place, say: Say) -> Request | None:
    try:
        return node.receive()
    except RefusedError:
        # The server has lost its state.
        _enter(node, folder, place, say)
    except RejectedError as error:
        print(f"The server did not accept the poll: {error}", file=sys.stderr, flush=True)
    return None


def _give_up_unfinished(node: FleetNode, place: _Place) -> None:
    """Answer the request of a killed process with an error, so that the server does not wait."""
    if (request := place.unfinished()) is not None:
        # First, because answering again might kill this process, too.
        place.finish()
        error = Error(FAILED, "its process was killed during this work")
        _send(node, FlowerMessage(error, reply_to=request))


def _send(node: FleetNode, reply: FlowerMessage) -> None:
    try:
        node.reply(reply)
    except (RejectedError, RefusedError) as error:
        # The run has ended, or the deadline has passed.
        print(f"An answer was not accepted: {error}", file=sys.stderr, flush=True)


def main() -> None:
    """Run the client of a folder; messages for the operator go to stdout."""
    folder = ClientFolder.open(Path(sys.argv[1]), None)
    operator = os.dup(1)
    # Everything else that is printed goes to the log.
    os.dup2(2, 1)

    def say(words: str) -> None:
        with contextlib.suppress(OSError):
            os.write(operator, f"{words}\n".encode())

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    code = 0
    try:
        from mpfedcl.network.client.client import ClientSettings, NetworkClient

        values = tomllib.loads(folder.settings.read_text(encoding="utf-8"))
        take_part(folder, NetworkClient(ClientSettings.parse(values)).answer, say)
    except (InvalidInput, MessageError) as error:
        print(error, file=sys.stderr, flush=True)
        say(f"{LAST_WORDS}{error}")
        code = 2
    except KeyboardInterrupt:
        pass
    sys.stdout.flush()
    # Do not wait for threads of an interrupted transfer.
    os._exit(code)


if __name__ == "__main__":
    main()
