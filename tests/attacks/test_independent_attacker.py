"""One malicious client of five, with the updates of the independent attack program."""

import sys
from pathlib import Path

import numpy
import pytest

from mpfedcl.rounds.collector import MISPLACED
from mpfedcl.rounds.reputation import SHARE

sys.path.append(str(Path(__file__).parents[2] / "attacks"))

from independent_attacker import ATTACKS, Attack, Case, Opened, flip, hide_in_null_space, run

ATTACKER = "client-0"
ROUNDS = 4


def test_permuted_prototypes_of_one_of_five_are_left_out() -> None:
    times = run(Case("mp-fedcl", "permuted", 5, 0, rounds=ROUNDS))["times"]
    assert times[MISPLACED].pop(ATTACKER) == ROUNDS
    # Of the honest clients, single prototypes at most.
    assert sum(times[MISPLACED].values()) <= 4


def test_size_claimed_by_one_of_five_is_cut_down() -> None:
    attacked = run(Case("fedavg", "claim-and-flip-5", 5, 0, rounds=1))
    # An honest client above the median size is cut down as well.
    assert attacked["times"][SHARE] == {ATTACKER: 1, "client-2": 1}


def open_update() -> Opened:
    draw = numpy.random.default_rng(0)
    change = {"w": draw.normal(size=(300, 100)), "b": draw.normal(size=100)}
    labels = numpy.repeat(numpy.arange(5), 2)
    return Opened(change, draw.normal(size=(10, 4)), labels, [change, change, change, change])


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
def test_attacked_updates_keep_their_form(attack: Attack) -> None:
    own = open_update()
    own.round = 20
    attack(own)
    assert {name: value.shape for name, value in own.change.items()} == {
        "w": (300, 100),
        "b": (100,),
    }
    assert len(own.vectors) == len(own.labels)
    assert all(numpy.isfinite(each).all() for each in (own.vectors, *own.change.values()))


def test_hidden_change_is_nearly_the_flipped_one() -> None:
    hidden, flipped = open_update(), open_update()
    hide_in_null_space(hidden)
    flip(1)(flipped)
    cosine = float(
        (hidden.change["w"] * flipped.change["w"]).sum()
        / numpy.linalg.norm(hidden.change["w"])
        / numpy.linalg.norm(flipped.change["w"])
    )
    assert cosine > 0.7
