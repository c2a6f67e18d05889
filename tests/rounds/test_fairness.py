"""Who is served worst, in closed form."""

from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpfedcl.rounds.fairness import jain_index, measure_fairness

ACCURACIES = st.lists(st.floats(0, 100), min_size=1, max_size=60)


def test_jains_index_in_closed_form() -> None:
    assert jain_index([7.0] * 5) == pytest.approx(1)
    assert jain_index([0.0, 0.0]) == 1
    # One client has everything: 1/n. Two of four are served alike: 2/4.
    assert jain_index([80.0, 0.0, 0.0, 0.0]) == 0.25
    assert jain_index([50.0, 50.0, 0.0, 0.0]) == 0.5
    # (1 + 2 + 3)^2 / (3 (1 + 4 + 9)).
    assert jain_index([1.0, 2.0, 3.0]) == pytest.approx(36 / 42)


def test_deciles_are_means_of_tenths() -> None:
    found = measure_fairness(range(100))
    assert found is not None
    assert (found.worst, found.worst_decile, found.best_decile) == (0, 4.5, 94.5)
    assert found.std == pytest.approx(stdev(range(100)), abs=1e-4)
    # Of eleven clients a tenth is two, of five it is one.
    eleven = measure_fairness([*range(11)])
    five = measure_fairness([5.0, 4.0, 3.0, 2.0, 9.0])
    assert eleven is not None
    assert five is not None
    assert (eleven.worst_decile, eleven.best_decile) == (0.5, 9.5)
    assert (five.worst_decile, five.best_decile) == (2, 9)


def test_clients_that_were_not_read_are_left_out_and_counted() -> None:
    found = measure_fairness([None, float("nan"), 40.0])
    assert found is not None
    assert (found.clients, found.mean, found.std, found.jain) == (1, 40, None, 1)
    assert measure_fairness([None]) is None
    assert measure_fairness([]) is None


@given(ACCURACIES)
def test_numbers_keep_their_order(values: list[float]) -> None:
    found = measure_fairness(values)
    assert found is not None
    rounding = 1e-4
    assert 1 / len(values) - rounding <= found.jain <= 1 + rounding
    assert found.mean == pytest.approx(fmean(values), abs=rounding)
    assert found.worst <= found.worst_decile + rounding
    assert found.worst_decile <= found.mean + rounding <= found.best_decile + 2 * rounding
