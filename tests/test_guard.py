"""The guard: one bad update costs one client its round, and the others nothing."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mpfedcl.engines import Engine
from mpfedcl.exchange import Broadcast, Update
from mpfedcl.federation import Federation, RoundRecord
from mpfedcl.models import Tensors
from mpfedcl.prototypes import Prototypes
from small_runs import (
    METHODS,
    WrappedEngine,
    assert_same_tensors,
    build_federation,
    small,
    tensors_of,
)

VICTIM = "client-1"
WEIGHT = "hidden.0.weight"
BIAS = "classifier.bias"

Tamper = Callable[[Update], Sequence[Update]]


class TamperingEngine(WrappedEngine):
    """An engine whose updates from some clients are tampered with, or held back, on their way."""

    def __init__(self, engine: Engine, tamper: Tamper, victims: Sequence[str] = (VICTIM,)) -> None:
        super().__init__(engine)
        self._tamper = tamper
        self._victims = victims

    def meddle(
        self, broadcast: Broadcast, names: Sequence[str], updates: Iterable[Update]
    ) -> Iterator[Update]:
        for update in updates:
            yield from self._tamper(update) if update.client in self._victims else [update]


def drop(_: Update) -> list[Update]:
    return []


def with_tensor(name: str, change: Callable[[Tensor], Tensor]) -> Tamper:
    def tamper(update: Update) -> list[Update]:
        sums = tensors_of(update)
        return [replace(update, sums={**sums, name: change(sums[name])})]

    return tamper


def with_value(index: int, value: float, name: str = WEIGHT) -> Tamper:
    def change(tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        changed.view(-1)[index] = value
        return changed

    return with_tensor(name, change)


def with_sums(change: Callable[[Tensors], Tensors]) -> Tamper:
    return lambda update: [replace(update, sums=change(dict(tensors_of(update))))]


def with_field(**fields: Any) -> Tamper:
    return lambda update: [replace(update, **fields)]


def forge(rows: Prototypes, **columns: Tensor) -> Prototypes:
    """Return prototypes as no honest program can make them: their own checks are passed by."""
    forged = object.__new__(Prototypes)
    for name in ("vectors", "labels", "counts"):
        object.__setattr__(forged, name, columns.get(name, getattr(rows, name)))
    return forged


def with_rows(change: Callable[[Prototypes], dict[str, Tensor]]) -> Tamper:
    return lambda update: [replace(update, rows=forge(update.rows, **change(update.rows)))]


def filled(tensor: Tensor, value: float) -> Tensor:
    """Return a copy whose first number is another."""
    changed = tensor.clone()
    changed.view(-1)[0] = value
    return changed


def too_many(rows: Prototypes) -> dict[str, Tensor]:
    """Return three prototypes of one class; the limit is two."""
    return {
        "vectors": rows.vectors[:1].repeat(3, 1),
        "labels": rows.labels[:1].repeat(3),
        "counts": torch.ones(3, dtype=torch.int64),
    }


BAD_WEIGHTS: dict[str, tuple[Tamper, str]] = {
    "NaN": (with_value(5, math.nan), "not finite"),
    "NaN in the last tensor": (with_value(-1, math.nan, BIAS), "not finite"),
    "infinity": (with_value(0, math.inf), "not finite"),
    "minus infinity": (with_value(0, -math.inf), "not finite"),
    "huge": (with_value(0, 2e6), "changed by 2e+06; at most 1e+06"),
    "huge beyond its square": (with_value(0, 1e30), "not finite"),
    "shape that broadcasts": (with_tensor(BIAS, lambda b: b[:1]), "shape [1]; expected [3]"),
    "scalar": (with_tensor(BIAS, lambda b: b.sum()), "shape []; expected [3]"),
    "one axis more": (with_tensor(BIAS, lambda b: b.unsqueeze(0)), "shape [1, 3]; expected [3]"),
    "transposed": (with_tensor(WEIGHT, lambda w: w.T), "shape [36, 8]; expected [8, 36]"),
    "empty": (with_tensor(BIAS, lambda b: b[:0]), "shape [0]; expected [3]"),
    "float64": (with_tensor(WEIGHT, Tensor.double), "type torch.float64"),
    "float16": (with_tensor(WEIGHT, Tensor.half), "type torch.float16"),
    "integers": (with_tensor(WEIGHT, Tensor.long), "type torch.int64"),
    "complex": (with_tensor(WEIGHT, lambda w: w.to(torch.complex64)), "type torch.complex64"),
    "missing tensor": (with_sums(lambda s: {n: s[n] for n in s if n != BIAS}), BIAS),
    "no tensors": (with_sums(lambda _: {}), "missing or unknown"),
    "renamed tensor": (
        with_sums(lambda s: {n.replace(BIAS, "bias"): v for n, v in s.items()}),
        "['bias', 'classifier.bias']",
    ),
    "extra tensor": (with_sums(lambda s: {**s, "backdoor": s[BIAS]}), "backdoor"),
}
BAD_NUMBERS: dict[str, tuple[Tamper, str]] = {
    "num_samples 1e15": (with_field(num_samples=10**15), "num_samples is 1000000000000000"),
    "num_samples negative": (with_field(num_samples=-5), "num_samples is -5"),
    "num_samples 0": (with_field(num_samples=0), "num_samples is 0"),
    "num_samples bool": (with_field(num_samples=True), "num_samples is True"),
    "num_samples float": (
        lambda update: [replace(update, num_samples=float(update.num_samples))],  # type: ignore[arg-type]
        "num_samples is ",
    ),
    "num_samples one more": (
        lambda update: [replace(update, num_samples=update.num_samples + 1)],
        "num_samples is ",
    ),
    "loss NaN": (with_field(loss=math.nan), "loss is nan"),
    "loss infinite": (with_field(loss=math.inf), "loss is inf"),
    "loss an integer": (with_field(loss=1), "loss is 1"),
}
BAD_PROTOTYPES: dict[str, tuple[Tamper, str]] = {
    "label too large": (with_rows(lambda r: {"labels": filled(r.labels, 3)}), "labels"),
    "label negative": (with_rows(lambda r: {"labels": filled(r.labels, -1)}), "labels"),
    "label far too large": (with_rows(lambda r: {"labels": filled(r.labels, 2**40)}), "labels"),
    "labels as floats": (with_rows(lambda r: {"labels": r.labels.float()}), "labels has type"),
    "labels in two axes": (with_rows(lambda r: {"labels": r.labels.unsqueeze(0)}), "labels"),
    "a single label": (with_rows(lambda r: {"labels": r.labels.sum()}), "labels"),
    "count 0": (with_rows(lambda r: {"counts": filled(r.counts, 0)}), "counts"),
    "count negative": (with_rows(lambda r: {"counts": filled(r.counts, -7)}), "counts"),
    "more than its samples": (with_rows(lambda r: {"counts": filled(r.counts, 61)}), "counts"),
    "counts that overflow": (
        with_rows(lambda r: {"counts": torch.full_like(r.counts, 2**62)}),
        "counts",
    ),
    "counts as floats": (with_rows(lambda r: {"counts": r.counts.double()}), "counts has type"),
    "a count too few": (with_rows(lambda r: {"counts": r.counts[1:]}), "counts has shape"),
    "vectors NaN": (with_rows(lambda r: {"vectors": filled(r.vectors, math.nan)}), "not finite"),
    "vectors infinite": (
        with_rows(lambda r: {"vectors": filled(r.vectors, math.inf)}),
        "not finite",
    ),
    "vectors huge": (with_rows(lambda r: {"vectors": filled(r.vectors, 2e6)}), "length 2e+06"),
    "vectors float64": (with_rows(lambda r: {"vectors": r.vectors.double()}), "torch.float64"),
    "vectors as integers": (with_rows(lambda r: {"vectors": r.vectors.long()}), "torch.int64"),
    "wrong dimension": (with_rows(lambda r: {"vectors": r.vectors[:, :3]}), "vectors has shape"),
    "dimension that broadcasts": (
        with_rows(lambda r: {"vectors": r.vectors[:, :1]}),
        "vectors has shape",
    ),
    "none, of a wrong dimension": (
        lambda update: [replace(update, rows=Prototypes.empty(999))],
        "vectors has shape",
    ),
    "too many of a class": (with_rows(too_many), "a class has 3 prototypes; at most 2"),
}
ALL_BAD = BAD_WEIGHTS | BAD_NUMBERS | BAD_PROTOTYPES


def run_rounds(federation: Federation, rounds: int = 2) -> list[RoundRecord]:
    return [federation.run_round(evaluate=True) for _ in range(rounds)]


def assert_same_state(left: Federation, right: Federation) -> None:
    assert left.state.round == right.state.round
    assert_same_tensors(left.state.server.params, right.state.server.params)
    assert_same_tensors(left.state.server.extra, right.state.server.extra)
    assert left.pool.names == right.pool.names
    for column in ("vectors", "labels", "counts", "owners"):
        assert torch.equal(getattr(left.pool, column), getattr(right.pool, column))


@pytest.mark.parametrize("name", ALL_BAD)
def test_a_bad_update_is_as_if_it_had_not_come(images: Path, name: str) -> None:
    tamper, reason = ALL_BAD[name]
    attacked = build_federation(small(images), lambda engine: TamperingEngine(engine, tamper))
    without = build_federation(small(images), lambda engine: TamperingEngine(engine, drop))
    for record, reference in zip(run_rounds(attacked), run_rounds(without), strict=True):
        assert record.clients.answered == ["client-0", "client-2"]
        assert record.clients.missing == []
        assert list(record.clients.rejected) == [VICTIM]
        assert reason in record.clients.rejected[VICTIM]
        assert not record.unchanged
        assert (record.loss, record.accuracy) == (reference.loss, reference.accuracy)
        assert (record.sent, record.bytes["down"]) == (reference.sent, reference.bytes["down"])
    assert_same_state(attacked, without)


@pytest.mark.parametrize("method", ["local", "fedavg", "fedprox"])
def test_prototypes_that_the_method_does_not_share_are_rejected(images: Path, method: str) -> None:
    def add_prototype(update: Update) -> list[Update]:
        one = torch.ones(1, dtype=torch.int64)
        return [replace(update, rows=Prototypes(torch.ones(1, 4), one, one))]

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


def test_an_unknown_client_is_rejected_and_the_one_it_hid_is_missing(images: Path) -> None:
    attacked = build_federation(
        small(images), lambda engine: TamperingEngine(engine, with_field(client="mallory"))
    )
    without = build_federation(small(images), lambda engine: TamperingEngine(engine, drop))
    for record in run_rounds(attacked):
        assert "'mallory' is not a client" in record.clients.rejected["mallory"]
        assert record.clients.missing == [VICTIM]
    run_rounds(without)
    assert_same_state(attacked, without)


def test_a_second_answer_counts_for_nothing(images: Path) -> None:
    def answer_twice(update: Update) -> list[Update]:
        other = {name: value + 1 for name, value in tensors_of(update).items()}
        return [update, replace(update, sums=other)]

    experiment = small(images, engine="loop")
    attacked = build_federation(experiment, lambda engine: TamperingEngine(engine, answer_twice))
    honest = build_federation(experiment)
    for record in run_rounds(attacked):
        assert record.clients.answered == ["client-0", "client-1", "client-2"]
        assert record.clients.rejected == {f"{VICTIM} (again)": "this client answered twice"}
    run_rounds(honest)
    assert_same_state(attacked, honest)


def test_a_client_that_was_not_asked_is_rejected(images: Path) -> None:
    experiment = small(images, fraction=0.3)
    (record,) = run_rounds(build_federation(experiment), 1)
    (asked,) = record.clients.answered
    other = next(name for name in ("client-0", "client-1", "client-2") if name != asked)
    sizes = build_federation(experiment)._engine.sizes

    def impersonate(update: Update) -> list[Update]:
        return [replace(update, client=other, num_samples=sizes[other], rows=Prototypes.empty(4))]

    federation = build_federation(
        experiment, lambda engine: TamperingEngine(engine, impersonate, [asked])
    )
    (record,) = run_rounds(federation, 1)
    assert record.unchanged
    assert "not asked" in record.clients.rejected[other]
    assert record.clients.missing == [asked]


def test_a_missing_client_is_listed(images: Path) -> None:
    federation = build_federation(small(images), lambda engine: TamperingEngine(engine, drop))
    for record in run_rounds(federation):
        assert record.clients.answered == ["client-0", "client-2"]
        assert record.clients.missing == [VICTIM]
        assert record.clients.rejected == {}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("evaluate", [True, False])
def test_nobody_accepted_leaves_the_state_unchanged(
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
    assert federation.state.rows == before.rows
    is_bad = False
    assert federation.run_round(evaluate=evaluate).clients.answered == [*everyone]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["iid", "label", "quantity"])
def test_an_honest_run_is_never_rejected(images: Path, method: str, kind: str) -> None:
    experiment = small(images, method, partition__kind=kind, partition__alpha=0.3, train__lr=0.5)
    for record in run_rounds(build_federation(experiment), 3):
        assert record.clients.rejected == {}
        assert record.clients.missing == []
        assert len(record.clients.answered) == 3


def test_the_bound_on_norms_is_a_setting(images: Path) -> None:
    federation = build_federation(small(images, guard__max_norm=1e-4))
    (record,) = run_rounds(federation, 1)
    assert record.unchanged
    assert all("at most 0.0001" in reason for reason in record.clients.rejected.values())


def test_the_bound_holds_for_the_change_not_for_the_weights(images: Path) -> None:
    federation = build_federation(small(images, guard__max_norm=1.0))
    weights = federation.state.server.params.values()
    assert math.sqrt(sum(float(value.square().sum()) for value in weights)) > 1
    for record in run_rounds(federation):
        assert record.clients.rejected == {}


# What looks sound and is not


def stretch(length: float) -> Tamper:
    """Return a tampering that makes the client's first prototype that long."""

    def tamper(update: Update) -> list[Update]:
        vectors = update.rows.vectors.clone()
        vectors[0] *= length / vectors[0].norm()
        return [replace(update, rows=replace(update.rows, vectors=vectors))]

    return tamper


