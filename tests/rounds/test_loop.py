"""The round loop: who is asked, in which order answers count, and what is written down."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from recording_engine import watch

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.methods import PREDICTORS
from mpfedcl.methods.messages import Update
from mpfedcl.prototypes import Prototypes
from mpfedcl.rounds.aggregation.mean import WeightedMean
from mpfedcl.rounds.loop import RoundLoop
from small_experiments import (
    METHODS,
    PHASES,
    assert_same_tensors,
    build_federation,
    small,
    tensors_of,
    without_timings,
)

# Aggregation


def make_update(client: str, num_samples: int, value: Sequence[float]) -> Update:
    return Update(client, num_samples, {"w": torch.tensor(value)}, Prototypes.empty(2), 0.0)


def test_weighted_mean_by_hand() -> None:
    mean = WeightedMean({}, Experiment())
    mean.add(make_update("a", 1, [1.0, 10.0]), 1)
    mean.add(make_update("b", 3, [5.0, -2.0]), 3)
    mean.add(make_update("c", 9, [7.0, 7.0]), 0)
    assert mean.result()["w"].tolist() == [4.0, 1.0]  # (1 + 15) / 4 and (10 - 6) / 4


def test_weighted_mean_leaves_the_updates_alone() -> None:
    update = make_update("a", 3, [1.0, 2.0])
    mean = WeightedMean({}, Experiment())
    mean.add(update, 3)
    mean.add(update, 3)
    assert mean.result()["w"].tolist() == [1.0, 2.0]
    assert tensors_of(update)["w"].tolist() == [1.0, 2.0]


def test_the_new_model_is_the_mean_of_the_clients_by_samples(images: Path) -> None:
    federation, engine = watch(small(images, dtype="float64"))
    federation.run_round(evaluate=False)
    updates = engine.updates[0]
    total = sum(update.num_samples for update in updates)
    assert total == 60
    for name, value in federation.state.server.params.items():
        wanted = sum(tensors_of(u)[name].numpy() * (u.num_samples / total) for u in updates)
        torch.testing.assert_close(value, torch.as_tensor(wanted), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("order", list(permutations(range(4)))[1::4])
def test_arrival_order_never_changes_a_bit(images: Path, order: Sequence[int]) -> None:
    experiment = small(images, clients=4)
    federation, _ = watch(experiment)
    other, _ = watch(experiment, lambda updates: [updates[place] for place in order])
    for _ in range(3):
        left, right = federation.run_round(evaluate=True), other.run_round(evaluate=True)
        assert without_timings([left.to_json()]) == without_timings([right.to_json()])
    assert_same_tensors(federation.state.server.params, other.state.server.params)
    assert torch.equal(federation.pool.vectors, other.pool.vectors)
    assert federation.pool.names == other.pool.names


# Who is asked


@pytest.mark.parametrize(
    ("fraction", "min_clients", "count"),
    [
        (1.0, 1, 10),
        (0.5, 1, 5),
        (0.3, 1, 3),
        (0.01, 1, 1),
        (0.01, 4, 4),
        (0.5, 8, 8),
        (0.2, 10, 10),
    ],
)
def test_how_many_clients_are_asked(
    images: Path, fraction: float, min_clients: int, count: int
) -> None:
    experiment = small(
        images, clients=10, partition__kind="iid", fraction=fraction, min_clients=min_clients
    )
    federation, engine = watch(experiment)
    for _ in range(3):
        record = federation.run_round(evaluate=False)
        asked = engine.asked[-1]
        assert asked == sorted(set(asked))
        assert len(asked) == count
        assert record.clients.answered == asked
        assert record.clients.missing == []


def test_the_sample_depends_on_seed_and_round_alone(images: Path) -> None:
    experiment = small(images, clients=10, partition__kind="iid", fraction=0.3)
    federation, engine = watch(experiment)
    for _ in range(5):
        federation.run_round(evaluate=False)
    assert len({tuple(asked) for asked in engine.asked}) > 1

    # Another method, evaluations in between and a start in the middle draw the same clients.
    later, watched = watch(experiment.replace(method="fedavg"))
    later.state = replace(later.state, round=2)
    for _ in range(3):
        later.run_round(evaluate=True)
    assert watched.asked == engine.asked[2:]

    other, watched = watch(experiment.replace(seed=1))
    for _ in range(5):
        other.run_round(evaluate=False)
    assert watched.asked != engine.asked


def test_more_clients_asked_for_than_there_are(images: Path) -> None:
    with pytest.raises(InvalidInput, match=r"min_clients is 4; .*at most the number of clients, 3"):
        build_federation(small(images, min_clients=4))


# What the pool holds


@pytest.mark.parametrize("ttl", [1, 2, 3])
def test_prototypes_serve_as_many_broadcasts_as_asked(images: Path, ttl: int) -> None:
    experiment = small(
        images, clients=6, partition__kind="iid", fraction=0.34, prototypes__pool_ttl=ttl
    )
    federation, engine = watch(experiment)
    latest: dict[str, tuple[int, Prototypes]] = {}
    for number in range(1, 9):
        federation.run_round(evaluate=False)
        pool = engine.broadcasts[-1].pool
        # Prototypes of round t serve the broadcasts of rounds t+1 to t+ttl.
        alive = {name for name, (made, _) in latest.items() if number <= made + ttl}
        assert set(pool.names) == alive
        for name in alive:
            assert torch.equal(pool.of(name).vectors, latest[name][1].vectors)
        latest |= {update.client: (number, update.prototypes) for update in engine.updates[-1]}


def test_the_first_broadcast_has_no_prototypes(images: Path) -> None:
    federation, engine = watch(small(images))
    federation.run_round(evaluate=False)
    federation.run_round(evaluate=False)
    assert [len(broadcast.pool) > 0 for broadcast in engine.broadcasts] == [False, True]
    assert [broadcast.round for broadcast in engine.broadcasts] == [1, 2]


# What is written down


@pytest.mark.parametrize("method", METHODS)
def test_bytes_by_a_hand_count(images: Path, method: str) -> None:
    federation, engine = watch(small(images, method))
    parameters = 0 if method in ("local", "fedproto") else (36 + 1) * 8 + (8 + 1) * 4 + (4 + 1) * 3
    in_pool = 0
    for _ in range(2):
        record = federation.run_round(evaluate=False)
        # Up: the weights; per prototype 4 floats, its label and its count (8 bytes each).
        sent = [len(update.prototypes) for update in engine.updates[-1]]
        assert record.bytes["up"] == sum(4 * parameters + count * (4 * 4 + 16) for count in sent)
        # Down, to each of three: the weights; per prototype the same and its owner.
        assert record.bytes["down"] == 3 * (4 * parameters + in_pool * (4 * 4 + 24))
        assert record.sent == {"parameters": parameters, "prototype_floats": 4 * max(sent)}
        # FedProto's server averages its clients' prototypes: one a class goes down.
        in_pool = 3 if method == "fedproto" else sum(sent)
    assert (in_pool > 0) == (method in ("fedproto", "sp-fedcl", "dp-fedcl", "mp-fedcl"))


def test_the_loss_is_the_mean_over_samples(images: Path) -> None:
    federation, engine = watch(small(images))
    record = federation.run_round(evaluate=False)
    wanted = sum((update.loss or 0) * update.num_samples for update in engine.updates[0]) / 60
    assert record.loss is not None
    assert math.isclose(record.loss, wanted, rel_tol=1e-12)
    assert record.loss_per_client == {each.client: each.loss for each in engine.updates[0]}


@pytest.mark.parametrize("method", METHODS)
def test_readings_that_a_method_has(images: Path, method: str) -> None:
    (own, union) = _predictors(build_federation(small(images, method)))
    averaged = method not in ("local", "fedproto")
    prototypes = method != "local"
    assert {name for name, value in own.items() if value is None} == {
        *(() if averaged else [name for name in PREDICTORS if name.startswith("global")]),
        *(() if prototypes else [name for name in PREDICTORS if "prototype" in name]),
    }
    assert all(0 <= value <= 100 for value in own.values() if value is not None)
    # Everyone is tested on the same images here; but one's own, not everybody's, have one's prior.
    assert union == own | {"global_classifier_estimated": None}


def _predictors(federation: RoundLoop) -> tuple[dict[Any, Any], dict[Any, Any]]:
    record = federation.run_round(evaluate=True)
    assert record.accuracy is not None
    assert list(record.accuracy) == ["local_test", "global_test"]
    return record.accuracy["local_test"], record.accuracy["global_test"]


def test_personal_readings_are_of_those_who_trained(images: Path) -> None:
    # On a test that all share, the global model would be judged.
    federation = build_federation(small(images, fraction=0.3, partition__test="matched"))
    record = federation.run_round(evaluate=True)
    assert record.accuracy is not None
    assert record.accuracy_per_client is not None
    (trained,) = record.clients.answered
    known = {name for name, value in record.accuracy_per_client.items() if value is not None}
    assert known == {trained}
    assert (
        record.accuracy["local_test"]["personal_prototype"] == record.accuracy_per_client[trained]
    )


def test_reading_prototypes_of_a_method_without_them_costs_no_bytes(images: Path) -> None:
    experiment = small(images, "fedavg")
    read, unread = build_federation(experiment), build_federation(experiment)
    for _ in range(2):
        with_reading, without = read.run_round(evaluate=True), unread.run_round(evaluate=False)
        assert with_reading.accuracy is not None
        assert with_reading.accuracy["local_test"]["global_prototype"] is not None
        assert without.accuracy is None
        assert without.accuracy_per_client is None
        assert with_reading.bytes == without.bytes
        assert with_reading.seconds["cluster"] == 0
    assert_same_tensors(read.state.server.params, unread.state.server.params)


def test_seconds_by_phase(images: Path) -> None:
    record = build_federation(small(images)).run_round(evaluate=True)
    assert set(PHASES) <= record.seconds.keys()
    assert all(record.seconds[phase] > 0 for phase in ("train", "cluster", "evaluate"))
    assert all(seconds >= 0 for seconds in record.seconds.values())


def test_nobody_answers(images: Path) -> None:
    federation, _ = watch(small(images), lambda _: [])
    record = federation.run_round(evaluate=False)
    assert record.unchanged
    assert record.clients.missing == ["client-0", "client-1", "client-2"]
    assert record.bytes["up"] == 0
    assert record.loss is None
