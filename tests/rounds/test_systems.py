"""The simulated clock: speeds from random keys, stragglers, and rounds that end early."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.settings import SystemsSettings, TrainSettings
from mpfedcl.methods import find_method
from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.loop import RoundLoop
from mpfedcl.rounds.record import RoundRecord
from mpfedcl.rounds.systems import SystemModel, WaitingRound
from small_experiments import Json, assert_same_tensors, build_federation, small

COUNTS = {f"c{number}": [number + 1, 0, 7 - number] for number in range(6)}


def make_model(counts: Mapping[str, Sequence[int]] | None = None, **settings: Any) -> SystemModel:
    asked = SystemsSettings(**{"kind": "lognormal", **settings})
    return SystemModel(asked, 3, COUNTS if counts is None else counts, passes=lambda _: 2)


def test_seconds_match_a_hand_computation() -> None:
    speeds = make_model(spread=0, jitter=0, seconds_a_sample=0.5, down=100, up=50, latency=0.25)
    wanted = 0.25 + 300 / 100 + 8 * 2 * 0.5 + 200 / 50 + 0.25
    assert speeds.seconds("c0", 1, 300, 200) == wanted == speeds.expected("c0", 300, 200)
    assert speeds.gives_up_after("c0", 300, 200) == 2 * wanted


@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedrep"])
def test_fixed_steps_set_the_training_time(method: str) -> None:
    train = TrainSettings(steps=7, batch_size=4)
    experiment = Experiment(method=method, train=train).resolved()
    training = find_method(method)(experiment, 3).local_training(1)
    speeds = SystemModel(
        SystemsSettings(kind="lognormal", spread=0, jitter=0, seconds_a_sample=1, latency=0),
        3,
        {"few": [1, 1], "some": [5, 5], "many": [100, 0]},
        partial(training.passes, batch_size=4),
    )
    found = [speeds.expected(name, 0, 0) for name in ("few", "some", "many")]
    # 10 samples: 4, 4 and 2 in an epoch; 7 steps are two epochs and a batch.
    rows = {"fedavg": (14, 24, 28), "ditto": (28, 48, 56), "fedrep": (34, 124, 1028)}
    assert found == pytest.approx(rows[method], abs=1e-3)


def test_speeds_and_jitter_are_drawn_by_key() -> None:
    speeds, again = make_model(), make_model()
    names = list(COUNTS)
    assert [speeds.seconds(n, 4, 10, 10) for n in names] == [
        again.seconds(n, 4, 10, 10) for n in reversed(names)
    ][::-1]
    assert speeds.seconds("c0", 4, 10, 10) != speeds.seconds("c0", 5, 10, 10)
    # Other clients have no effect.
    few = make_model({"c0": COUNTS["c0"]})
    assert few.seconds("c0", 4, 10, 10) == speeds.seconds("c0", 4, 10, 10)


def test_lognormal_speeds_have_the_configured_spread() -> None:
    counts = {f"c{number:03}": [1] for number in range(400)}
    speeds = make_model(counts, spread=0.8, latency=0, jitter=0)
    logs = numpy.log([speeds.expected(name, 0, 0) for name in counts])
    assert abs(logs.std() - 0.8) < 0.08
    assert abs(numpy.median(logs) - math.log(2 * 0.001)) < 0.12


HELD: dict[str, dict[str, list[int]]] = {
    "size": {f"c{number}": [10 * (9 - number)] for number in range(9)},
    "label": {f"c{number}": [2 * number + 1, 0, 17 - 2 * number] for number in range(9)},
}
"""Label counts of clients; the first client should be the slowest."""


@pytest.mark.parametrize("follows", HELD)
def test_slowness_follows_size_or_labels(follows: str) -> None:
    counts = HELD[follows]
    speeds, anyhow = (make_model(counts, follows=each) for each in (follows, "none"))
    slowness = [sum(map(math.log, speeds._slowness[name])) for name in counts]
    assert slowness == sorted(slowness, reverse=True)
    # The same speeds as without it, assigned to other clients.
    assert sorted(speeds._slowness.values()) == sorted(anyhow._slowness.values())
    assert speeds._slowness != anyhow._slowness
    tiers = make_model(counts, kind="tiers", follows=follows)
    seconds = [tiers.expected(name, 10**6, 10**6) for name in counts]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1] + 20


def test_delays_of_tiers_are_within_their_bounds() -> None:
    counts = {f"c{number}": [number + 1] for number in range(10)}
    speeds = make_model(counts, kind="tiers", follows="size", jitter=0)
    bounds = [(0, 0), (0, 5), (6, 10), (11, 15), (20, 30)]
    for place, name in enumerate(counts):
        low, high = bounds[place // 2]
        fixed = speeds.expected(name, 5, 5) - (low + high) / 2
        waits = [speeds.seconds(name, number, 5, 5) - fixed for number in range(20)]
        assert low - 1e-9 <= min(waits)
        assert max(waits) <= high + 1e-9
        assert high == low or len(set(waits)) == 20


def test_share_of_lost_updates_is_the_setting() -> None:
    speeds = make_model(drop=0.3)
    lost = [speeds.loses(name, number) for name in COUNTS for number in range(300)]
    assert abs(sum(lost) / len(lost) - 0.3) < 0.03
    assert not make_model().loses("c0", 1)


@given(st.integers(1, 40), st.integers(1, 12))
def test_tiers_are_equally_large_and_sorted_by_speed(count: int, number: int) -> None:
    counts = {f"c{each:02}": [1 + each % 3] for each in range(count)}
    speeds = make_model(counts)
    tiers = speeds.in_tiers(list(counts), number, 100)
    assert len(tiers) == min(count, number)
    assert max(map(len, tiers)) - min(map(len, tiers)) <= 1
    assert sorted(name for tier in tiers for name in tier) == list(counts)
    slowest = [max(speeds.expected(name, 100, 100) for name in tier) for tier in tiers]
    fastest = [min(speeds.expected(name, 100, 100) for name in tier) for tier in tiers]
    assert all(a <= b for a, b in zip(slowest, fastest[1:], strict=False))


def test_equal_speeds_are_ordered_by_name() -> None:
    counts = {name: [4] for name in "dbac"}
    tiers = make_model(counts, spread=0, jitter=0).in_tiers("dbac", 2, 9)
    assert tiers == [["a", "b"], ["c", "d"]]


@pytest.mark.parametrize(
    ("setting", "value"),
    [("kind", "fast"), ("spread", -1), ("drop", 1), ("tick", 0), ("concurrency", 0), ("down", 0)],
)
def test_invalid_settings_are_rejected_by_name(setting: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=rf"systems\.{setting} is {value!r}"):
        Experiment(systems={setting: value})


TIMED: Json = {"systems__kind": "lognormal", "clients": 5, "dtype": "float64"}
NOTHING = Broadcast(3, {}, {}, PrototypePool.empty(2, 1, 1))


def run_rounds(images: Path, **changes: object) -> tuple[RoundLoop, list[RoundRecord]]:
    loop = build_federation(small(images, "fedavg", **{**TIMED, **changes}))
    return loop, [loop.run_round(evaluate=False) for _ in range(2)]


def test_round_does_not_wait_for_the_slowest_clients(images: Path) -> None:
    loop, records = run_rounds(images, network__enough=0.6)
    assert loop._systems is not None
    size, now = loop.broadcast().num_bytes, 0.0
    for record in records:
        taken = {n: loop._systems.seconds(n, record.round, size, size) for n in loop.engine.sizes}
        ordered = sorted(taken, key=lambda name: taken[name])
        assert record.clients.answered == sorted(ordered[:3])
        assert record.clients.missing == sorted(ordered[3:])
        now += taken[ordered[2]]
        assert record.virtual_seconds == pytest.approx(now)
        # All five were sent the model.
        assert record.bytes == {"up": 3 * size, "down": 5 * size}


def test_round_with_stragglers_is_fedavg_of_the_clients_in_time(images: Path) -> None:
    """Average the models of the first three clients by hand, weighted by samples."""
    loop = build_federation(small(images, "fedavg", **TIMED, network__enough=0.6))
    start = loop.broadcast()
    record = loop.run_round(evaluate=False)
    whole = build_federation(small(images, "fedavg", **TIMED))
    came = list(whole.engine.train(start, record.clients.answered, keep=()))
    updates = [each for each in came if isinstance(each, Update)]
    total = sum(each.num_samples for each in updates)
    for name, value in loop.state.server.params.items():
        wanted = torch.zeros_like(value)
        for each in updates:
            tensors = each.written_out().averaged
            assert isinstance(tensors, dict)
            wanted += each.num_samples / total * tensors[name]
        torch.testing.assert_close(value, wanted, rtol=0, atol=1e-12)


def test_simulation_without_a_clock_waits_for_all_clients(images: Path) -> None:
    some, records = run_rounds(images, systems__kind="none", network__enough=0.6)
    every, _ = run_rounds(images, systems__kind="none")
    assert_same_tensors(some.state.server.params, every.state.server.params)
    assert records[0].clients.missing == []


@given(st.integers(1, 9), st.floats(0.01, 1), st.floats(0, 0.9), st.integers(0, 50))
def test_clients_in_time_match_a_slow_reference(
    number: int, enough: float, drop: float, seed: int
) -> None:
    """Compare with a slow implementation of the rule; updates are lost at random."""
    names = [f"c{n}" for n in range(number)]
    settings = SystemsSettings(kind="lognormal", drop=drop)
    counts = {name: [place + 1] for place, name in enumerate(names)}
    speeds = SystemModel(settings, seed, counts, lambda _: 1)
    waiting = WaitingRound(speeds, NOTHING, names, enough=enough, bytes_up=10**6)
    answers = {n: speeds.seconds(n, 3, 0, 10**6) for n in names if not speeds.loses(n, 3)}
    needed = max(1, round(enough * number))
    moment = 0.0
    heard: list[str] = []
    while len(heard) < needed and len(heard) < len(answers):
        first = min((n for n in answers if n not in heard), key=lambda n: answers[n])
        heard.append(first)
        moment = answers[first]
    if len(heard) < needed:
        given_up = [speeds.gives_up_after(n, 0, 10**6) for n in names if n not in answers]
        moment = max([moment, *given_up])
    assert waiting.in_time == sorted(heard)
    assert waiting.seconds({}, 10**6) == moment


def test_partial_rounds_with_secure_aggregation_are_rejected(images: Path) -> None:
    with pytest.raises(InvalidInput, match=r"network\.enough is 0\.5"):
        build_federation(
            small(images, "fedavg", **TIMED, network__enough=0.5, secure_aggregation=True)
        )
