"""Processors of updates: clipping by hand, in stacks, and on the server."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from client_stacks import Stack
from hypothesis import given
from hypothesis import strategies as st
from tampered_updates import VICTIM, TamperingEngine, with_field, with_tensor
from torch import Tensor

from mpfedcl.engines import Engine
from mpfedcl.experiment import Experiment
from mpfedcl.methods.messages import Broadcast, StackMember, Update
from mpfedcl.prototypes import PrototypePool, Prototypes
from mpfedcl.rounds.processors import ProcessorChain
from small_experiments import build_federation, small, tensors_of

START = {"w": torch.tensor([1.0, 1.0], dtype=torch.float64)}


def broadcast() -> Broadcast:
    return Broadcast(1, START, {}, PrototypePool.empty(2, 2))


def chain(clip: float | None) -> ProcessorChain:
    return ProcessorChain(Experiment(update={"clip": clip}))


def make_update(w: list[float], **others: list[float]) -> Update:
    tensors = {n: torch.tensor(v, dtype=torch.float64) for n, v in ({"w": w} | others).items()}
    return Update("a", 1, tensors, Prototypes.empty(2), 0.0)


def test_no_processor_without_settings() -> None:
    update = make_update([100.0, 1.0])
    assert chain(None).names == ()
    assert chain(None).outgoing(update, broadcast()) is update


def test_clipped_change_keeps_its_direction() -> None:
    # (3, 4) has norm 5; a tensor that is not a parameter counts with its own norm.
    clipped = chain(2.5).outgoing(make_update([4.0, 5.0]), broadcast())
    assert tensors_of(clipped)["w"].tolist() == [2.5, 3.0]
    assert clipped.processed == ("clip",)
    clipped = chain(2.5).outgoing(make_update([1.0, 1.0], extra=[3.0, 4.0]), broadcast())
    assert tensors_of(clipped)["extra"].tolist() == [1.5, 2.0]


@pytest.mark.parametrize("values", [[1.0, 1.0], [2.0, 1.0], [math.nan, 1.0], [math.inf, 1.0]])
def test_small_and_nonfinite_changes_are_not_clipped(values: list[float]) -> None:
    update = make_update(values)
    assert chain(1.0).outgoing(update, broadcast()) is update


@given(
    st.lists(st.floats(-1e3, 1e3, allow_nan=False), min_size=2, max_size=2),
    st.floats(1e-3, 1e3),
)
def test_clipped_norm_is_at_most_the_limit(values: list[float], limit: float) -> None:
    clipped = chain(limit).outgoing(make_update(values), broadcast())
    change = tensors_of(clipped)["w"] - START["w"]
    assert float(change.norm()) <= limit * (1 + 1e-9)
    # A clipped update is not clipped again.
    assert chain(limit).incoming(clipped, broadcast()) is clipped


def test_unclipped_update_is_clipped_on_arrival() -> None:
    clipped = chain(2.5).incoming(make_update([4.0, 5.0]), broadcast())
    assert tensors_of(clipped)["w"].tolist() == [2.5, 3.0]


def test_withheld_updates_are_not_clipped() -> None:
    update = replace(make_update([9.0, 9.0]), averaged=None)
    assert chain(1.0).outgoing(update, broadcast()) is update


def three_clients() -> Stack:
    """Return a stack of one client within a limit of 2.5 and two beyond it."""
    return Stack(START["w"], [[1.5, 1.0], [4.0, 5.0], [1.0, 11.0]])


def test_clients_of_a_stack_are_clipped() -> None:
    stack, processors = three_clients(), chain(2.5)
    updates = [
        replace(make_update([0.0, 0.0]), averaged=StackMember(stack, index)) for index in range(3)
    ]
    found = [processors.outgoing(each, broadcast()) for each in updates]
    assert [each.processed for each in found] == [(), ("clip",), ("clip",)]
    # A client within the limit stays in the stack.
    assert found[0] is updates[0]
    wanted = [[1.5, 1.0], [2.5, 3.0], [1.0, 3.5]]
    assert [tensors_of(each)["w"].tolist() for each in found] == wanted


def test_client_that_does_not_clip_is_clipped_by_the_server(images: Path) -> None:
    experiment = small(images, "fedavg", update__clip=0.5)

    def tamper(engine: Engine) -> Engine:
        return TamperingEngine(engine, with_tensor("hidden.0.weight", lambda w: w + 100))

    federation = build_federation(experiment, tamper)
    start = {name: each.clone() for name, each in federation.state.server.params.items()}
    record = federation.run_round(evaluate=False)
    assert VICTIM in record.processed["clip"]
    moved = sum(
        float((each - start[name]).square().sum())
        for name, each in federation.state.server.params.items()
    )
    assert math.sqrt(moved) <= 0.5


def test_update_that_cannot_be_clipped_is_rejected_by_validation(images: Path) -> None:
    def tamper(engine: Engine) -> Engine:
        return TamperingEngine(engine, with_tensor("classifier.bias", lambda b: b[:2]))

    record = build_federation(small(images, "fedavg", update__clip=0.5), tamper).run_round(
        evaluate=False
    )
    assert record.clients.rejected == {VICTIM: "tensor classifier.bias has shape [2]; expected [3]"}


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        # A thousand times as large once it is subtracted from the parameter.
        ("hidden.0.weight", lambda _: torch.ones(1000, 1, 1), "has shape [1000, 1, 1]"),
        ("classifier.bias", lambda b: b[:1], "has shape [1]"),
        ("classifier.bias", lambda b: b.long(), "has type torch.int64"),
    ],
)
def test_clipping_does_not_hide_wrong_shapes_and_types(
    images: Path, name: str, change: Callable[[Tensor], Tensor], reason: str
) -> None:
    def tamper(engine: Engine) -> Engine:
        return TamperingEngine(engine, with_tensor(name, change))

    record = build_federation(small(images, "fedavg", update__clip=1e-6), tamper).run_round(
        evaluate=False
    )
    assert reason in record.clients.rejected[VICTIM]


def test_update_processed_twice_by_one_processor_is_rejected(images: Path) -> None:
    def tamper(engine: Engine) -> Engine:
        return TamperingEngine(engine, with_field(processed=("clip",) * 1000))

    record = build_federation(small(images, "fedavg", update__clip=1.0), tamper).run_round(
        evaluate=False
    )
    assert record.clients.rejected == {VICTIM: "it was processed twice by the same processor"}


def test_huge_limit_clips_nothing() -> None:
    update = make_update([4.0, 5.0])
    assert chain(1e200).outgoing(update, broadcast()) is update
