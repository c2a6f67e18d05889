"""One transport for two who wait at the same time: a run for answers, a registry for introductions.

A transport forgets the answers that it is not asked for. Here they are kept until they are asked
for, or until nobody can want them any more.
"""

import time
from collections.abc import Mapping

from mpfedcl.network.message import Kind, Message
from mpfedcl.network.transport import AnswerLimit, Reply, Transport


class Mailbox:
    """A transport whose replies wait for whoever asks for them."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._ends: dict[str, float] = {}
        """Until when a reply is worth something, by message id."""
        self._limits: dict[str, AnswerLimit] = {}
        """Of all that were asked for, and have not come."""
        self._kept: dict[str, Reply] = {}

    def connected_nodes(self) -> Mapping[int, str]:
        """Return the nodes that are connected now, with their names."""
        return self._transport.connected_nodes()

    def send(
        self, kind: Kind, messages: Mapping[int, Message], timeout: float, *, seconds: float
    ) -> dict[int, str]:
        """Send each node its message; return message ids by node."""
        sent = self._transport.send(kind, messages, timeout, seconds=seconds)
        self._ends |= dict.fromkeys(sent.values(), time.monotonic() + timeout)
        return sent

    def receive(self, limits: Mapping[str, AnswerLimit], seconds: float) -> list[Reply]:
        """Return replies that have come for these messages; those for others are kept."""
        now = time.monotonic()
        self._ends = {each: end for each, end in self._ends.items() if end > now or each in limits}
        self._kept = {each: reply for each, reply in self._kept.items() if each in self._ends}
        asked = {each: limit for each, limit in limits.items() if each not in self._kept}
        others = {each: limit for each, limit in self._limits.items() if each in self._ends}
        self._limits = others | asked
        if asked:
            for reply in self._transport.receive(self._limits, seconds):
                self._limits.pop(reply.request_id, None)
                self._kept[reply.request_id] = reply
        return [self._kept.pop(each) for each in limits if each in self._kept]
