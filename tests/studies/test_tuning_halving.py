"""Which settings are kept and which are chosen, with scores made by hand."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpfedcl.studies.tuning import (
    Rung,
    choose_settings,
    keep_best,
    plan_rungs,
    standard_error,
)

scores = st.dictionaries(st.integers(0, 20), st.none() | st.integers(0, 20).map(float), min_size=1)


@pytest.mark.parametrize(
    ("rounds", "settings", "rungs"),
    [
        (60, 12, [(15, 12), (30, 6), (60, 3)]),
        (40, 5, [(10, 5), (20, 3), (40, 2)]),
        (10, 4, [(3, 4), (5, 2), (10, 1)]),
        (3, 12, [(1, 12), (2, 6), (3, 3)]),
        (2, 12, [(1, 12), (2, 3)]),
        (1, 12, [(1, 12)]),
        (60, 1, [(15, 1), (30, 1), (60, 1)]),
    ],
)
def test_rungs_by_rounds_and_trials(
    rounds: int, settings: int, rungs: list[tuple[int, int]]
) -> None:
    assert list(plan_rungs(rounds, settings)) == [Rung(*each) for each in rungs]


@given(st.integers(1, 500), st.integers(1, 100))
def test_rungs_rise_to_the_end_with_fewer_and_fewer(rounds: int, settings: int) -> None:
    rungs = plan_rungs(rounds, settings)
    assert rungs[0].settings == settings
    assert rungs[-1].rounds == rounds
    for lower, upper in pairwise(rungs):
        assert lower.rounds < upper.rounds
        assert lower.settings >= upper.settings >= 1


def test_the_better_half_and_the_defaults_are_kept() -> None:
    found = {0: 10.0, 1: 50.0, 2: 40.0, 3: None, 4: 60.0, 5: 40.0}
    assert keep_best(found, 3) == [0, 1, 2, 4]
    assert keep_best({0: 99.0, 1: 50.0, 2: None, 3: 60.0}, 2) == [0, 3]
    assert keep_best({2: None, 3: None}, 1) == [2]


@given(scores, st.integers(1, 10))
def test_no_stopped_trial_is_better(found: dict[int, float | None], count: int) -> None:
    kept = keep_best(found, count)
    assert kept == sorted(set(kept))
    best = [number for number in kept if number != 0] or kept
    assert min(count, len(found)) <= len(kept) <= count + 1
    worst = min((found[n] if found[n] is not None else -1.0) for n in best)  # type: ignore[type-var]
    for number in set(found) - set(kept):
        assert (found[number] if found[number] is not None else -1.0) <= worst  # type: ignore[operator]


@pytest.mark.parametrize(
    ("found", "error", "chosen", "within"),
    [
        # The best, where nothing else is near.
        ({0: 50.0, 1: 80.0, 2: 70.0}, 2.0, 1, [1]),
        # The defaults, where they may be as good.
        ({0: 78.5, 1: 80.0, 2: 79.0}, 2.0, 0, [0, 1, 2]),
        # Fewer changes (1 has two, 2 has one), then the better score.
        ({0: 50.0, 1: 80.0, 2: 79.0}, 2.0, 2, [1, 2]),
        ({0: 50.0, 2: 79.0, 3: 80.0}, 2.0, 3, [2, 3]),
        # Ties alone.
        ({0: 50.0, 1: 80.0, 2: 80.0}, 0.0, 2, [1, 2]),
        ({0: None, 1: 80.0}, 2.0, 1, [1]),
        ({0: None, 1: None}, 2.0, 0, []),
    ],
)
def test_chosen_trial(
    found: dict[int, float | None], error: float, chosen: int, within: list[int]
) -> None:
    assert choose_settings(found, [0, 2, 1, 1], error) == (chosen, within)


def test_standard_errors_by_hand() -> None:
    # 400 images that everyone is tested on: sqrt(0.8 * 0.2 / 400) = 0.02.
    assert standard_error(80, [[400, 400]], shared=True) == pytest.approx(2)
    # Two clients of 200 images each, tested on their own: as 400 images together.
    assert standard_error(80, [[200, 200]], shared=False) == pytest.approx(2)
    # A client of one image is half of the mean: sqrt(0.25 / 4 * (1 + 1 / 100)).
    expected = 100 * math.sqrt(0.25 / 4 * 1.01)
    assert standard_error(50, [[1, 100, 0]], shared=False) == pytest.approx(expected)
    # Two seeds halve the variance.
    assert standard_error(80, [[400], [400]], shared=True) == pytest.approx(2 / math.sqrt(2))
    assert standard_error(100, [[10]], shared=True) == 0
