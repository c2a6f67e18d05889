"""A site that stays: one process a client that keeps torch and the data between messages.

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
from mpfedcl.network.flower.programs import end_orphans
from mpfedcl.network.message import Kind, Parcel, ParcelError, from_json, to_json

Answerer = Callable[[Kind, Parcel], Parcel]


class SiteFailed(InvalidInput):
    """What a resident site says in place of an answer."""


def ask_resident(socket: Path, kind: Kind, parcel: Parcel, seconds: float) -> Parcel | None:
    """Return the resident's answer, or None where there is no resident, or it has gone.

    One that hangs is not waited for longer than the server waits.
    """
    try:
        # Bytes alone cross this connection: nothing that arrives is ever unpickled.
        with _connect(socket, seconds) as connection:
            connection.send_bytes(_to_bytes({"kind": kind}, parcel))
            head, answer = _from_bytes(connection.recv_bytes())
    except (BlockingIOError, TimeoutError):
        raise SiteFailed(f"its process does not answer within {seconds:g} s") from None
    except (OSError, EOFError):
        return None
    if "failed" in head:
        raise SiteFailed(str(head["failed"]))
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


def serve_site(socket: Path, answer: Answerer) -> None:
    """Answer requests one after the other until the process is ended."""
    socket.unlink(missing_ok=True)
    with Listener(str(socket), family="AF_UNIX") as listener:
        while True:
            with contextlib.suppress(OSError, EOFError), listener.accept() as connection:
                connection.send_bytes(_answer(connection.recv_bytes(), answer))


def _answer(request: bytes, answer: Answerer) -> bytes:
    """Return the answer, or what is to be said in its place; whatever comes, the site stays."""
    try:
        head, parcel = _from_bytes(request)
        return _to_bytes({}, answer(cast("Kind", head["kind"]), parcel))
    except (InvalidInput, ParcelError) as error:
        said = str(error)
    except Exception as error:
        traceback.print_exc()
        said = f"it failed with {type(error).__name__}"
    return _to_bytes({"failed": said}, Parcel({}))


def _to_bytes(head: Mapping[str, Any], parcel: Parcel) -> bytes:
    packed = io.BytesIO()
    texts = {
        "head": numpy.frombuffer(json.dumps(head).encode(), dtype=numpy.uint8),
        "values": numpy.frombuffer(to_json(parcel.values).encode(), dtype=numpy.uint8),
    }
    arrays = {f"arrays/{name}": array for name, array in parcel.arrays.items()}
    numpy.savez(packed, **texts, **arrays)  # type: ignore[arg-type]
    return packed.getvalue()


def _from_bytes(content: bytes) -> tuple[dict[str, Any], Parcel]:
    with numpy.load(io.BytesIO(content), allow_pickle=False) as archive:
        head = json.loads(archive["head"].tobytes())
        values = from_json(archive["values"].tobytes().decode())
        prefix = "arrays/"
        arrays = {
            name.removeprefix(prefix): archive[name]
            for name in archive.files
            if name.startswith(prefix)
        }
    return head, Parcel(values, arrays)


def _leave_in_order() -> None:
    """When the client's program is killed, see that nothing which it has started stays behind."""
    parent = os.getppid()

    def leave(*_: object) -> None:
        home = os.environ.get("FLWR_HOME")
        if home and os.getppid() != parent:
            end_orphans(home)
        # Whoever asks waits in vain then; nothing here is half written.
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)


def main() -> None:
    """Load what a client needs, and stay."""
    _leave_in_order()
    from mpfedcl.network.client.client import Site, SiteSettings

    values = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        settings = SiteSettings.parse(values)
    except (InvalidInput, ParcelError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    serve_site(Path(sys.argv[2]), Site(settings).answer)


if __name__ == "__main__":
    main()
