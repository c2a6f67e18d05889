"""The round loop: sampling, order of aggregation, prototype pool, and records."""

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


def test_weighted_mean_matches_a_hand_computation() -> None:
    mean = WeightedMean({}, Experiment())
    mean.add(make_update("a", 1, [1.0, 10.0]), 1)
    mean.add(make_update("b", 3, [5.0, -2.0]), 3)
    mean.add(make_update("c", 9, [7.0, 7.0]), 0)
    assert mean.result()["w"].tolist() == [4.0, 1.0]  # (1 + 15) / 4 and (10 - 6) / 4


def test_weighted_mean_does_not_change_the_updates() -> None:
    update = make_update("a", 3, [1.0, 2.0])
    mean = WeightedMean({}, Experiment())
    mean.add(update, 3)
    mean.add(update, 3)
    assert mean.result()["w"].tolist() == [1.0, 2.0]
    assert tensors_of(update)["w"].tolist() == [1.0, 2.0]


def test_new_model_is_the_mean_weighted_by_samples(images: Path) -> None:
    federation, engine = watch(small(images, dtype="float64"))
    federation.run_round(evaluate=False)
    updates = engine.updates[0]
    total = sum(update.num_samples for update in updates)
    assert total == 60
    for name, value in federation.state.server.params.items():
        wanted = sum(tensors_of(u)[name].numpy() * (u.num_samples / total) for u in updates)
        torch.testing.assert_close(value, torch.as_tensor(wanted), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("order", list(permutations(range(4)))[1::4])
def test_result_does_not_depend_on_arrival_order(images: Path, order: Sequence[int]) -> None:
    experiment = small(images, clients=4)
    federation, _ = watch(experiment)
    other, _ = watch(experiment, lambda updates: [updates[place] for place in order])
    for _ in range(3):
        left, right = federation.run_round(evaluate=True), other.run_round(evaluate=True)
        assert without_timings([left.to_json()]) == without_timings([right.to_json()])
    assert_same_tensors(federation.state.server.params, other.state.server.params)
    assert torch.equal(federation.pool.vectors, other.pool.vectors)
    assert federation.pool.names == other.pool.names


# Sampling


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
def test_number_of_sampled_clients(
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


def test_sample_depends_only_on_seed_and_round(images: Path) -> None:
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


def test_min_clients_above_the_number_of_clients_is_rejected(images: Path) -> None:
    with pytest.raises(InvalidInput, match=r"min_clients is 4; .*at most the number of clients, 3"):
        build_federation(small(images, min_clients=4))


# Prototype pool


@pytest.mark.parametrize("ttl", [1, 2, 3])
def test_prototypes_stay_in_the_pool_for_their_ttl(images: Path, ttl: int) -> None:
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


def test_first_broadcast_has_no_prototypes(images: Path) -> None:
    federation, engine = watch(small(images))
    federation.run_round(evaluate=False)
    federation.run_round(evaluate=False)
    assert [len(broadcast.pool) > 0 for broadcast in engine.broadcasts] == [False, True]
    assert [broadcast.round for broadcast in engine.broadcasts] == [1, 2]


# Records


@pytest.mark.parametrize("method", METHODS)
def test_bytes_match_a_hand_computation(images: Path, method: str) -> None:
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


def test_loss_is_the_mean_over_samples(images: Path) -> None:
    federation, engine = watch(small(images))
    record = federation.run_round(evaluate=False)
    wanted = sum((update.loss or 0) * update.num_samples for update in engine.updates[0]) / 60
    assert record.loss is not None
    assert math.isclose(record.loss, wanted, rel_tol=1e-12)
    assert record.loss_per_client == {each.client: each.loss for each in engine.updates[0]}


@pytest.mark.parametrize("method", METHODS)
def test_predictors_depend_on_what_a_method_shares(images: Path, method: str) -> None:
    (local, global_) = _predictors(build_federation(small(images, method)))
    averaged = method not in ("local", "fedproto")
    prototypes = method != "local"
    assert {name for name, value in local.items() if value is None} == {
        *(() if averaged else [name for name in PREDICTORS if name.startswith("global")]),
        *(() if prototypes else [name for name in PREDICTORS if "prototype" in name]),
    }
    assert all(0 <= value <= 100 for value in local.values() if value is not None)
    # All clients have the same test images here, but priors are estimated only on local test sets.
    assert global_ == local | {"global_classifier_estimated": None}


def _predictors(federation: RoundLoop) -> tuple[dict[Any, Any], dict[Any, Any]]:
    record = federation.run_round(evaluate=True)
    assert record.accuracy is not None
    assert list(record.accuracy) == ["local_test", "global_test"]
    return record.accuracy["local_test"], record.accuracy["global_test"]


def test_personal_accuracy_is_of_the_trained_clients(images: Path) -> None:
    # On a shared test set, the primary predictor would be the global model.
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


def test_evaluating_prototypes_sends_no_bytes(images: Path) -> None:
    experiment = small(images, "fedavg")
    evaluated, plain = build_federation(experiment), build_federation(experiment)
    for _ in range(2):
        with_, without = evaluated.run_round(evaluate=True), plain.run_round(evaluate=False)
        assert with_.accuracy is not None
        assert with_.accuracy["local_test"]["global_prototype"] is not None
        assert without.accuracy is None
        assert without.accuracy_per_client is None
        assert with_.bytes == without.bytes
        assert with_.seconds["cluster"] == 0
    assert_same_tensors(evaluated.state.server.params, plain.state.server.params)


def test_seconds_of_each_phase_are_recorded(images: Path) -> None:
    record = build_federation(small(images)).run_round(evaluate=True)
    assert set(PHASES) <= record.seconds.keys()
    assert all(record.seconds[phase] > 0 for phase in ("train", "cluster", "evaluate"))
    assert all(seconds >= 0 for seconds in record.seconds.values())


def test_round_without_updates_is_unchanged(images: Path) -> None:
    federation, _ = watch(small(images), lambda _: [])
    record = federation.run_round(evaluate=False)
    assert record.unchanged
    assert record.clients.missing == ["client-0", "client-1", "client-2"]
    assert record.bytes["up"] == 0
    assert record.loss is None
