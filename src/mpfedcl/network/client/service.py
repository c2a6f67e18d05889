"""The client service: one process per client that keeps torch and the data between messages.

Flower starts a new process for every message. That process hands the request to this one over a
socket in a folder that only the client's own user can enter, and need not load torch or data.

    python -m mpfedcl.network.client.service NODE.TOML SOCKET
"""

import contextlib
import io
import json
import os
import signal
import socket as sockets
import struct
import sys
import tomllib
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, cast

import numpy

from mpfedcl.errors import InvalidInput
from mpfedcl.network.message import Kind, Message, MessageError, from_json, to_json
from mpfedcl.network.processes import end_orphans

RequestHandler = Callable[[Kind, Message], Message]


class ServiceFailed(InvalidInput):
    """What a client service says in place of an answer."""


def call_service(socket: Path, kind: Kind, message: Message, seconds: float) -> Message | None:
    """Return the service's answer, or None where there is no service, or it has gone.

    One that hangs is not waited for longer than the server waits.
    """
    try:
        # Bytes alone cross this connection: nothing that arrives is ever unpickled.
        with _connect(socket, seconds) as connection:
            connection.send_bytes(_to_bytes({"kind": kind}, message))
            head, answer = _from_bytes(connection.recv_bytes())
    except (BlockingIOError, TimeoutError):
        raise ServiceFailed(f"its process does not answer within {seconds:g} s") from None
    except (OSError, EOFError):
        return None
    if "failed" in head:
        raise ServiceFailed(str(head["failed"]))
    return answer


def _connect(socket: Path, seconds: float) -> "Connection":
    with sockets.socket(sockets.AF_UNIX) as line:
        line.settimeout(seconds)
        line.connect(str(socket))
        # From here on the kernel keeps the time, for bytes in both directions.
        line.setblocking(True)
        for option in (sockets.SO_RCVTIMEO, sockets.SO_SNDTIMEO):
            line.setsockopt(sockets.SOL_SOCKET, option, struct.pack("ll", max(1, int(seconds)), 0))
        return Connection(line.detach())


def serve_requests(socket: Path, handle: RequestHandler) -> None:
    """Reply requests one after the other until the process is ended."""
    socket.unlink(missing_ok=True)
    with Listener(str(socket), family="AF_UNIX") as listener:
        while True:
            with contextlib.suppress(OSError, EOFError), listener.accept() as connection:
                connection.send_bytes(_answer(connection.recv_bytes(), handle))


def _answer(request: bytes, handle: RequestHandler) -> bytes:
    """Return the answer, or the reason why there is none; whatever comes, the service stays."""
    try:
        head, message = _from_bytes(request)
        return _to_bytes({}, handle(cast("Kind", head["kind"]), message))
    except (InvalidInput, MessageError) as error:
        reason = str(error)
    except Exception as error:
        traceback.print_exc()
        reason = f"it failed with {type(error).__name__}"
    return _to_bytes({"failed": reason}, Message({}))


def _to_bytes(head: Mapping[str, Any], message: Message) -> bytes:
    packed = io.BytesIO()
    texts = {
        "head": numpy.frombuffer(json.dumps(head).encode(), dtype=numpy.uint8),
        "values": numpy.frombuffer(to_json(message.values).encode(), dtype=numpy.uint8),
    }
    arrays = {f"arrays/{name}": array for name, array in message.arrays.items()}
    numpy.savez(packed, **texts, **arrays)  # type: ignore[arg-type]
    return packed.getvalue()


def _from_bytes(content: bytes) -> tuple[dict[str, Any], Message]:
    with numpy.load(io.BytesIO(content), allow_pickle=False) as archive:
        head = json.loads(archive["head"].tobytes())
        values = from_json(archive["values"].tobytes().decode())
        prefix = "arrays/"
        arrays = {
            name.removeprefix(prefix): archive[name]
            for name in archive.files
            if name.startswith(prefix)
        }
    return head, Message(values, arrays)


def _end_orphans_on_signal() -> None:
    """If the client's program is killed, end what it has started, then this process."""
    parent = os.getppid()

    def end(*_: object) -> None:
        home = os.environ.get("FLWR_HOME")
        if home and os.getppid() != parent:
            end_orphans("FLWR_HOME", home)
        # Whoever is waiting for an answer gets none; nothing here is half written.
        os._exit(0)

    signal.signal(signal.SIGTERM, end)


def main() -> None:
    """Load what a client needs, and serve requests until ended."""
    _end_orphans_on_signal()
    from mpfedcl.network.client.client import ClientSettings, NetworkClient

    values = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        settings = ClientSettings.parse(values)
    except (InvalidInput, MessageError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    serve_requests(Path(sys.argv[2]), NetworkClient(settings).answer)


if __name__ == "__main__":
    main()
