"""Two who wait at the same time have one mailbox; each gets its own, while it is worth any."""

import pytest
from conversations import LIMIT, NODES, answer
from loopback import LoopbackGrid

from mpfedcl.network.flower.transport import FlowerTransport
from mpfedcl.network.server.asynchronous import Mailbox
from mpfedcl.network.transport import Message
from small_experiments import VirtualTime


@pytest.fixture
def mailbox(monkeypatch: pytest.MonkeyPatch) -> tuple[Mailbox, dict[int, str], VirtualTime]:
    clock, grid = VirtualTime(), LoopbackGrid(answer)
    monkeypatch.setattr("mpfedcl.network.server.asynchronous.time", clock)
    for node in NODES:
        grid.join(node, name=f"client-{node}", data="none")
    found = Mailbox(FlowerTransport(grid))
    assert found.connected_nodes() == dict.fromkeys(NODES, "")
    sent = found.send("hello", dict.fromkeys(NODES, Message({})), 10, seconds=10)
    return found, sent, clock


def hear(mailbox: Mailbox, *ids: str) -> list[str]:
    """Ask three times; each answer comes once."""
    limits = dict.fromkeys(ids, LIMIT)
    return [reply.request_id for _ in range(3) for reply in mailbox.receive(limits, 10)]


def test_mailbox_keeps_replies_for_others(
    mailbox: tuple[Mailbox, dict[int, str], VirtualTime],
) -> None:
    box, sent, _ = mailbox
    # Now all are announced, and one is fetched.
    (first,) = box.receive(dict.fromkeys(sent.values(), LIMIT), 10)
    others = [each for each in sent.values() if each != first.request_id]
    assert hear(box, others[0]) == [others[0]]
    assert hear(box, others[1]) == [others[1]]
    assert hear(box, *sent.values()) == []


def test_mailbox_drops_expired_replies(
    mailbox: tuple[Mailbox, dict[int, str], VirtualTime],
) -> None:
    box, sent, clock = mailbox
    box.receive(dict.fromkeys(sent.values(), LIMIT), 10)
    assert box._limits
    clock.sleep(11)
    assert box.receive({}, 10) == []
    assert not box._limits
    assert not box._kept
    assert not box._ends
