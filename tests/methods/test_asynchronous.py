"""FedAsync and FedAT: numbers by hand, and what they are equal to.

Where FedAvg is the measure its rounds are on the same clock.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from arrivals import CLOCK, arrival, fold, make, one, params_of, run
from identities import assert_close_tensors, both_engines

from mpfedcl.methods import (
    Asynchronous,
    Batch,
    Context,
    Server,
    built_in_methods,
)
from mpfedcl.methods.fedasync import FedAsync
from mpfedcl.methods.fedat import weigh_tiers
from small_experiments import assert_same_tensors

ASYNCHRONOUS = sorted(
    name for name, each in built_in_methods().items() if issubclass(each, Asynchronous)
)


@pytest.mark.parametrize("method", ASYNCHRONOUS)
def test_defaults_of_a_method_differ_from_fedavg(images: Path, method: str) -> None:
    loop, records = run(images, method, rounds=2)
    public = {"public__size": 1000} if method == "sageflow" else {}
    averaged = params_of(images, "fedavg", rounds=2, **public)
    mine = loop.state.server.params
    assert any(not torch.allclose(mine[n], averaged[n], rtol=1e-6) for n in mine)
    start = run(images, "fedavg", rounds=0, **public)[0].state.server.params
    assert any(not torch.equal(mine[n], start[n]) for n in mine), "it does not move"
    assert all(record.arrivals for record in records)


# FedAsync


@both_engines
def test_fedasync_one_at_a_time_equals_fedavg_with_one_client(images: Path, engine: str) -> None:
    """In the same order: both draw by the same key. To the bit where sums are taken alike."""
    common: dict[str, Any] = {"rounds": 4, "fraction": 0.3, "engine": engine}
    mine = params_of(images, "fedasync", **common, fedasync__mixing=1.0, fedasync__pull=0.0)
    theirs = params_of(images, "fedavg", **common)
    if engine == "loop":
        assert_same_tensors(mine, theirs)
    assert_close_tensors(mine, theirs)


def test_fedasync_without_mixing_keeps_the_initial_model(images: Path) -> None:
    start = run(images, "fedasync", rounds=0)[0].state.server.params
    assert_same_tensors(params_of(images, "fedasync", fedasync__mixing=0.0), start)


def test_fedasync_matches_a_hand_computed_step() -> None:
    server = fold("fedasync", Server(one(0)), [arrival(1, staleness=1)], fedasync__mixing=0.5)
    assert float(server.params["w"]) == pytest.approx(0.353553, abs=1e-6)


def test_three_staleness_functions_match_their_formulas() -> None:
    def fades(kind: str, a: float) -> list[float]:
        method: FedAsync = make(
            "fedasync", fedasync__staleness=kind, fedasync__a=a, fedasync__b=4.0
        )
        return [method.fade(staleness) for staleness in (0, 4, 5, 8)]

    assert fades("constant", 0.5) == [1, 1, 1, 1]
    assert fades("polynomial", 0.5) == pytest.approx([1, 5**-0.5, 6**-0.5, 1 / 3])
    assert fades("hinge", 10) == pytest.approx([1, 1, 1 / 11, 1 / 41])
    # A gentle hinge never counts for more than what is fresh.
    assert fades("hinge", 0.1)[2] < 1


@pytest.mark.parametrize("method", ["fedasync", "fedat", "aso-fed"])
def test_proximal_term_refers_to_the_model_that_was_sent(method: str) -> None:
    section = method.replace("-", "")
    made = make(method, **{f"{section}__pull": 3.0})
    start, weights = one(1.0), {"w": torch.tensor([1.5], dtype=torch.float64, requires_grad=True)}
    batch = Batch(torch.zeros(1, 1), torch.tensor([0]), torch.tensor([True]))
    logits = torch.zeros(1, 3, dtype=torch.float64)
    context = Context(lambda *_: (logits, logits), start, None, {})
    loss = made.loss(weights, batch, context)
    assert float(loss.detach()) == pytest.approx(math.log(3) + 3 / 2 * 0.25)
    (slope,) = torch.autograd.grad(loss, [weights["w"]])
    assert float(slope) == pytest.approx(3 * 0.5)


# FedAT


@both_engines
def test_fedat_with_one_tier_equals_fedavg(images: Path, engine: str) -> None:
    mine, records = run(images, "fedat", fedat__tiers=1, fedat__pull=0.0, engine=engine, **CLOCK)
    theirs, rounds = run(images, "fedavg", engine=engine, **CLOCK)
    if engine == "loop":
        assert_same_tensors(mine.state.server.params, theirs.state.server.params)
    assert_close_tensors(mine.state.server.params, theirs.state.server.params)
    assert [r.virtual_seconds for r in records] == [r.virtual_seconds for r in rounds]
    assert [r.bytes for r in records] == [r.bytes for r in rounds]
    assert [r.loss for r in records] == pytest.approx([r.loss for r in rounds])


def test_fedat_with_one_tier_draws_the_same_clients_as_fedavg(images: Path) -> None:
    common: dict[str, Any] = {"fraction": 0.6, "clients": 5, **CLOCK}
    mine = params_of(images, "fedat", fedat__tiers=1, fedat__pull=0.0, **common)
    assert_same_tensors(mine, params_of(images, "fedavg", **common))


def test_tier_weights_are_the_reversed_update_counts() -> None:
    assert weigh_tiers([4, 1, 0]) == [0, 0.2, 0.8]
    assert weigh_tiers([2, 2]) == [0.5, 0.5]


def test_fedat_matches_hand_computed_steps() -> None:
    """Two tiers that start at 1: the first answer of the fast one makes (T) = (2, 1)."""
    first = fold("fedat", Server(one(3)), [arrival(0, tier=0, num_tiers=2)])
    assert float(first.params["w"]) == pytest.approx(1 / 3 * 0 + 2 / 3 * 3)
    second = fold("fedat", first, [arrival(6, tier=1, num_tiers=2)])
    assert float(second.params["w"]) == pytest.approx((0 + 6) / 2)
    # To the letter, the fast tier's work counts for nothing until the slow one has answered.
    literal = fold("fedat", Server(one(3)), [arrival(0, tier=0, num_tiers=2)], fedat__start=0)
    assert float(literal.params["w"]) == 3


def test_tier_models_are_never_sent(images: Path) -> None:
    loop, records = run(images, "fedat", fedat__tiers=2)
    assert loop.state.server.extra == {}
    assert {name.split(".")[0] for name in loop.state.server.private} == {
        "rounds",
        "tier0",
        "tier1",
    }
    assert records[0].bytes["up"] == 3 * loop.broadcast().num_bytes
