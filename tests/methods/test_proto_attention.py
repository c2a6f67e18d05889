"""Prototype attention: margins by plain loops, and where the method is FedAvg."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from identities import after_rounds, assert_same_model, begin, both_engines, differ, server_of
from tiny_method_inputs import draw, make_method

from mpfedcl.methods import Server
from mpfedcl.methods._prototypes import CLASS_MEANS
from mpfedcl.methods.messages import Update
from mpfedcl.methods.proto_attention import find_margin
from mpfedcl.prototypes import Prototypes


def prototypes_of(labels: list[int], seed: int, width: int = 3) -> Prototypes:
    numbers = torch.tensor(labels, dtype=torch.int64)
    return Prototypes(draw(seed, len(labels), width), numbers, torch.ones_like(numbers))


def plain_margin(prototypes: Prototypes, means: dict[int, list[float]]) -> float:
    pairs = [(a, b) for a in means for b in means if a < b]
    unit = sum(math.dist(means[a], means[b]) for a, b in pairs) / len(pairs)
    margins = [
        min(math.dist(vector, means[c]) for c in means if c != label)
        - math.dist(vector, means[label])
        for vector, label in zip(
            prototypes.vectors.tolist(), prototypes.labels.tolist(), strict=True
        )
        if label in means
    ]
    return sum(margins) / len(margins) / unit if margins else 0.0


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1000),
    held=st.sets(st.integers(0, 4), max_size=5),
    known=st.sets(st.integers(0, 4), min_size=2, max_size=5),
)
def test_margin_matches_plain_loops(seed: int, held: set[int], known: set[int]) -> None:
    means = draw(seed + 1, 5, 3)
    means[[c for c in range(5) if c not in known]] = 0
    prototypes = prototypes_of(sorted(held), seed)
    wanted = plain_margin(prototypes, {c: means[c].tolist() for c in sorted(known)})
    assert find_margin(prototypes, means) == pytest.approx(wanted, rel=1e-9, abs=1e-12)


def test_undefined_margins_are_zero() -> None:
    one = torch.tensor([[0.0, 0.0], [1.0, 0.0]]).double()
    assert find_margin(prototypes_of([1], 3, 2), one) == 0
    same = torch.ones(2, 2).double()
    assert find_margin(prototypes_of([0, 1], 3, 2), same) == 0
    assert find_margin(Prototypes.empty(2, torch.float64), 2 * torch.eye(2).double()) == 0


def update_with(prototypes: Prototypes, size: int) -> Update:
    return Update("a", size, {}, prototypes, 0.5)


def test_weights_match_hand_computed_values() -> None:
    # Global means 2 apart; a client's own mean of class 0 lies 0.5 beyond the global one.
    means = torch.tensor([[0.0, 1.0], [2.0, 1.0], [0.0, 0.0]]).double()
    server = Server({}, private={CLASS_MEANS: means})
    own = Prototypes(
        torch.tensor([[-0.5, 1.0], [9.0, 9.0]]).double(), torch.tensor([0, 2]), torch.ones(2).long()
    )
    # Of class 2 there is no global mean. Margin (2.5 - 0.5) / 2 = 1.
    for prefers, sign in (("wide", 1), ("narrow", -1)):
        method = make_method("proto-attention", proto_attention__prefers=prefers)
        found = method.weigh(update_with(own, 7), server)
        assert found == pytest.approx(7 * math.exp(sign * 1.0))
    method = make_method("proto-attention", proto_attention__temperature=4.0)
    assert method.weigh(update_with(own, 7), server) == pytest.approx(7 * math.exp(0.25))
    assert method.weigh(update_with(own, 7), Server({})) == 7


def test_equal_margins_weigh_clients_by_samples() -> None:
    method = make_method("proto-attention")
    server = Server({}, private={CLASS_MEANS: draw(1, 4, 3)})
    weights = [method.weigh(update_with(prototypes_of([0, 2], 5), n), server) for n in (3, 30)]
    assert weights[1] / weights[0] == pytest.approx(10, rel=1e-15)


def test_no_weight_overflows() -> None:
    method = make_method("proto-attention", proto_attention__temperature=1e-9)
    server = Server({}, private={CLASS_MEANS: draw(1, 4, 3)})
    weights = [method.weigh(update_with(prototypes_of([0, 2], n), 60), server) for n in range(5)]
    assert all(0 < weight < math.inf for weight in weights)


@both_engines
def test_huge_temperature_equals_fedavg(images: Path, engine: str) -> None:
    found = after_rounds(
        images, "proto-attention", engine=engine, proto_attention__temperature=1e300
    )
    assert_same_model(found, after_rounds(images, "fedavg", engine=engine), engine)


@both_engines
def test_first_round_equals_fedavg_and_the_second_differs(images: Path, engine: str) -> None:
    found, wanted = (begin(images, each, engine=engine) for each in ("proto-attention", "fedavg"))
    for federation in (found, wanted):
        federation.run_round(evaluate=False)
    assert_same_model(found, wanted, engine)
    first, second = (each.run_round(evaluate=False) for each in (found, wanted))
    assert differ(server_of(found), server_of(wanted))
    # Clients are sent no prototypes.
    assert first.bytes["down"] == second.bytes["down"]
    assert first.bytes["up"] > second.bytes["up"]
    assert not found.state.server.extra


@both_engines
def test_average_uses_the_attention_weights(images: Path, engine: str) -> None:
    federation = begin(images, "proto-attention", engine=engine)
    federation.run_round(evaluate=False)
    means = federation.state.server.private[CLASS_MEANS]
    federation.run_round(evaluate=False, keep_models=True)
    models = dict(federation.engine.personal_models({}))
    weights = {
        name: size * math.exp(find_margin(federation.pool.of(name), means))
        for name, size in federation.engine.sizes.items()
    }
    for name, value in server_of(federation).items():
        total = sum(weight * models[each][name] for each, weight in weights.items())
        wanted = torch.as_tensor(total) / sum(weights.values())
        torch.testing.assert_close(value, wanted, rtol=0, atol=1e-12)
