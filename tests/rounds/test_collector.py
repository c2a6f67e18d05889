"""Validation of a total of masked updates; an impossible total rejects all clients."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mpfedcl.methods import CollectsStatistics
from mpfedcl.methods.messages import Failure, Total, Update
from mpfedcl.rounds.collector import UpdateCollector
from mpfedcl.rounds.secure_aggregation import TotalCollector
from small_experiments import build_federation, small

NAMES = ("client-0", "client-1", "client-2")


def collect(images: Path, given: Total | Update | Failure, method: str = "fedavg") -> Any:
    loop = build_federation(small(images, method, secure_aggregation=True))
    broadcast = loop.broadcast()
    collector = TotalCollector(
        loop._method, loop._validator, loop.state.server, broadcast, NAMES, keep_sums=False
    )
    if isinstance(given, Total) and not given.averaged and method == "fedavg":
        sums = {name: 60 * value.double() for name, value in broadcast.params.items()}
        given = replace(given, averaged=sums)
    collector.add(given)
    return collector


VALID = Total(NAMES, 60.0, {}, {}, 60, 30.0, True, 10, 80)


def test_valid_total_is_accepted(images: Path) -> None:
    collector = collect(images, VALID)
    assert collector.accepted == list(NAMES)
    assert collector.mean_loss == 0.5
    sizes = dict.fromkeys(NAMES, 40)
    assert collector.tally(sizes, sum(sizes.values())).share == 0.5
    assert isinstance(collector, UpdateCollector)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"is_possible": False}, "a number is out of range"),
        ({"weight": -1.0}, "its number of samples is negative"),
        ({"num_samples": -1}, "its number of samples is negative"),
        ({"weight": 0.0}, "models have come without any weight"),
        ({"weight": 1e-9}, "the model changed by"),
    ],
)
def test_impossible_total_is_rejected(images: Path, changes: dict[str, Any], words: str) -> None:
    collector = collect(images, replace(VALID, **changes))
    assert collector.accepted == []
    assert set(collector.rejected) == set(NAMES)
    assert words in collector.rejected["client-0"]
    assert "the total of all clients is impossible" in collector.rejected["client-0"]
    assert collector.means() == {}
    assert collector.pooled_statistics() == {}


def test_sums_of_a_total_are_validated(images: Path) -> None:
    loop = build_federation(small(images, "fedncm", secure_aggregation=True))
    assert isinstance(loop._method, CollectsStatistics)
    zeros = loop._method.totals_of(loop._validator.sums)
    bad = {**zeros, "sums": zeros["sums"] + 5.0}
    collector = collect(images, replace(VALID, weight=0.0, summed=bad), "fedncm")
    assert "has a sum of norm" in collector.rejected["client-1"]


def test_unmasked_update_is_rejected(images: Path) -> None:
    loop = build_federation(small(images, "fedavg"))
    (update, *_) = loop.engine.train(loop.broadcast(), ["client-0"], keep=[])
    assert isinstance(update, Update)
    collector = collect(images, update)
    assert collector.accepted == []
    assert "not masked" in collector.rejected["client-0"]


def test_failures_are_recorded(images: Path) -> None:
    assert collect(images, Failure("client-1", "it went away")).rejected == {
        "client-1": "it went away"
    }


def test_means_have_the_types_of_the_model(images: Path) -> None:
    collector = collect(images, VALID)
    assert {value.dtype for value in collector.means().values()} == {torch.float32}
