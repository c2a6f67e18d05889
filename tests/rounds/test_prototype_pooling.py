"""The prototype pool that the server sends: whole, or merged to a bound."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mpfedcl.core.errors import InvalidInput
from mpfedcl.rounds.loop import RoundLoop
from mpfedcl.rounds.record import RoundRecord
from small_experiments import assert_same_tensors, build_federation, small


def run(images: Path, rounds: int = 3, **changes: Any) -> tuple[RoundLoop, list[RoundRecord]]:
    federation = build_federation(small(images, clients=6, **changes))
    records = [federation.run_round(evaluate=True) for _ in range(rounds)]
    return federation, records


def test_bound_above_the_pool_size_is_bit_identical(images: Path) -> None:
    whole, _ = run(images)
    bounded, _ = run(images, prototypes__pool_size=12)
    assert_same_tensors(whole.state.server.params, bounded.state.server.params)
    assert torch.equal(whole.pool.vectors, bounded.pool.vectors)


def test_small_bound_holds(images: Path) -> None:
    whole, before = run(images)
    bounded, records = run(images, prototypes__pool_size=3)
    assert int(torch.bincount(bounded.pool.labels).max()) == 3
    assert bounded.pool.names == ("group-1", "group-2")
    assert len(bounded.pool) == 9
    assert records[1].bytes["down"] < before[1].bytes["down"]
    assert records[1].bytes["up"] == before[1].bytes["up"]
    # Clients contrast with the merged pool, so their losses differ.
    assert records[1].loss != before[1].loss
    assert len(whole.pool) > len(bounded.pool)


def test_engines_agree_on_the_merged_pool(images: Path) -> None:
    settings: dict[str, Any] = {"prototypes__pool_size": 3, "dtype": "float64"}
    loop, _ = run(images, engine="loop", **settings)
    stacked, _ = run(images, engine="stacked", **settings)
    torch.testing.assert_close(loop.pool.vectors, stacked.pool.vectors, rtol=1e-5, atol=1e-9)


def test_bound_does_not_affect_one_prototype_per_class(images: Path) -> None:
    whole, _ = run(images, method="fedproto")
    bounded, _ = run(images, method="fedproto", prototypes__pool_size=1)
    assert torch.equal(whole.pool.vectors, bounded.pool.vectors)


def test_pool_size_is_rejected_if_clients_need_their_own_prototypes(images: Path) -> None:
    with pytest.raises(InvalidInput, match=r"prototypes\.pool_size is 2; with method fedpcl"):
        run(images, method="fedpcl", prototypes__pool_size=2)
    with pytest.raises(InvalidInput, match=r"prototypes\.pool_size is 0"):
        small(images, prototypes__pool_size=0)
