"""Replies over Flower's grid: one that hangs holds up nobody else's."""

import threading
from collections.abc import Iterable

import pytest
from flwr.app import Error
from flwr.app import Message as FlowerMessage
from loopback import LoopbackGrid

from mpfedcl.network.flower.transport import FlowerTransport
from mpfedcl.network.message import Message
from mpfedcl.network.transport import Reply


class StuckGrid(LoopbackGrid):
    """Waits within a pull for one client's reply, as Flower does for half a reply."""

    def __init__(self) -> None:
        super().__init__(lambda _client, request, _reply: FlowerMessage(Error(9), reply_to=request))
        self.stuck: str | None = None
        self.complete = threading.Event()

    def pull_messages(self, message_ids: Iterable[str]) -> list[FlowerMessage]:
        asked = list(message_ids)
        if self.stuck in asked:
            self.complete.wait(60)
        return super().pull_messages(asked)


def test_half_a_reply_holds_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpfedcl.network.flower.transport.PULL_SECONDS", 0.2)
    grid = StuckGrid()
    for node in (1, 2, 3):
        grid.join(node, name=f"client-{node}", data="none")
    transport = FlowerTransport(grid)
    ids = transport.send("hello", dict.fromkeys((1, 2, 3), Message({})), 10)
    grid.stuck = ids[1]
    assert {each.request_id for each in transport.receive(ids.values())} == {ids[2], ids[3]}
    # It is not pulled a second time meanwhile.
    count = threading.active_count()
    assert transport.receive([ids[1]]) == []
    assert threading.active_count() == count
    grid.complete.set()
    found: list[Reply] = []
    while not found:
        found = transport.receive([ids[1]])
    assert [each.request_id for each in found] == [ids[1]]


def test_what_goes_wrong_in_a_pull_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Iterable[str]) -> list[FlowerMessage]:
        raise ConnectionError("the SuperLink has gone")

    grid = LoopbackGrid()
    monkeypatch.setattr(grid, "pull_messages", fail)
    with pytest.raises(ConnectionError, match="the SuperLink has gone"):
        FlowerTransport(grid).receive(["x"])
