"""Numbers as a page shows them."""

from hypothesis import given
from hypothesis import strategies as st

from mpfedcl.report.wording import calibration_sentence, choose_evenly, mean_and_deviation


@given(st.integers(1, 5000), st.integers(2, 500))
def test_thinning_keeps_the_ends_and_the_order(count: int, most: int) -> None:
    places = choose_evenly(count, most)
    assert len(places) == min(count, most)
    assert (places[0], places[-1]) == (0, count - 1)
    assert places == sorted(set(places))


def test_the_deviation_has_ddof_1_and_a_diverged_seed_is_counted() -> None:
    assert mean_and_deviation([1.0, 3.0]) == "2.0(1.4)"
    assert mean_and_deviation([1.0]) == "1.0"
    assert mean_and_deviation([1.0, 3.0, None]) == "2.0(1.4)✗1"
    assert mean_and_deviation([1.0, None, None]) == "1.0✗2"
    assert mean_and_deviation([None, None]) == "-"


def test_the_calibration_error_is_said_where_there_is_one() -> None:
    assert calibration_sentence({}) == ""
    assert (
        calibration_sentence({"calibration_error": {"local_test": None, "global_test": None}}) == ""
    )
    assert calibration_sentence(
        {"calibration_error": {"local_test": 3.14, "global_test": None}}
    ) == ("expected calibration error: 3.1 % on the local test set")