@pytest.mark.parametrize("length", [1.01, 100.0, 9e5])
def test_a_mean_of_unit_vectors_is_no_longer_than_one(images: Path, length: float) -> None:
    attacked = build_federation(
        small(images), lambda engine: TamperingEngine(engine, stretch(length))
    )
    for record in run_rounds(attacked):
        assert record.clients.rejected[VICTIM].startswith("a prototype has length")


@pytest.mark.parametrize(
    "changes",
    [
        {"sums": [1, 2]},
        {"sums": {WEIGHT: [1.0]}},
        {"sums": {WEIGHT: torch.zeros(8, 36).to_sparse()}},
        {"sums": {WEIGHT: torch.zeros(8, 36, device="meta")}},
        {"rows": None},
        {"client": ["client-1"]},
    ],
)
def test_what_is_no_update_costs_nobody_else(images: Path, changes: dict[str, Any]) -> None:
    attacked = build_federation(
        small(images), lambda engine: TamperingEngine(engine, with_field(**changes))
    )
    without = build_federation(small(images), lambda engine: TamperingEngine(engine, drop))
    for record in run_rounds(attacked):
        assert len(record.clients.rejected) == 1
        assert record.clients.answered == ["client-0", "client-2"]
    run_rounds(without)
    assert_same_state(attacked, without)


def test_no_graph_is_kept_of_what_a_client_sent(images: Path) -> None:
    def attach(update: Update) -> list[Update]:
        sums = {name: value.clone().requires_grad_() for name, value in tensors_of(update).items()}
        return [replace(update, sums=sums)]

    federation = build_federation(small(images), lambda engine: TamperingEngine(engine, attach))
    run_rounds(federation)
    assert not any(value.requires_grad for value in federation.state.server.params.values())


@pytest.mark.parametrize("method", ["fedproto", "local"])
def test_a_rejected_client_goes_back_to_what_it_was(images: Path, method: str) -> None:
    experiment = small(images, method)
    federation = build_federation(
        experiment, lambda engine: TamperingEngine(engine, with_field(loss=float("nan")))
    )
    before = federation._engine.state()
    run_rounds(federation, 1)
    kept = {name.split("/")[1] for name in federation._engine.state()}
    assert before == {}
    assert kept == {"client-0", "client-2"}
