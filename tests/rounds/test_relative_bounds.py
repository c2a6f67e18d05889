"""Bounds relative to the other clients: share, length, state between rounds, the record."""

import math
from dataclasses import replace
from pathlib import Path
from statistics import median_low

import pytest
import torch
from client_stacks import Stack
from tampered_updates import VICTIM, TamperingEngine, with_tensor

from mpfedcl import resume, run
from mpfedcl.core.errors import InvalidInput
from mpfedcl.engines import Engine
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.settings import ValidationSettings
from mpfedcl.methods.messages import Broadcast, StackMember, Update
from mpfedcl.prototypes import PrototypePool, Prototypes
from mpfedcl.rounds.aggregation.mean import WeightedMean
from mpfedcl.rounds.bounded_aggregation import LENGTH, SHARE, BoundedAggregation
from mpfedcl.rounds.bounds import RelativeBounds
from mpfedcl.runs.observer import Observer
from small_experiments import (
    HIDDEN,
    assert_same_run,
    build_federation,
    read_records,
    small,
)

BROADCAST = Broadcast(1, {"w": torch.zeros(1, dtype=torch.float64)}, {}, PrototypePool.empty(2, 2))


def aggregate(
    changes: dict[str, float], claimed: dict[str, int], length: float | None, **settings: object
) -> tuple[float, BoundedAggregation]:
    bounds = RelativeBounds(ValidationSettings(**settings), median_low(claimed.values()), length)
    rule = WeightedMean(BROADCAST.params, Experiment())
    made = BoundedAggregation(rule, BROADCAST, bounds)
    for name, change in changes.items():
        tensors = {"w": torch.tensor([change], dtype=torch.float64)}
        made.add(Update(name, claimed[name], tensors, Prototypes.empty(2), 0.0), claimed[name])
    return float(made.result()["w"]), made


def test_a_claim_weighs_at_most_three_median_clients() -> None:
    sizes = {"a": 10, "b": 20, "c": 10_000_000}
    found, made = aggregate({"a": 1.0, "b": 1.0, "c": -1.0}, sizes, 1.0)
    assert found == pytest.approx((10 + 20 - 60) / 90)
    assert made.weights == {"a": 10, "b": 20, "c": pytest.approx(60)}
    assert made.processed == {SHARE: ["c"]}


def test_of_two_clients_neither_sets_its_own_bound() -> None:
    _, made = aggregate({"a": 1.0, "b": 1.0}, {"a": 10, "b": 10_000}, 1.0)
    assert made.weights["b"] == pytest.approx(30)


def test_what_the_operator_states_counts() -> None:
    sizes = {"a": 10, "b": 20, "c": 1000}
    _, made = aggregate({"a": 1.0, "b": 1.0, "c": 1.0}, sizes, 1.0, sizes=("c:500",))
    assert made.weights["c"] == pytest.approx(500)
    _, made = aggregate({"a": 1.0, "b": 1.0, "c": 1.0}, sizes, 1.0, sizes=("c:1000",))
    assert made.weights["c"] == 1000
    assert made.processed == {}


@pytest.mark.parametrize("odd", ["c", "c:", ":5", "c:0", "c:-1", "c:1.5", "c:10000000000000"])
def test_a_size_is_a_name_and_a_number(odd: str) -> None:
    with pytest.raises(InvalidInput, match=r"validation\.sizes\.0 is "):
        ValidationSettings(sizes=(odd,))
    assert ValidationSettings(sizes=("a:b:12",)).stated_sizes == {"a:b": 12}


def test_a_long_change_is_clipped_to_the_last_rounds_median() -> None:
    sizes = dict.fromkeys("abc", 10)
    found, made = aggregate({"a": 1.0, "b": 2.0, "c": 90.0}, sizes, 2.0, clip_factor=1.5)
    assert found == pytest.approx((1 + 2 + 3) / 3)
    assert made.processed == {LENGTH: ["c"]}
    # As they came, or the bound would shrink from round to round.
    assert made.median_length == 2.0


def test_in_the_first_round_the_bound_is_this_rounds_median() -> None:
    sizes = dict.fromkeys("abc", 10)
    found, made = aggregate({"a": 1.0, "b": -2.0, "c": 90.0}, sizes, None, clip_factor=1.5)
    assert found == pytest.approx((1 - 2 + 3) / 3)
    assert made.processed == {LENGTH: ["c"]}


def test_who_did_not_move_says_nothing_of_lengths() -> None:
    sizes = dict.fromkeys("abcd", 10)
    found, made = aggregate({"a": 0.0, "b": 0.0, "c": 1.0, "d": 0.0}, sizes, None)
    assert found == pytest.approx(0.25)
    assert made.median_length == 1.0
    found, made = aggregate({"a": 0.0, "b": 0.0}, sizes, None)
    assert (found, made.median_length) == (0.0, None)


