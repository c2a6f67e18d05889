"""The loopback grid with clients that take their time, on a clock that only waiting moves."""

from collections.abc import Iterable, Mapping

from flwr.app import Message as FlowerMessage
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from loopback import LoopbackGrid, Tamper

from small_experiments import VirtualTime


class PacedGrid(LoopbackGrid):
    """Answers to trainings are there so many seconds after the message was sent, by client."""

    def __init__(
        self,
        clock: VirtualTime,
        seconds: Mapping[str, float],
        tamper: Tamper = lambda _client, _request, reply: reply,
    ) -> None:
        super().__init__(tamper)
        self.sent: list[tuple[float, str]] = []
        """When whom a training was sent."""
        self._clock, self._seconds = clock, seconds
        self._due: dict[str, float] = {}

    def push_messages(self, messages: Iterable[FlowerMessage]) -> list[str]:
        pushed = list(messages)
        identities = super().push_messages(pushed)
        for identity, message in zip(identities, pushed, strict=True):
            if str(message.metadata.message_type) == "train":
                name = str(self.nodes[message.metadata.dst_node_id][1]["name"])
                self.sent.append((self._clock.now, name))
                self._due[identity] = self._clock.now + self._seconds.get(name, 0.0)
        return identities

    def PullMessages(self, request: PullAppMessagesRequest) -> PullAppMessagesResponse:  # noqa: N802  -- Flower's name
        now = self._clock.now
        here = [each for each in request.message_ids if self._due.get(each, now) <= now]
        return super().PullMessages(PullAppMessagesRequest(message_ids=here))
