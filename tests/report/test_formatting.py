"""Numbers as a page shows them."""

from hypothesis import given
from hypothesis import strategies as st

from mpfedcl.report.wording import (
    calibration_sentence,
    choose_evenly,
    imbalance_sentence,
    mean_and_deviation,
    metric_sentence,
    metric_value,
)


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


def test_primary_metric_is_told_with_its_unit() -> None:
    tables = {"local_test": {"nll": 0.31279, "ece": 4.56}, "global_test": {"nll": None}}
    assert metric_sentence({"metric": "nll", "metrics": tables}) == (
        "NLL: 0.313 over the samples of all local test sets, - on the global test set"
    )
    assert metric_sentence({"metric": "accuracy", "metrics": tables}) == ""
    assert metric_sentence({"metric": "nll", "metrics": None}) == ""
    assert metric_value("ece", 4.56) == "4.6"
    assert mean_and_deviation([0.1, 0.2], 3) == "0.150(0.071)"


def test_class_that_accuracy_hides_is_named() -> None:
    """92 % of 1,850 samples are alive, and 3 of 148 deaths are found."""
    counts = {"a": [[900, 10], [70, 1]], "b": [[790, 2], [75, 2]]}
    found = {"classes": ["alive", "dead"], "clients": counts, "unanswered": {}}
    assert imbalance_sentence(found) == (
        "Class dead: recall 2.0 % (3 of 148); accuracy is dominated by class alive, 92 % of the "
        "test samples."
    )
    # Samples without a prediction are not found either.
    silent = {**found, "unanswered": {"a": [0, 2]}}
    assert "(3 of 150)" in imbalance_sentence(silent)


def test_balanced_or_well_predicted_classes_are_not_named() -> None:
    def sentence(counts: list[list[int]]) -> str:
        classes = [str(number) for number in range(len(counts))]
        return imbalance_sentence({"classes": classes, "clients": {"a": counts}, "unanswered": {}})

    # Largest to smallest 2.9 to 1, then 3 to 1; a class without samples does not count.
    assert sentence([[29, 0], [10, 0]]) == ""
    assert sentence([[30, 0], [10, 0]]) != ""
    assert sentence([[30, 0, 0], [0, 10, 0], [0, 0, 0]]) == ""
    # The accuracy is 80 %: recalls of 40 and 30 %.
    assert sentence([[76, 14], [6, 4]]) == ""
    assert sentence([[77, 13], [7, 3]]) != ""
    assert imbalance_sentence({"classes": ["0"], "clients": {}, "unanswered": {}}) == ""
