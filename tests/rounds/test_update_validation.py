"""Update validation: an invalid update is rejected and does not affect other clients."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tampered_updates import (
    ALL_BAD,
    BIAS,
    VICTIM,
    WEIGHT,
    Tamper,
    TamperingEngine,
    assert_same_state,
    drop,
    run_rounds,
    with_field,
    with_sums,
)

from mpfedcl.data.loading import load_data_and_model
from mpfedcl.engines import Engine
from mpfedcl.methods import Server
from mpfedcl.methods.fedavg import FedAvg
from mpfedcl.methods.messages import Update
from mpfedcl.prototypes import Prototypes
from mpfedcl.rounds.loop import RoundLoop
from mpfedcl.rounds.record import RoundRecord
from small_experiments import (
    METHODS,
    assemble_federation,
    assert_same_tensors,
    build_federation,
    small,
    tensors_of,
)

pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def without(images: Path) -> tuple[RoundLoop, list[RoundRecord]]:
    """A federation whose second client never answers, and its rounds."""
    federation = build_federation(small(images), lambda engine: TamperingEngine(engine, drop))
    return federation, run_rounds(federation)


@pytest.mark.parametrize("name", ALL_BAD)
def test_invalid_update_does_not_affect_the_model(
    images: Path, without: tuple[RoundLoop, list[RoundRecord]], name: str
) -> None:
    tamper, reason = ALL_BAD[name]
    attacked = build_federation(small(images), lambda engine: TamperingEngine(engine, tamper))
    for record, reference in zip(run_rounds(attacked), without[1], strict=True):
        assert record.clients.answered == ["client-0", "client-2"]
        assert record.clients.missing == []
        assert list(record.clients.rejected) == [VICTIM]
        assert reason in record.clients.rejected[VICTIM]
        assert not record.unchanged
        assert (record.loss, record.accuracy) == (reference.loss, reference.accuracy)
        assert (record.sent, record.bytes["down"]) == (reference.sent, reference.bytes["down"])
    assert_same_state(attacked, without[0])


@pytest.mark.parametrize("method", ["local", "fedavg", "fedprox"])
def test_prototypes_that_the_method_does_not_share_are_rejected(images: Path, method: str) -> None:
    def add_prototype(update: Update) -> list[Update]:
        one = torch.ones(1, dtype=torch.int64)
        return [replace(update, prototypes=Prototypes(torch.ones(1, 4), one, one))]

    federation = build_federation(
        small(images, method), lambda engine: TamperingEngine(engine, add_prototype)
    )
    (record,) = run_rounds(federation, 1)
    assert "shares none" in record.clients.rejected[VICTIM]
    assert len(federation.pool) == 0


@pytest.mark.parametrize("method", ["local", "fedproto"])
def test_weights_that_the_method_does_not_share_are_rejected(images: Path, method: str) -> None:
    tamper = with_sums(lambda _: {BIAS: torch.zeros(3)})
    federation = build_federation(
        small(images, method), lambda engine: TamperingEngine(engine, tamper)
    )
    (record,) = run_rounds(federation, 1)
    assert BIAS in record.clients.rejected[VICTIM]


def test_negative_running_variance_is_rejected(images: Path) -> None:
    experiment = small(images, "fedavg", model__name="own_models:WithNorm")
    data, model = load_data_and_model(experiment.resolved(), torch.device("cpu"))
    variance = "norm.running_var"
    tamper = with_sums(lambda sums: {**sums, variance: -sums[variance]})
    federation = assemble_federation(
        experiment.resolved(), data, model, lambda engine: TamperingEngine(engine, tamper)
    )
    for record in run_rounds(federation):
        assert record.clients.rejected[VICTIM] == f"tensor {variance} holds a variance below 0"


def test_unknown_client_is_rejected_and_the_replaced_one_is_missing(
    images: Path, without: tuple[RoundLoop, list[RoundRecord]]
) -> None:
    attacked = build_federation(
        small(images), lambda engine: TamperingEngine(engine, with_field(client="mallory"))
    )
    for record in run_rounds(attacked):
        assert "'mallory' is not a client" in record.clients.rejected["mallory"]
        assert record.clients.missing == [VICTIM]
    assert_same_state(attacked, without[0])


def test_second_update_of_a_client_is_rejected(images: Path) -> None:
    def answer_twice(update: Update) -> list[Update]:
        other = {name: value + 1 for name, value in tensors_of(update).items()}
        return [update, replace(update, averaged=other)]

    experiment = small(images, engine="loop")
    attacked = build_federation(experiment, lambda engine: TamperingEngine(engine, answer_twice))
    honest = build_federation(experiment)
    for record in run_rounds(attacked):
        assert record.clients.answered == ["client-0", "client-1", "client-2"]
        assert record.clients.rejected == {f"{VICTIM} (again)": "this client answered twice"}
    run_rounds(honest)
    assert_same_state(attacked, honest)


def test_client_that_was_not_sampled_is_rejected(images: Path) -> None:
    experiment = small(images, fraction=0.3)
    (record,) = run_rounds(build_federation(experiment), 1)
    (asked,) = record.clients.answered
    other = next(name for name in ("client-0", "client-1", "client-2") if name != asked)
    sizes = build_federation(experiment).engine.sizes

    def impersonate(update: Update) -> list[Update]:
        return [
            replace(update, client=other, num_samples=sizes[other], prototypes=Prototypes.empty(4))
        ]

    federation = build_federation(
        experiment, lambda engine: TamperingEngine(engine, impersonate, [asked])
    )
    (record,) = run_rounds(federation, 1)
    assert record.unchanged
    assert "not asked" in record.clients.rejected[other]
    assert record.clients.missing == [asked]


def test_missing_client_is_listed(images: Path) -> None:
    federation = build_federation(small(images), lambda engine: TamperingEngine(engine, drop))
    for record in run_rounds(federation):
        assert record.clients.answered == ["client-0", "client-2"]
        assert record.clients.missing == [VICTIM]
        assert record.clients.rejected == {}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("evaluate", [True, False])
def test_round_with_only_rejected_updates_changes_nothing(
    images: Path, method: str, evaluate: bool
) -> None:
    is_bad = False

    def tamper(update: Update) -> list[Update]:
        return [replace(update, loss=math.nan)] if is_bad else [update]

    everyone = ("client-0", "client-1", "client-2")
    federation = build_federation(
        small(images, method), lambda engine: TamperingEngine(engine, tamper, everyone)
    )
    assert not federation.run_round(evaluate=evaluate).unchanged
    before = federation.state
    params = {name: value.clone() for name, value in before.server.params.items()}
    is_bad = True
    record = federation.run_round(evaluate=evaluate)
    assert record.unchanged
    assert record.loss is None
    assert list(record.clients.rejected) == [*everyone]
    assert federation.state.round == before.round + 1
    assert_same_tensors(federation.state.server.params, params)
    assert federation.state.prototypes == before.prototypes
    is_bad = False
    assert federation.run_round(evaluate=evaluate).clients.answered == [*everyone]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["iid", "label", "quantity"])
def test_honest_updates_are_never_rejected(images: Path, method: str, kind: str) -> None:
    experiment = small(images, method, partition__kind=kind, partition__alpha=0.3, train__lr=0.5)
    for record in run_rounds(build_federation(experiment), 3):
        assert record.clients.rejected == {}
        assert record.clients.missing == []
        assert len(record.clients.answered) == 3


def test_max_norm_is_a_setting(images: Path) -> None:
    federation = build_federation(small(images, validation__max_norm=1e-4))
    (record,) = run_rounds(federation, 1)
    assert record.unchanged
    assert all("at most 0.0001" in reason for reason in record.clients.rejected.values())


def test_max_norm_bounds_the_change_not_the_weights(images: Path) -> None:
    federation = build_federation(small(images, validation__max_norm=1.0))
    weights = federation.state.server.params.values()
    assert math.sqrt(sum(float(value.square().sum()) for value in weights)) > 1
    for record in run_rounds(federation):
        assert record.clients.rejected == {}


# Updates that look valid


def stretch(length: float) -> Tamper:
    """Return a tampering that scales the client's first prototype to the norm `length`."""

    def tamper(update: Update) -> list[Update]:
        vectors = update.prototypes.vectors.clone()
        vectors[0] *= length / vectors[0].norm()
        return [replace(update, prototypes=replace(update.prototypes, vectors=vectors))]

    return tamper


