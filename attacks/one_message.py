"""One malicious message: a client with a valid key tries to abort the run or to exhaust memory.

Three clients take part in a federation of two rounds within this process, with the real apps and
with every message as Flower stores it. The third client sends one invalid message. Expected: only
this client is excluded; the other two finish with a record that can be read back and resumed.
"""

import json
import tempfile
import tracemalloc
from collections.abc import Callable

import numpy
from bad_answers import BadReply, packed, predictor, table, values
from federations import is_training, rewrite
from flwr.app import Message as FlowerMessage
from flwr.supercore.inflatable.inflatable_object import get_object_id

from attacked_federation import ATTACKER, attacked_federation
from outcome import Outcome
from small_experiments import read_records

MOST_MEMORY = 64 * 2**20
"""Bytes that a run of a thousand weights may take at most while it opens a bomb."""
BOMB_MEGABYTES = 1024
Forge = Callable[[dict[str, bytes]], dict[str, bytes]]
"""From the objects of an answer by name to those that are stored."""


def _archive() -> bytes:
    """Return an npz archive: numpy opens it where an array is expected."""
    with tempfile.TemporaryFile() as file:
        numpy.savez(file, numpy.zeros(3))
        file.seek(0)
        return file.read()


IN_ROUND: dict[str, BadReply] = {
    "a loss of 1.7e308": values(loss=1.7e308),
    "an npz archive in place of the arrays": packed(_archive()),
    "an npz archive, stored as numpy stores": packed(_archive(), "numpy.ndarray"),
    "a predictor of 10^400": values(**predictor(table(10**400))),
}


def _odd_class(request: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
    """Introduce itself with classes that no folder can have."""
    return rewrite(reply, request, lambda said: {**said, "classes": ["\ud800", "\x00", "../.."]})


def attack(*, full: bool) -> list[Outcome]:
    """Send each message once."""
    outcomes = [try_message(name, bad=bad) for name, bad in IN_ROUND.items()]
    outcomes.append(try_message("odd class names", hello=_odd_class))
    outcomes += [
        try_message(name, forge=forge, most_memory=most)
        for name, (forge, most) in OF_OBJECTS.items()
    ]
    return outcomes


def try_message(
    name: str,
    *,
    bad: BadReply | None = None,
    hello: BadReply | None = None,
    forge: Forge | None = None,
    most_memory: int | None = None,
) -> Outcome:
    """Run a federation in which one client misbehaves in one way, once."""
    name = f"one message: {name}"
    sent: list[str] = []

    def tamper(
        client: str, request: FlowerMessage, reply: FlowerMessage
    ) -> FlowerMessage | list[FlowerMessage] | None:
        if client != ATTACKER:
            return reply
        if hello is not None and str(request.metadata.message_type) == "query":
            sent.append(client)
            return hello(request, reply)
        if bad is not None and is_training(request) and not sent:
            sent.append(client)
            return bad(request, reply)
        return reply

    def forge_objects(
        client: str, reply: FlowerMessage, objects: dict[str, bytes]
    ) -> dict[str, bytes]:
        # Only an answer that holds arrays is forged: that of a round.
        if client != ATTACKER or forge is None or sent or _find_array(objects) is None:
            return objects
        sent.append(client)
        return forge(objects)

    with attacked_federation(tamper, rounds=2) as federation:
        federation.grid.tamper_objects = forge_objects
        tracemalloc.start()
        try:
            federation.serve()
            peak = tracemalloc.get_traced_memory()[1]
            records = read_records(federation.path)
            federation.resume(rounds=3)
        except Exception as error:
            return Outcome(name, "it alone is left out", f"{type(error).__name__}: {error}", False)
        finally:
            tracemalloc.stop()
        others = all({"client-0", "client-1"} <= set(r["clients"]["answered"]) for r in records)
        refused = ATTACKER not in records[0]["clients"]["answered"]
        is_small = most_memory is None or peak < most_memory
        seen = "left out" if refused else "taken"
        seen += ", the others finish" if others and len(records) == 2 else ", the others do not"
        if most_memory is not None:
            seen += f", {peak / 2**20:.0f} MB"
        ok = bool(sent) and refused and others and len(records) == 2 and is_small
        return Outcome(name, "it alone is left out", seen, ok)


def _find_array(objects: dict[str, bytes]) -> str | None:
    """Return the name of the one object that describes an answer's arrays, if it has any."""
    found = [name for name, content in objects.items() if content.startswith(b"Array ")]
    assert len(found) <= 1, "all arrays of an answer are packed into one"
    return found[0] if found else None


def _replace_array(
    objects: dict[str, bytes], change: Callable[[dict[str, object]], dict[str, object]], *new: bytes
) -> dict[str, bytes]:
    """Describe the arrays of an answer otherwise; the server finds them under their old name."""
    name = _find_array(objects)
    assert name is not None
    head, _, body = objects[name].partition(b"\0")
    described = json.dumps(change(json.loads(body))).encode()
    children = ",".join(get_object_id(each) for each in new) or head.split()[1].decode()
    forged = f"Array {children} {len(described)}".encode() + b"\0" + described
    return {**objects, name: forged} | {get_object_id(each): each for each in new}


def _without_pieces(objects: dict[str, bytes]) -> dict[str, bytes]:
    """Leave out the list of an array's pieces."""
    return _replace_array(
        objects, lambda said: {k: v for k, v in said.items() if k != "arraychunk_ids"}
    )


def _bomb(objects: dict[str, bytes]) -> dict[str, bytes]:
    """Name one megabyte a thousand times."""
    piece = bytes(2**20)
    chunk = f"ArrayChunk  {len(piece)}".encode() + b"\0" + piece
    return _replace_array(
        objects, lambda said: {**said, "arraychunk_ids": [0] * BOMB_MEGABYTES}, chunk
    )


OF_OBJECTS: dict[str, tuple[Forge, int | None]] = {
    "a malformed Flower object": (_without_pieces, None),
    f"{BOMB_MEGABYTES} MB named by 1 MB": (_bomb, MOST_MEMORY),
}
"""What is stored in place of an answer, and the bytes that reading it may take."""
