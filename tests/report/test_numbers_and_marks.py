"""Thinning keeps the ends; marks follow the paired interval."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpfedcl.report.marking import marks
from mpfedcl.report.numbers import mean_text, rounded, significant, thin


@given(st.integers(1, 5000), st.integers(2, 500))
def test_thinning_keeps_the_ends_and_the_order(count: int, most: int) -> None:
    places = thin(count, most)
    assert len(places) == min(count, most)
    assert (places[0], places[-1]) == (0, count - 1)
    assert places == sorted(set(places))


def test_numbers_that_are_none_stay_none() -> None:
    assert rounded(None) is None
    assert rounded(math.nan) is None
    assert significant(math.inf) is None
    assert significant(0.000123456, 3) == 0.000123
    assert mean_text([1.0, None]) == "-"
    assert mean_text([1.0, math.nan]) == "-"
    assert mean_text([1.0, 3.0]) == "2.0(1.0)"


def test_marks_follow_the_paired_interval() -> None:
    # Differences 10, 10.1, 9.9: clear. Differences 3, -1, 1: 1 +- 4.303 * 2 / sqrt(3).
    found = marks(
        {"best": [80.0, 70.0, 75.0], "clear": [70.0, 59.9, 65.1], "near": [77.0, 71.0, 74.0]}
    )
    assert found == {"best": "best", "clear": None, "near": "within"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"a": [1.0], "b": [2.0]}, {"a": None, "b": "best"}),
        ({"a": [1.0]}, {"a": None}),
        ({"a": [None, 1.0], "b": [2.0, 2.0], "c": [1.0, 1.0]}, {"a": None, "b": "best", "c": None}),
    ],
)
def test_marks_of_little(values: dict[str, list[float | None]], expected: object) -> None:
    assert marks(values) == expected
