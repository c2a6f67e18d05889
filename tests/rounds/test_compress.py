"""Compression of updates: the error is bounded, unbiased, or sent later."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tampered_updates import VICTIM, TamperingEngine
from torch import Tensor

from mpfedcl import resume
from mpfedcl import run as run_experiment
from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment import Experiment
from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.network.packing import pack_update, unpack_update
from mpfedcl.network.transport import Message
from mpfedcl.prototypes import PrototypePool, Prototypes
from mpfedcl.rounds.loop import RoundLoop
from mpfedcl.rounds.processors import ProcessorChain
from small_experiments import (
    assert_same_results,
    assert_same_tensors,
    build_federation,
    small,
    tensors_of,
)

SHAPE = (16, 20)


def draw(seed: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sent_out(number: int = 1) -> Broadcast:
    return Broadcast(number, {"w": draw(0)}, {}, PrototypePool.empty(2, 20))


def make_update(w: Tensor, **summed: Tensor) -> Update:
    vectors = torch.nn.functional.normalize(draw(7, (30, 20)), dim=1)
    prototypes = Prototypes(vectors, torch.zeros(30).long(), torch.ones(30).long())
    return Update("a", 30, {"w": w, "bias": draw(3, (5,))}, prototypes, 0.5, summed)


def chain(kind: str, **changes: Any) -> ProcessorChain:
    return ProcessorChain(Experiment(update={"compress": kind, **changes}))


def there_and_back(kind: str, update: Update, number: int = 1) -> Update:
    both = chain(kind)
    sent = both.outgoing(update, sent_out(number))
    return both.unpack(sent, sent_out(number))


def test_compression_none_adds_no_processor() -> None:
    update = make_update(draw(1))
    for kind in ("none", None):
        assert ProcessorChain(Experiment(update={"compress": kind})).names == ()
    assert there_and_back("half", update).coding == {}


@pytest.mark.parametrize(("kind", "limit"), [("half", 2**-11), ("int8", 1 / 127)])
def test_compression_error_is_at_most_one_step(kind: str, limit: float) -> None:
    update = make_update(draw(1), moment=100 * draw(2))
    back = there_and_back(kind, update)
    change = draw(1) - draw(0)
    assert float((tensors_of(back)["w"] - draw(1)).abs().max()) <= limit * float(change.abs().max())
    lost = (back.prototypes.vectors - update.prototypes.vectors).abs().max()
    assert 0 < float(lost) <= limit * float(update.prototypes.vectors.abs().max())
    # Sums must stay valid, so they keep at least half precision.
    off = (back.summed["moment"] - update.summed["moment"]).abs().max()
    assert float(off) <= 2**-11 * float(update.summed["moment"].abs().max())
    assert torch.equal(tensors_of(back)["bias"], tensors_of(update)["bias"])


def test_large_value_affects_only_the_precision_of_its_row() -> None:
    value = draw(1)
    value[3, 4] = 1000.0
    back = tensors_of(there_and_back("int8", make_update(value)))["w"]
    largest = (value - draw(0)).abs().amax(1)
    assert bool(((back - value).abs().amax(1) <= largest / 127 * 1.001).all())
    # A row without a change stays as it is.
    value[5] = draw(0)[5]
    back = tensors_of(there_and_back("int8", make_update(value)))["w"]
    assert torch.equal(back[5], value[5])


def test_bytes_are_counted_after_compression() -> None:
    update = make_update(draw(1))
    rest = 5 * 4 + 30 * 16
    numbers = 16 * 20 + 30 * 20
    assert update.num_bytes == 4 * numbers + rest
    assert chain("half").outgoing(update, sent_out()).num_bytes == 2 * numbers + rest + 8
    # A scale for each of 16 rows, and of 30 prototypes.
    sent = chain("int8").outgoing(update, sent_out())
    assert sent.num_bytes == numbers + rest + 4 * (16 + 30)
    # 16 of 320 values with their indices, and prototypes in half precision.
    sent = chain("topk").outgoing(update, sent_out())
    assert sent.num_bytes == 16 * 8 + 2 * 600 + rest + 4


def test_int8_rounding_is_unbiased() -> None:
    update = make_update(draw(1))
    found = torch.stack(
        [tensors_of(there_and_back("int8", update, number))["w"] for number in range(1, 801)]
    )
    step = float((draw(1) - draw(0)).abs().max()) / 127
    # Rounding has a standard deviation of at most half a step; five of them for the mean of 800.
    assert float((found.mean(0) - draw(1)).abs().max()) <= 5 * step / 2 / 800**0.5
    assert float(found.std(0).max()) > step / 4
    again = tensors_of(there_and_back("int8", update, 5))["w"]
    assert torch.equal(again, found[4])


@settings(max_examples=30)
@given(st.integers(1, 6), st.floats(0.001, 1), st.integers(0, 99))
def test_topk_sends_the_remaining_change_later(rounds: int, keep: float, seed: int) -> None:
    sender = chain("topk", keep=keep)
    kept: dict[str, Tensors] = {}
    sender.keep_in(kept)
    total, arrived = torch.zeros(SHAPE), torch.zeros(SHAPE)
    for number in range(1, rounds + 1):
        change = draw(seed + number)
        sent = sender.outgoing(make_update(draw(0) + change), sent_out(number))
        back = sender.unpack(sent, sent_out(number))
        sender.keep_accepted(["a"])
        total += (draw(0) + change) - draw(0)
        arrived += tensors_of(back)["w"] - draw(0)
    left = kept["a"]["w"].view(SHAPE)
    torch.testing.assert_close(arrived + left, total, rtol=1e-4, atol=1e-5)


def test_topk_matches_a_hand_computation() -> None:
    sender, change = chain("topk", keep=2 / 320), torch.zeros(SHAPE)
    kept: dict[str, Tensors] = {}
    sender.keep_in(kept)
    change[0, 1], change[2, 3], change[4, 5] = 3.0, -5.0, 0.5
    sent = sender.outgoing(make_update(draw(0) + change), sent_out())
    assert sent.coding["averaged/w"].tolist() == [1, 43]
    # A rejected update is sent again; after an accepted one, 0.5 is sent next.
    assert kept == {}
    sender.outgoing(make_update(draw(0) + change), sent_out())
    sender.keep_accepted(["a"])
    sent = sender.outgoing(make_update(draw(0).clone()), sent_out(2))
    assert 85 in sent.coding["averaged/w"].tolist()


def test_whole_numbers_and_small_tensors_are_not_compressed() -> None:
    counts = torch.arange(400.0)
    sent = chain("half").outgoing(make_update(draw(1), counts=counts), sent_out())
    assert torch.equal(sent.summed["counts"], counts)
    assert sorted(sent.coding) == ["averaged/w", "prototypes"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["half", "int8", "topk"])
def test_compression_keeps_values_that_are_not_finite(kind: str, value: float) -> None:
    bad = draw(1)
    bad[3, 3] = value
    back = tensors_of(there_and_back(kind, make_update(bad)))["w"]
    assert not bool(back.isfinite().all())


def test_compressed_update_is_restored_from_a_message() -> None:
    sent = chain("int8").outgoing(make_update(draw(1)), sent_out())
    packed = pack_update(sent)
    got = unpack_update("a", Message(packed.values, packed.arrays))
    there, here = (chain("int8").unpack(each, sent_out()) for each in (got, sent))
    assert_same_tensors(tensors_of(there), tensors_of(here))
    assert got.num_bytes == sent.num_bytes


# In rounds


def run(root: Path, kind: str | None, rounds: int = 2, **changes: Any) -> RoundLoop:
    federation = build_federation(small(root, update={"compress": kind}, **changes))
    for _ in range(rounds):
        federation.run_round(evaluate=False)
    return federation


def test_rounds_with_compression_are_close_to_rounds_without(images: Path) -> None:
    full = run(images, None).state.server.params
    for kind in ("half", "int8"):
        sent = run(images, kind).state.server.params
        for name, value in full.items():
            assert not torch.equal(value, sent[name]) or value.numel() < 256
            torch.testing.assert_close(sent[name], value, rtol=0, atol=2e-2)


INVALID_CODINGS: dict[str, Callable[[Tensors], Tensors]] = {
    "an unknown name": lambda _: {"averaged/x": torch.ones(())},
    "no group": lambda _: {"x": torch.ones(())},
    "a scale of two": lambda coding: {n: torch.ones(2) for n in coding},
    "an endless scale": lambda coding: {n: torch.full((), torch.inf) for n in coding},
    "places": lambda coding: {n: torch.zeros(3, dtype=torch.int32) for n in coding},
    "nothing": lambda _: {},
}


@pytest.mark.parametrize("name", INVALID_CODINGS)
def test_invalid_coding_is_rejected(images: Path, name: str) -> None:
    def tamper(update: Update) -> list[Update]:
        return [replace(update, coding=INVALID_CODINGS[name](dict(update.coding)))]

    federation = build_federation(
        small(images, update={"compress": "int8"}), lambda engine: TamperingEngine(engine, tamper)
    )
    record = federation.run_round(evaluate=False)
    assert list(record.clients.rejected) == [VICTIM]
    assert len(record.clients.answered) == 2


def test_topk_indices_out_of_range_are_rejected(images: Path) -> None:
    def tamper(update: Update) -> list[Update]:
        far = {n: code + 10**6 for n, code in update.coding.items() if code.dtype == torch.int32}
        return [replace(update, coding={**update.coding, **far})]

    federation = build_federation(
        small(images, update={"compress": "topk"}), lambda engine: TamperingEngine(engine, tamper)
    )
    record = federation.run_round(evaluate=False)
    assert list(record.clients.rejected) == [VICTIM]


def test_compression_with_secure_aggregation_is_rejected(images: Path) -> None:
    with pytest.raises(InvalidInput, match=r"update\.compress is 'half'; with secure_aggregation"):
        build_federation(
            small(images, "fedavg", update={"compress": "half"}, secure_aggregation=True)
        )


@pytest.mark.usefixtures("small_models")
@pytest.mark.parametrize("method", ["fedavg", "fedasync"])
def test_resumed_run_restores_the_topk_residuals(images: Path, tmp_path: Path, method: str) -> None:
    experiment = small(images, method, update={"compress": "topk"}, rounds=4, fraction=0.7)
    run_experiment(experiment, tmp_path / "whole")
    run_experiment(experiment.replace(rounds=2), tmp_path / "halves")
    resume(tmp_path / "halves", 4)
    assert_same_results(tmp_path / "whole", tmp_path / "halves")
