"""Three of ten clients drop out of every round and one is too slow: `make soak`."""

import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from federations import round_of
from flwr.app import Message as FlowerMessage
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from loopback import LoopbackGrid, join_all

from mpfedcl.api import COMPANIONS
from mpfedcl.experiment import Experiment
from mpfedcl.network.flower.transport import FlowerTransport
from mpfedcl.network.server.serve import serve
from small_experiments import read_records

pytestmark = pytest.mark.soak

CLIENTS, ROUNDS, TIMEOUT = 10, 20, 6.0
MOST_LOST = 1.0
"""Points of accuracy."""


class FaultyGrid(LoopbackGrid):
    """In each round some clients never answer, and others after the round is over."""

    def __init__(self, dropouts: float, stragglers: float, seed: int) -> None:
        super().__init__()
        self._counts = round(dropouts * CLIENTS), round(stragglers * CLIENTS)
        self._seed = seed
        self._due: dict[str, float] = {}

    def _fates(self, number: int) -> tuple[set[int], set[int]]:
        """Return the nodes that drop out of a round, and those that are late."""
        lost, late = self._counts
        drawn = random.Random(f"{self._seed} {number}").sample(range(1, CLIENTS + 1), lost + late)
        return set(drawn[:lost]), set(drawn[lost:])

    def push_messages(self, messages: Iterable[FlowerMessage]) -> list[str]:
        listed = list(messages)
        identities = super().push_messages(listed)
        for message, identity in zip(listed, identities, strict=True):
            if message.metadata.message_type != "train":
                continue
            lost, late = self._fates(round_of(message))
            if message.metadata.dst_node_id in lost:
                del self._waiting[identity]
            elif message.metadata.dst_node_id in late:
                self._due[identity] = time.monotonic() + TIMEOUT + 1
        return identities

    def PullMessages(self, request: PullAppMessagesRequest) -> PullAppMessagesResponse:  # noqa: N802
        now = time.monotonic()
        due = [each for each in request.message_ids if self._due.get(each, 0) <= now]
        return super().PullMessages(PullAppMessagesRequest(message_ids=due))


def accuracies(
    method: str, folder: Path, *, dropouts: float = 0, stragglers: float = 0
) -> tuple[float, list[dict[str, Any]]]:
    """Run a federation; return the last accuracy of its averaged model, and its records."""
    experiment = Experiment(method=method, rounds=ROUNDS, clients=CLIENTS).replace(
        partition__alpha=0.5,
        train__lr=0.1,
        evaluate_every=ROUNDS,
        network__round_timeout=TIMEOUT,
        network__patience=30.0,
    )
    grid = FaultyGrid(dropouts, stragglers, seed=0)
    join_all(grid, folder, CLIENTS)
    result = serve(FlowerTransport(grid), experiment, folder / "run", companions=COMPANIONS)
    records = read_records(folder / "run")
    assert result.summary is not None
    own = records[-1]["accuracy"]["own"]
    return own["averaged_classifier"], records


@pytest.mark.parametrize("method", ["fedavg", "mp-fedcl"])
def test_dropouts_and_stragglers_in_every_round(method: str, tmp_path: Path) -> None:
    whole, _ = accuracies(method, tmp_path / "whole")
    faulty, records = accuracies(method, tmp_path / "faulty", dropouts=0.3, stragglers=0.1)
    print(f"\n{method}: {whole:.1f} % with all, {faulty:.1f} % with drop-outs and stragglers")
    assert len(records) == ROUNDS
    assert sum(len(each["clients"]["missing"]) for each in records) >= 0.3 * CLIENTS * ROUNDS
    # A round is what passes between its broadcast and its aggregation.
    spent = [each["seconds"]["broadcast"] + each["seconds"]["train"] for each in records]
    print(f"longest round: {max(spent):.2f} s of {TIMEOUT:g} s")
    assert max(spent) <= TIMEOUT + 1
    assert faulty >= whole - MOST_LOST
