"""Messages to three nodes over the loopback grid, and their answers."""

import time
from collections.abc import Callable

import numpy
from federations import records_of, to_text
from flwr.app import Message as FlowerMessage
from loopback import LoopbackGrid

from mpfedcl.network.flower.transport import FlowerTransport
from mpfedcl.network.transport import AnswerLimit, Message, Reply

LIMIT = AnswerLimit(num_arrays=4, array_bytes=2**22, text_bytes=2**16)
NODES = (1, 2, 3)


def answer(_: str, request: FlowerMessage, __: FlowerMessage) -> FlowerMessage:
    """Return the number of the node that was asked, and an array that depends on it."""
    node = request.metadata.dst_node_id
    arrays = {"x": numpy.arange(6.0).reshape(2, 3) + node}
    text = to_text({"node": node})
    return FlowerMessage(records_of(text, arrays), reply_to=request)


class Conversation:
    """Messages to three nodes, and their answers."""

    def __init__(self, grid: LoopbackGrid) -> None:
        self.grid = grid
        for node in NODES:
            grid.join(node, name=f"client-{node}", data="none", state="none")
        self.transport = FlowerTransport(grid)
        self.ids = self.transport.send("hello", dict.fromkeys(NODES, Message({})), 10, seconds=10)

    def hear(self, *nodes: int, seconds: float = 10.0) -> dict[int, Reply]:
        """Return the answers of nodes, as long as any come."""
        waiting = {self.ids[node]: node for node in nodes or NODES}
        heard: dict[int, Reply] = {}
        while waiting:
            replies = self.transport.receive(dict.fromkeys(waiting, LIMIT), seconds)
            heard |= {waiting.pop(each.request_id): each for each in replies}
            if not replies:
                break
        return heard


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)
