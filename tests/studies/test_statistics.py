"""Statistics over seeds, against numbers made by hand and scipy's paired t-test."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from mpfedcl.studies.statistics import (
    PairedDifference,
    Values,
    find_best,
    interval_half_width,
    mark_best,
    paired_difference,
)

accuracies = st.floats(0, 100).map(lambda number: round(number, 2))
pairs = st.lists(st.tuples(accuracies, accuracies), min_size=2, max_size=8)


def difference(a: Values, b: Values) -> PairedDifference:
    found = paired_difference(a, b)
    assert found is not None
    return found


def test_three_seeds_by_hand() -> None:
    # Differences 1, 2, 3: mean 2, deviation 1, and the t quantile of 2 degrees is 4.302653.
    found = difference([71, 74, 77], [70, 72, 74])
    assert (found.pairs, found.mean, found.deviation) == (3, 2.0, 1.0)
    assert found.low == pytest.approx(2 - 4.302653 / math.sqrt(3), abs=1e-6)
    assert found.high == pytest.approx(2 + 4.302653 / math.sqrt(3), abs=1e-6)
    assert found.verdict == "no clear difference"


def test_two_seeds_by_hand() -> None:
    # Differences 10 and 12: mean 11, deviation sqrt(2), reach 12.7062 / sqrt(2) * sqrt(2).
    found = difference([80, 90], [70, 78])
    assert found.deviation == pytest.approx(math.sqrt(2))
    assert found.low == pytest.approx(11 - 12.7062, abs=1e-4)
    assert found.verdict == "no clear difference"


def test_interval_half_width_of_few_seeds() -> None:
    assert interval_half_width(2) == pytest.approx(8.985, abs=1e-3)
    assert interval_half_width(3) == pytest.approx(2.484, abs=1e-3)
    assert interval_half_width(10, 0.9) == pytest.approx(1.8331 / math.sqrt(10), abs=1e-4)


@given(pairs, st.sampled_from([0.8, 0.95, 0.99]))
def test_agrees_with_the_paired_t_test(drawn: list[tuple[float, float]], level: float) -> None:
    a, b = [x for x, _ in drawn], [y for _, y in drawn]
    found = paired_difference(a, b, level)
    assert found is not None
    # Deviations that are rounding alone are taken as none, which scipy leaves to the caller.
    assume(found.deviation is not None and found.deviation > 1e-6)
    expected = stats.ttest_rel(a, b)
    interval = expected.confidence_interval(level)
    assert found.low == pytest.approx(interval.low, rel=1e-6, abs=1e-6)
    assert found.high == pytest.approx(interval.high, rel=1e-6, abs=1e-6)
    if abs(expected.pvalue - (1 - level)) > 1e-6:
        assert (found.verdict == "no clear difference") == (expected.pvalue > 1 - level)


@given(pairs)
def test_difference_is_antisymmetric(drawn: list[tuple[float, float]]) -> None:
    a, b = [x for x, _ in drawn], [y for _, y in drawn]
    opposite = {"better": "worse", "worse": "better"}
    said = difference(a, b).verdict
    assert difference(b, a).verdict == opposite.get(said, said)
    assert difference(a, a).verdict == "no clear difference"


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        # 0.1 + 0.2 is not 0.3: equal differences come out a rounding apart.
        ([0.3, 0.6, 1.1], [0.2, 0.5, 1.0], "better"),
        ([0.1 + 0.2, 0.3], [0.3, 0.1 + 0.2], "no clear difference"),
        ([70.1, 80.1], [70.2, 80.2], "worse"),
        ([50, 50], [50, 50], "no clear difference"),
        ([0, 0], [0, 0], "no clear difference"),
        ([81, 82, 83], [71, 72.1, 72.9], "better"),
        ([71, 72.1, 72.9], [81, 82, 83], "worse"),
        ([90], [10], "one seed"),
        ([90, None, 80], [10, 20, None], "one seed"),
        ([91, None, 92, 93], [81, 5, 82, 83.1], "better"),
    ],
)
def test_verdicts(a: list[float | None], b: list[float | None], expected: str) -> None:
    assert difference(a, b).verdict == expected


def test_equal_differences_have_an_interval_of_one_number() -> None:
    found = difference([70.1, 80.1, 90.1], [70, 80, 90])
    assert found.deviation == 0
    assert found.low == found.high == found.mean == pytest.approx(0.1)


def test_one_pair_has_no_interval() -> None:
    found = difference([3, None], [1, 2])
    assert (found.pairs, found.mean) == (1, 2)
    assert (found.deviation, found.low, found.high) == (None, None, None)
    assert paired_difference([None], [1]) is None
    assert paired_difference([None, None], [1, 2]) is None
    assert paired_difference([], []) is None


def test_unpaired_values_are_refused() -> None:
    with pytest.raises(ValueError, match="3 values and b has 2"):
        paired_difference([1, 2, 3], [1, 2])
    with pytest.raises(ValueError, match="level is 1"):
        paired_difference([1, 2], [1, 2], level=1)


# Marks


def test_best_and_those_not_clearly_behind() -> None:
    values: dict[str, list[float | None]] = {
        "low": [70.0, 71.0, 72.0],
        "close": [81.0, 80.0, 83.0],
        "best": [82.0, 81.5, 82.5],
        "same": [82.0, 81.5, 82.5],
        "holes": [99.0, None, 99.0],
        "short": [99.0, 99.0],
        "nothing": [None, None, None],
    }
    assert find_best(values) == "best"
    assert mark_best(values) == {
        "low": None,
        "close": "within",
        "best": "best",
        "same": "within",
        "holes": None,
        "short": None,
        "nothing": None,
    }


def test_one_seed_marks_only_ties() -> None:
    values: dict[str, list[float | None]] = {"a": [1.0], "b": [3.0], "c": [3.0], "d": [None]}
    assert mark_best(values) == {"a": None, "b": "best", "c": "best", "d": None}


def test_no_marks_without_complete_values() -> None:
    assert mark_best({}) == {}
    assert mark_best({"a": [], "b": []}) == {"a": None, "b": None}
    assert mark_best({"a": [None]}) == {"a": None}
    assert find_best({"a": [None]}) is None


@given(st.dictionaries(st.text(max_size=3), st.lists(accuracies, min_size=3, max_size=3)))
def test_there_is_one_best_and_marks_are_verdicts(values: dict[str, list[float]]) -> None:
    marks = mark_best(values)
    assert list(marks) == list(values)
    assert [*marks.values()].count("best") == min(1, len(values))
    best = find_best(values)
    for name, mark in marks.items():
        assert best is not None
        assert sum(values[best]) >= sum(values[name]) - 1e-9
        if name != best:
            assert (mark == "within") == (
                difference(values[best], values[name]).verdict != "better"
            )
