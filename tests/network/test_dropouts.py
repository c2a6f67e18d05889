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

from mpfedcl.api import CALLBACKS
from mpfedcl.experiment import Experiment
from mpfedcl.network.flower.transport import FlowerTransport
from mpfedcl.network.server.serve import serve
from small_experiments import VirtualTime, read_records

pytestmark = pytest.mark.soak

CLIENTS, ROUNDS, TIMEOUT = 10, 20, 6.0
BUSY = 10.0
"""Seconds that a round may last longer on a busy machine."""
METHODS = ("fedavg", "mp-fedcl")
SEEDS = (0, 1, 2)
MOST_LOST = 1.0
"""Points of accuracy, on average over the seeds."""


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

    def PullMessages(  # noqa: N802  -- Flower's name
        self, request: PullAppMessagesRequest
    ) -> PullAppMessagesResponse:
        now = time.monotonic()
        due = [each for each in request.message_ids if self._due.get(each, 0) <= now]
        return super().PullMessages(PullAppMessagesRequest(message_ids=due))


def serve_faulty(
    experiment: Experiment, folder: Path, *, dropouts: float = 0, stragglers: float = 0
) -> list[dict[str, Any]]:
    """Run a federation to its end; return its records."""
    grid = FaultyGrid(dropouts, stragglers, seed=experiment.seed)
    join_all(grid, folder, CLIENTS)
    result = serve(FlowerTransport(grid), experiment, folder / "run", callbacks=CALLBACKS)
    assert result.summary is not None
    records = read_records(folder / "run")
    assert len(records) == experiment.rounds
    return records


def experiment_of(method: str, seed: int, rounds: int) -> Experiment:
    return Experiment(method=method, rounds=rounds, clients=CLIENTS, seed=seed).replace(
        partition__alpha=0.5,
        train__lr=0.1,
        model__hidden=(64, 32),
        evaluate_every=rounds,
        network__round_timeout=TIMEOUT,
        network__patience=30.0,
    )


@pytest.mark.parametrize("method", METHODS)
def test_accuracy_with_dropouts_and_stragglers_in_every_round(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Virtual time stops while clients work, so that no other client is late."""
    virtual = VirtualTime()
    monkeypatch.setattr("mpfedcl.network.server.engine.time", virtual)
    monkeypatch.setattr(f"{__name__}.time", virtual)
    lost = []
    for seed in SEEDS:
        experiment = experiment_of(method, seed, ROUNDS)
        folder = tmp_path / str(seed)
        records = [
            serve_faulty(experiment, folder / "whole"),
            serve_faulty(experiment, folder / "faulty", dropouts=0.3, stragglers=0.1),
        ]
        # Clients that drop out of some rounds are asked in all others.
        missing = [{len(each["clients"]["missing"]) for each in found} for found in records]
        assert missing == [{0}, {4}]
        whole, faulty = (
            found[-1]["accuracy"]["local_test"]["global_classifier"] for found in records
        )
        lost.append(whole - faulty)
        print(f"\n{method}, seed {seed}: {whole:.1f} % with all, {faulty:.1f} % with faults")
    print(f"points lost: {sum(lost) / len(lost):.2f} on average")
    assert sum(lost) / len(lost) <= MOST_LOST


@pytest.mark.parametrize("method", METHODS)
def test_no_round_lasts_beyond_its_deadline(method: str, tmp_path: Path) -> None:
    """In real time."""
    experiment = experiment_of(method, 0, rounds=6)
    records = serve_faulty(experiment, tmp_path, dropouts=0.3, stragglers=0.1)
    assert min(len(each["clients"]["missing"]) for each in records) >= 4
    # A round is what passes between its broadcast and its aggregation.
    spent = [each["seconds"]["broadcast"] + each["seconds"]["train"] for each in records]
    print(f"\n{method}, longest round: {max(spent):.2f} s of {TIMEOUT:g} s")
    assert max(spent) <= TIMEOUT + BUSY
