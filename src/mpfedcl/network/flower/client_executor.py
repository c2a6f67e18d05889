"""A client's executor: one process that stays, takes requests from the server and answers them.

It speaks to the server as Flower's SuperNode does, with Flower's own parts, and works in the same
process. What a SuperNode does beside that it does not do: it fetches no app, starts no process and
listens at no port. So neither the server nor another user of this machine can run code here.

    python -m mpfedcl.network.flower.client_executor FOLDER
"""

import contextlib
import json
import os
import signal
import sys
import time
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Error
from flwr.app import Message as FlowerMessage

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import write_atomically
from mpfedcl.network.flower.apps import FAILED, RequestHandler, answer
from mpfedcl.network.flower.fleet import (
    FleetNode,
    NotLetInError,
    NotTakenError,
    Request,
    read_request,
    write_request,
)
from mpfedcl.network.flower.programs import LAST_WORDS
from mpfedcl.network.message import MessageError
from mpfedcl.network.setup.folders import ClientFolder

_SHORTEST_POLL, _LONGEST_POLL, _POLL_GROWTH = 0.5, 3.0, 1.1
"""Seconds between two looks for a request: soon after an answer another may come."""
_SLOWNESS = 10.0
"""After a look that took the server long, this many times as long is waited: many clients that ask
a busy server on and on would keep it from all else."""
_REFUSED_SECONDS = 90.0
"""A server takes up to 60 seconds to notice that a client was killed, and refuses another with the
same key for as long; one that is refused for longer may not take part."""
_ASK_SECONDS = 2.0
_BUSY_SECONDS = 20.0
"""Between two tries to reach a server that does not answer, at most."""

Say = Callable[[str], None]
"""Says a sentence to whoever started the client."""


def take_part(folder: ClientFolder, handle: RequestHandler, say: Say) -> None:
    """Answer the server's requests until this process is ended."""
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
                time.sleep(max(wait, min(_SLOWNESS * node.look_seconds, _BUSY_SECONDS)))
                wait = min(wait * _POLL_GROWTH, _LONGEST_POLL)
    finally:
        node.close()
        place.leave()


class _Place:
    """What this process writes down so that the next one, if it is killed, can go on."""

    def __init__(self, folder: ClientFolder) -> None:
        self._node = folder.flower_home / "node.json"
        self._request = folder.flower_home / "request"
        # A copy of the folder elsewhere must not push this one out.
        self._here = {"folder": str(folder.root.resolve()), "boot": _identify_boot()}
        folder.flower_home.mkdir(exist_ok=True)

    def enter(self, node: int) -> None:
        """Note under which number the server has let this client in."""
        self._write({"node": node, "is_in": True, **self._here})

    def leave(self) -> None:
        """Note that it has left in good order."""
        if known := self._read():
            self._write({**known, "is_in": False})

    def known_node(self) -> int | None:
        """Return the number under which it was let in before; None where it never was."""
        return self._read().get("node")

    def lost_node(self) -> int | None:
        """Return the number of a process of this folder that was killed while it took part."""
        known = self._read()
        is_ours = known.get("is_in") and self._here.items() <= known.items()
        return known["node"] if is_ours else None

    def begin(self, request: FlowerMessage) -> None:
        """Note the request that has come."""
        write_atomically(self._request, write_request(request), durable=False)

    def finish(self) -> None:
        """Note that it was answered."""
        self._request.unlink(missing_ok=True)

    def unfinished(self) -> FlowerMessage | None:
        """Return the request at which the process before was killed."""
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
    """Return what tells this machine, since it was last started, from others (Linux alone can)."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def _enter(node: FleetNode, folder: ClientFolder, place: _Place, say: Say) -> None:
    """Be let in by the server; say why not, and try again for a while."""
    refused_since: float | None = None
    wait = 1.0
    while True:
        try:
            place.enter(node.enter(place.lost_node()))
        except httpx.TransportError as error:
            print(f"No server at {node.address}: {error}", file=sys.stderr, flush=True)
            time.sleep(wait)
            wait = min(2 * wait, _BUSY_SECONDS)
        except NotLetInError as error:
            now = time.monotonic()
            why = _explain(node, place, error)
            if refused_since is None:
                refused_since = now
                say(
                    f"The server does not let {folder.name} in yet: {why}. "
                    f"Trying again for {_REFUSED_SECONDS:g} s."
                )
            elif now - refused_since > _REFUSED_SECONDS:
                raise InvalidInput(
                    f"the server at {node.address} does not let {folder.name} in: {why}."
                ) from None
            time.sleep(_ASK_SECONDS)
        else:
            print(f"SuperNode ID: {node.number}", flush=True)
            say(f"{folder.name} takes part at {node.address}; log: {folder.log}. Ctrl-C ends it.")
            return


def _explain(node: FleetNode, place: _Place, error: NotLetInError) -> str:
    """Return the true reason, as far as the server lets it be known."""
    if error.is_unsigned:
        return (
            "it does not accept the signature of the client's key; the clocks of both machines "
            "must agree within minutes"
        )
    known = place.known_node()
    if known is None:
        return (
            "it does not know the client's key yet (a key that mpfedcl federation init has just "
            "made is known within seconds), or another process already uses it"
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
    except NotLetInError:
        # The server was set up anew.
        _enter(node, folder, place, say)
    except NotTakenError as error:
        print(f"The server cannot be asked: {error}", file=sys.stderr, flush=True)
    return None


def _give_up_unfinished(node: FleetNode, place: _Place) -> None:
    """Tell the server not to wait for what a killed process was working on."""
    if (request := place.unfinished()) is not None:
        # First, and once: it may be what the process was killed by.
        place.finish()
        error = Error(FAILED, "its process was killed during this work")
        _send(node, FlowerMessage(error, reply_to=request))


def _send(node: FleetNode, reply: FlowerMessage) -> None:
    try:
        node.reply(reply)
    except (NotTakenError, NotLetInError) as error:
        # The run is over, or the server does not wait for this answer any more.
        print(f"An answer was not accepted: {error}", file=sys.stderr, flush=True)


def main() -> None:
    """Take part as the client of a folder; what is said to its operator goes to stdout."""
    folder = ClientFolder.open(Path(sys.argv[1]), None)
    operator = os.dup(1)
    # Whatever else is printed belongs into the log.
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
    # Threads of an interrupted transfer are not waited for.
    os._exit(code)


if __name__ == "__main__":
    main()
