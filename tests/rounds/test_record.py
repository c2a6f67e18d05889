"""Seconds of the phases of a round, and the share of training."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpfedcl.rounds.record import NOT_TRAINING, PHASES, Clock, training_seconds


def test_training_seconds_exclude_evaluation_and_checkpoints() -> None:
    phases = {"broadcast": 1.0, "train": 2.0, "cluster": 4.0, "evaluate": 8.0}
    assert training_seconds(phases | {"checkpoint": 32.0}) == 7.0
    assert training_seconds({}) == 0


@given(st.dictionaries(st.sampled_from([*PHASES, "local_test"]), st.floats(0, 1e6)))
def test_training_and_other_seconds_add_up(phases: dict[str, float]) -> None:
    rest = sum(phases.get(name, 0.0) for name in NOT_TRAINING)
    assert training_seconds(phases) + rest == pytest.approx(sum(phases.values()))


def test_lap_has_every_phase_and_resets_the_clock() -> None:
    clock = Clock()
    with clock.phase("train"), clock.phase("other"):
        pass
    first, second = clock.lap(), clock.lap()
    assert set(first) == {*PHASES, "other"}
    assert second == dict.fromkeys(PHASES, 0.0)