@pytest.mark.parametrize("length", [1.01, 100.0, 9e5])
def test_prototype_with_a_norm_above_one_is_rejected(images: Path, length: float) -> None:
    attacked = build_federation(
        small(images), lambda engine: TamperingEngine(engine, stretch(length))
    )
    for record in run_rounds(attacked):
        assert record.clients.rejected[VICTIM].startswith("a prototype has norm")


@pytest.mark.parametrize(
    ("count", "reasons"), [(8, []), (9, ["a class has 9 prototypes; at most 8"])]
)
def test_prototypes_per_class_are_limited(images: Path, count: int, reasons: list[str]) -> None:
    ones = torch.ones(count, dtype=torch.int64)
    send = with_field(prototypes=Prototypes(torch.eye(count, 4), 0 * ones, ones))
    experiment = small(images, prototypes__per_class="auto", partition__kind="iid")
    federation = build_federation(experiment, lambda engine: TamperingEngine(engine, send))
    (record,) = run_rounds(federation, 1)
    assert list(record.clients.rejected.values()) == reasons


@pytest.mark.parametrize(
    "changes",
    [
        {"averaged": [1, 2]},
        {"averaged": {WEIGHT: [1.0]}},
        {"averaged": {WEIGHT: torch.zeros(8, 36).to_sparse()}},
        {"averaged": {WEIGHT: torch.zeros(8, 36, device="meta")}},
        {"prototypes": None},
        {"client": ["client-1"]},
    ],
)
def test_malformed_update_does_not_affect_other_clients(
    images: Path, changes: dict[str, Any]
) -> None:
    attacked = build_federation(
        small(images), lambda engine: TamperingEngine(engine, with_field(**changes))
    )
    without = build_federation(small(images), lambda engine: TamperingEngine(engine, drop))
    for record in run_rounds(attacked):
        assert len(record.clients.rejected) == 1
        assert record.clients.answered == ["client-0", "client-2"]
    run_rounds(without)
    assert_same_state(attacked, without)


