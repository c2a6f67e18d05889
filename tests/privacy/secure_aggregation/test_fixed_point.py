"""Numbers as integers modulo 2^64: exact sums, a stated range, refusals."""

from fractions import Fraction

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mpfedcl.privacy.secure_aggregation.primitives import (
    OutOfRange,
    decode,
    encode,
    is_possible,
    largest,
)


@given(st.integers(3, 50), st.data())
def test_sums_are_exact_to_the_stated_precision(count: int, data: st.DataObject) -> None:
    bound = largest(count)
    shape = data.draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    values = [
        data.draw(arrays.arrays(numpy.float64, shape, elements=st.floats(-bound, bound)))
        for _ in range(3)
    ]
    total = sum((encode("x", each, count) for each in values), numpy.uint64(0))
    total = numpy.asarray(total, dtype=numpy.uint64).reshape(-1)
    assert is_possible(total)
    for place, found in enumerate(decode(total).tolist()):
        exact = sum((Fraction(float(each.reshape(-1)[place])) for each in values), Fraction())
        # The last rounding is that of a float64 itself.
        slack = Fraction(3, 2**25) + abs(exact) / 2**52
        assert abs(Fraction(found) - exact) <= slack


@given(st.lists(st.integers(-(2**60), 2**60), min_size=1, max_size=4))
def test_integer_sums_are_exact(values: list[int]) -> None:
    total = numpy.zeros(1, dtype=numpy.uint64)
    for each in values:
        total += encode("n", numpy.array([each]), 4)
    assert decode(total, is_whole=True).tolist() == [sum(values)]


@pytest.mark.parametrize("value", [numpy.nan, numpy.inf, -numpy.inf, 2.0**38 / 3 * 1.001, -1e300])
def test_values_out_of_range_are_rejected(value: float) -> None:
    with pytest.raises(
        OutOfRange, match=r"weight contains .*; with secure aggregation of 3 clients it must"
    ):
        encode("weight", numpy.array([0.0, value]), 3)


def test_largest_values_of_all_clients_do_not_overflow() -> None:
    for count in (3, 7, 1000):
        term = encode("x", numpy.array([largest(count), -largest(count)]), count)
        total = numpy.zeros(2, dtype=numpy.uint64)
        for _ in range(count):
            total += term
        assert is_possible(total)
        assert decode(total) == pytest.approx([2.0**38, -(2.0**38)], rel=1e-9)
    assert not is_possible(numpy.array([2**63], dtype=numpy.uint64))
