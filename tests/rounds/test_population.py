"""Sampling of clients: the same names as numpy draws from the whole list."""

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpfedcl.core.rng import numpy_generator
from mpfedcl.rounds.loop import Population, sample_names

NAMES = st.lists(st.text("abcé0-", min_size=1, max_size=4), unique=True, min_size=1, max_size=40)


@given(names=NAMES, share=st.floats(0, 1), number=st.integers(1, 5))
def test_sampled_names_equal_those_of_numpy(names: list[str], share: float, number: int) -> None:
    ordered, count = sorted(names), round(share * len(names))
    key = (7, number, "sample of clients")
    wanted = numpy_generator(*key).choice(ordered, count, replace=False)
    assert sample_names(ordered, count, numpy_generator(*key)) == sorted(map(str, wanted))


@pytest.mark.parametrize("count", [1, 190, 210, 11_000])
def test_sampled_names_of_many_clients_equal_those_of_numpy(count: int) -> None:
    names = [f"client-{number:05}" for number in range(12_000)]
    wanted = numpy.random.default_rng(3).choice(names, count, replace=False)
    found = sample_names(names, count, numpy.random.default_rng(3))
    assert found == sorted(map(str, wanted))


def test_late_clients_join_only_an_open_population() -> None:
    sizes = {"b": 3, "a": 5}
    fixed, open_ = (Population(sizes, is_fixed=each) for each in (True, False))
    for each in (fixed, open_):
        assert (each.without(()), each.num_samples) == (["a", "b"], 8)
    sizes["c"] = 9
    for each in (fixed, open_):
        each.begin_round()
    assert (fixed.without(()), fixed.num_samples) == (["a", "b"], 8)
    assert (open_.without({"b"}), open_.num_samples) == (["a", "c"], 17)