def test_autograd_graph_of_an_update_is_dropped(images: Path) -> None:
    def attach(update: Update) -> list[Update]:
        sums = {name: value.clone().requires_grad_() for name, value in tensors_of(update).items()}
        return [replace(update, averaged=sums)]

    federation = build_federation(small(images), lambda engine: TamperingEngine(engine, attach))
    run_rounds(federation)
    assert not any(value.requires_grad for value in federation.state.server.params.values())


@pytest.mark.parametrize("method", ["fedproto", "local"])
def test_state_of_a_rejected_client_is_rolled_back(images: Path, method: str) -> None:
    experiment = small(images, method)
    federation = build_federation(
        experiment, lambda engine: TamperingEngine(engine, with_field(loss=float("nan")))
    )
    before = federation.engine.state()
    run_rounds(federation, 1)
    kept = {name.split("/")[1] for name in federation.engine.state()}
    assert before == {}
    assert kept == {"client-0", "client-2"}


class OddWeights(FedAvg):
    """Weights clients by a formula that fails for one of them."""

    weights = {"client-0": 2.0, VICTIM: math.nan, "client-2": 3.0}  # noqa: RUF012

    def weigh(self, update: Update, server: Server) -> float:
        return self.weights[update.client]


@pytest.mark.parametrize("weight", [math.nan, math.inf, -1.0])
def test_client_with_an_invalid_weight_is_rejected(
    images: Path, weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OddWeights.weights, VICTIM, weight)
    federation = build_federation(small(images, "fedavg"), method_class=OddWeights)
    record = federation.run_round(evaluate=False)
    assert record.clients.answered == ["client-0", "client-2"]
    assert "it must be finite and not negative" in record.clients.rejected[VICTIM]
    assert all(bool(each.isfinite().all()) for each in federation.state.server.params.values())


def test_client_whose_weight_fails_is_rejected(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(OddWeights.weights, VICTIM)
    federation = build_federation(small(images, "fedavg"), method_class=OddWeights)
    record = federation.run_round(evaluate=False)
    assert record.clients.rejected == {VICTIM: "it cannot be weighed (KeyError)"}


def test_withheld_update_is_rejected_unless_the_method_allows_it(images: Path) -> None:
    def tamper(engine: Engine) -> Engine:
        return TamperingEngine(engine, with_field(averaged=None))

    record = build_federation(small(images, "fedavg"), tamper).run_round(evaluate=False)
    reason = "it withholds its update; this method never does"
    assert record.clients.rejected == {VICTIM: reason}
