"""Rounds on the virtual clock that are over once enough clients have answered."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment.settings import SystemsSettings
from mpfedcl.methods.messages import Broadcast, Update
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.record import RoundRecord
from mpfedcl.rounds.round_loop import RoundLoop
from mpfedcl.rounds.systems import SystemModel
from mpfedcl.rounds.waiting import WaitingRound
from small_experiments import Json, assert_same_tensors, build_federation, small

PACED: Json = {"systems__kind": "lognormal", "clients": 5, "dtype": "float64"}
NOTHING = Broadcast(3, {}, {}, PrototypePool.empty(2, 1, 1))


def run_rounds(images: Path, **changes: object) -> tuple[RoundLoop, list[RoundRecord]]:
    loop = build_federation(small(images, "fedavg", **{**PACED, **changes}))
    return loop, [loop.run_round(evaluate=False) for _ in range(2)]


def test_the_slowest_are_left_out_and_not_waited_for(images: Path) -> None:
    loop, records = run_rounds(images, network__enough=0.6)
    assert loop._pace is not None
    size, now = loop.broadcast().num_bytes, 0.0
    for record in records:
        taken = {n: loop._pace.seconds(n, record.round, size, size) for n in loop.engine.sizes}
        ordered = sorted(taken, key=lambda name: taken[name])
        assert record.clients.answered == sorted(ordered[:3])
        assert record.clients.missing == sorted(ordered[3:])
        now += taken[ordered[2]]
        assert record.virtual_seconds == pytest.approx(now)
        # All five were sent the model.
        assert record.bytes == {"up": 3 * size, "down": 5 * size}


def test_it_is_fedavg_of_those_in_time(images: Path) -> None:
    """One round by hand: the models of the first three, by their samples."""
    loop = build_federation(small(images, "fedavg", **PACED, network__enough=0.6))
    start = loop.broadcast()
    record = loop.run_round(evaluate=False)
    whole = build_federation(small(images, "fedavg", **PACED))
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


def test_without_a_clock_a_simulation_waits_for_all(images: Path) -> None:
    some, records = run_rounds(images, systems__kind="none", network__enough=0.6)
    every, _ = run_rounds(images, systems__kind="none")
    assert_same_tensors(some.state.server.params, every.state.server.params)
    assert records[0].clients.missing == []


@given(st.integers(1, 9), st.floats(0.01, 1), st.floats(0, 0.9), st.integers(0, 50))
def test_who_is_awaited(number: int, enough: float, drop: float, seed: int) -> None:
    """Against a slow reading of the rule; answers are lost at random."""
    names = [f"c{n}" for n in range(number)]
    settings = SystemsSettings(kind="lognormal", drop=drop)
    pace = SystemModel(settings, seed, {name: [place + 1] for place, name in enumerate(names)}, 1)
    waiting = WaitingRound(pace, NOTHING, names, enough=enough, bytes_up=10**6)
    answers = {n: pace.seconds(n, 3, 0, 10**6) for n in names if not pace.loses(n, 3)}
    needed = max(1, round(enough * number))
    moment = 0.0
    heard: list[str] = []
    while len(heard) < needed and len(heard) < len(answers):
        first = min((n for n in answers if n not in heard), key=lambda n: answers[n])
        heard.append(first)
        moment = answers[first]
    if len(heard) < needed:
        given_up = [pace.gives_up_after(n, 0, 10**6) for n in names if n not in answers]
        moment = max([moment, *given_up])
    assert waiting.in_time == sorted(heard)
    assert waiting.seconds({}, 10**6) == moment


def test_secure_sums_wait_for_all(images: Path) -> None:
    with pytest.raises(InvalidInput, match=r"network\.enough is 0\.5"):
        build_federation(
            small(images, "fedavg", **PACED, network__enough=0.5, secure_aggregation=True)
        )