def test_a_stacks_clients_are_bounded_alike() -> None:
    stack = Stack(BROADCAST.params["w"], [[1.0], [2.0], [90.0]])
    for length in (None, 2.0):
        bounds = RelativeBounds(ValidationSettings(clip_factor=1.5), 10, length)
        made = BoundedAggregation(WeightedMean(BROADCAST.params, Experiment()), BROADCAST, bounds)
        for index, name in enumerate("abc"):
            member = StackMember(stack, index)
            made.add(Update(name, 10, member, Prototypes.empty(2), 0.0), 10)
        assert float(made.result()["w"]) == pytest.approx(2.0)
        assert made.processed == {LENGTH: ["c"]}


def noisy(engine: Engine) -> Engine:
    noise = 1e3 * torch.randn(8, 36, generator=torch.Generator().manual_seed(0))
    return TamperingEngine(engine, with_tensor("hidden.0.weight", lambda w: w + noise))


def test_after_noise_no_honest_client_is_rejected(images: Path) -> None:
    experiment = small(images, "fedavg", clients=5, validation__bounds="on")
    federation = build_federation(experiment, noisy)
    for _ in range(4):
        record = federation.run_round(evaluate=False)
        assert record.clients.rejected == {}
        assert VICTIM in record.processed[LENGTH]
        assert record.loss is not None
        assert record.loss < 5
    # Without bounds the model is gone.
    federation = build_federation(experiment.replace(validation__bounds="off"), noisy)
    federation.run_round(evaluate=False)
    record = federation.run_round(evaluate=False)
    assert record.clients.rejected or record.loss is None or record.loss > 50


def test_a_simulation_is_bounded_only_if_asked(images: Path) -> None:
    plain = build_federation(small(images, "fedavg"))
    off = build_federation(small(images, "fedavg", validation__bounds="off"))
    tight = build_federation(
        small(images, "fedavg", validation__bounds="on", validation__clip_factor=0.5)
    )
    for federation in (plain, off, tight):
        federation.run_round(evaluate=False)
    same = [plain.state.server.params[n].equal(v) for n, v in off.state.server.params.items()]
    assert all(same)
    assert plain.state.median_length is None
    assert tight.state.median_length is not None
    other = [plain.state.server.params[n].equal(v) for n, v in tight.state.server.params.items()]
    assert not all(other)


@pytest.mark.parametrize("method", ["mp-fedcl", "fedavg"])
def test_a_bounded_run_resumes_with_the_same_bits(
    images: Path, tmp_path: Path, method: str
) -> None:
    changes = {"validation__bounds": "on", "validation__clip_factor": 0.8, "model__hidden": HIDDEN}
    experiment = small(images, method, rounds=4, clients=6, **changes)
    whole = run(experiment, tmp_path / "whole")
    done: list[object] = []
    stop = Observer(on_round=done.append, should_stop=lambda: len(done) == 2)
    run(experiment, tmp_path / "parts", stop)
    assert len(read_records(tmp_path / "parts")) == 2
    resume(tmp_path / "parts")
    assert_same_run(whole.path, tmp_path / "parts")
    assert any(LENGTH in record["processed"] for record in read_records(whole.path))


def test_lengths_that_are_unknown_bound_nothing() -> None:
    bounds = RelativeBounds(ValidationSettings(), None, None)
    assert bounds.longest_change is None
    assert bounds.longest_of([]) is None
    assert bounds.share("a", 10**9) == 1
    assert bounds.judge_claim("a", 10**9) is None
    assert math.isinf(bounds._most_samples)


def test_sums_that_claim_too_much_are_rejected_with_the_remedy() -> None:
    bounds = RelativeBounds(ValidationSettings(), 10, None)
    assert bounds.judge_claim("a", 150) is None
    reason = bounds.judge_claim("c", 151)
    assert reason is not None
    assert reason.endswith("--validation.sizes c:151")
    stated = RelativeBounds(ValidationSettings(sizes=("c:151",)), 10, None)
    assert stated.judge_claim("c", 151) is None
    assert stated.judge_claim("c", 152) is not None


def test_a_prototype_of_a_class_that_was_not_announced_is_rejected(images: Path) -> None:
    federation = build_federation(small(images))
    counts = {name: [size, size, size] for name, size in federation.engine.sizes.items()}
    counts[VICTIM] = [0, *counts[VICTIM][1:]]

    def announce(engine: Engine) -> Engine:
        engine.label_counts = counts
        return engine

    record = build_federation(small(images), announce).run_round(evaluate=False)
    reason = record.clients.rejected[VICTIM]
    assert reason.startswith("prototypes of class 0 stand for")
    assert reason.endswith("this client has announced 0")
    assert list(record.clients.rejected) == [VICTIM]


def test_a_withheld_update_passes_the_bounds(images: Path) -> None:
    federation = build_federation(small(images, "local", validation__bounds="on"))
    record = federation.run_round(evaluate=False)
    assert record.clients.rejected == {}
    assert replace(federation.state, round=9).median_length is None
