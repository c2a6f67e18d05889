"""Sageflow and async-share, which look at what has come at ticks: by hand, and beside FedAvg."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from arrivals import (
    EQUAL_SPEEDS,
    arrival,
    fold,
    make,
    one,
    params_of,
    run,
)
from identities import assert_close_tensors, both_engines

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors
from mpfedcl.methods import Public, Server
from mpfedcl.methods.messages import Update
from mpfedcl.methods.sageflow import Sageflow
from mpfedcl.prototypes import Prototypes
from small_experiments import assert_same_tensors

# Sageflow


OPEN: dict[str, Any] = {
    "sageflow__entropy": 1e6,
    "sageflow__loss_power": 0.0,
    "sageflow__age_power": 0.0,
    "systems__tick": 1000.0,
}


@both_engines
def test_sageflow_without_thresholds_in_one_tick_equals_fedavg(images: Path, engine: str) -> None:
    common: dict[str, Any] = {"engine": engine, "public__size": 6}
    mine = params_of(images, "sageflow", **common, **OPEN)
    theirs = params_of(images, "fedavg", **common)
    if engine == "loop":
        assert_same_tensors(mine, theirs)
    assert_close_tensors(mine, theirs)


def test_stale_versions_count_less() -> None:
    groups = [arrival(3, staleness=3), arrival(0)]
    server = fold("sageflow", Server(one(9)), groups)
    assert float(server.params["w"]) == pytest.approx(3 * 1 / 3)
    fresh = fold("sageflow", Server(one(9)), groups, sageflow__age_power=200.0)
    assert float(fresh.params["w"]) == pytest.approx(0, abs=1e-100)
    half = fold("sageflow", Server(one(9)), [arrival(0)], sageflow__mixing=0.5)
    assert float(half.params["w"]) == 4.5
    assert float(fold("sageflow", Server(one(9)), []).params["w"]) == 9


def judge(method: Sageflow, logit: float, ticks: int = 0) -> float:
    """Return the weight of a model that gives the first class this logit, 5 public images of it."""
    inputs = torch.ones(5, 1, dtype=torch.float64)

    def apply(params: Tensors, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = torch.cat([inputs * params["w"], 0 * inputs], 1)
        return logits, logits

    method.public = Public(apply, inputs, torch.zeros(5, dtype=torch.int64))
    none = Prototypes.empty(1, torch.float64)
    private = {"ticks": torch.tensor(ticks)}
    return method.weigh(Update("a", 10, one(logit), none, 0.1), Server(one(0), private=private))


def test_models_are_weighted_by_their_public_loss() -> None:
    """Losses 0.5 and 1: with a power of 1 the first weighs twice as much."""
    method = make("sageflow")
    halves = [-math.log(math.exp(loss) - 1) for loss in (0.5, 1.0)]
    weights = [judge(method, logit) for logit in halves]
    assert weights == pytest.approx([20, 10])
    assert [w / sum(weights) for w in weights] == pytest.approx([2 / 3, 1 / 3])
    assert judge(method, 1e4) == pytest.approx(10 / 1e-8)


def test_uncertain_models_are_left_out_after_the_first_ticks() -> None:
    method = make("sageflow", sageflow__entropy=0.5, sageflow__warm_up=3)
    assert judge(method, 0.0, ticks=2) == pytest.approx(10 / math.log(2))
    assert judge(method, 0.0, ticks=3) == 0
    assert judge(method, 5.0, ticks=3) > 0


def test_left_out_clients_are_recorded_and_the_model_is_unchanged(images: Path) -> None:
    strict: dict[str, Any] = {
        "sageflow__entropy": 1e-9,
        "sageflow__warm_up": 0,
        "systems__tick": 1000.0,
    }
    loop, records = run(images, "sageflow", **strict)
    start = run(images, "sageflow", rounds=0, **strict)[0].state.server.params
    assert_same_tensors(loop.state.server.params, start)
    assert all(r.arrivals and len(r.arrivals.left_out) == 3 for r in records)
    assert all(r.arrivals and r.arrivals.version == 0 for r in records)
    assert records[0].clients.answered == ["client-0", "client-1", "client-2"]


def test_sageflow_needs_public_images(images: Path) -> None:
    with pytest.raises(InvalidInput, match=r"^public.size is 0; with sageflow it must be"):
        run(images, "sageflow", public__size=0)


# async-share


@both_engines
def test_async_share_at_equal_speeds_equals_fedavg(images: Path, engine: str) -> None:
    common: dict[str, Any] = {"engine": engine, **EQUAL_SPEEDS}
    mine = params_of(images, "async-share", **common)
    assert_close_tensors(mine, params_of(images, "fedavg", **common))


def test_long_run_weights_are_proportional_to_samples() -> None:
    """Clients that come every tick, every second and every fifth, with 10, 30 and 20 samples."""
    method = make("async-share", async_share__decay=0.999, async_share__staleness=0.0)
    sizes, periods = {"a": 10, "b": 30, "c": 20}, {"a": 1, "b": 2, "c": 5}
    none = Prototypes.empty(1, torch.float64)
    total, server = dict.fromkeys(sizes, 0.0), Server(one(0))
    for tick in range(1, 2001):
        came = [name for name in sizes if tick % periods[name] == 0]
        weights = [method.weigh(Update(n, sizes[n], {}, none, 0.1), server) for n in came]
        for name, weight in zip(came, weights, strict=True):
            total[name] += weight
        samples = sum(sizes[name] for name in came)
        each = arrival(1, samples=samples, share=samples / 60)._replace(names=came, weights=weights)
        server = method.arrive(server, [each])
    shares = [total[name] / sum(total.values()) for name in sizes]
    assert shares == pytest.approx([10 / 60, 30 / 60, 20 / 60], rel=0.01)


def test_weights_of_a_tick_sum_to_at_most_1() -> None:
    """A client that has never come before: its first weight is cut."""
    method = make("async-share")
    server = Server(one(4))
    for _ in range(20):
        server = method.arrive(server, [])
    assert float(server.params["w"]) == 4
    none = Prototypes.empty(1, torch.float64)
    weight = method.weigh(Update("a", 10, {}, none, 0.1), server)
    assert weight > 20
    late = arrival(1, share=0.5)._replace(weights=[weight])
    assert float(method.arrive(server, [late]).params["w"]) == 1
