"""Numbers read off records, by hand."""

from typing import Any

import pytest

from mpfedcl.studies.paper import measures
from mpfedcl.studies.paper.item import FinishedRun


def record(number: int, accuracy: float | None, seconds: float = 1.0) -> dict[str, Any]:
    predictor = {"personal_prototype": accuracy}
    return {
        "round": number,
        "accuracy": None
        if accuracy is None
        else {"local_test": predictor, "global_test": {**predictor}},
        "accuracy_per_client": {"a": accuracy, "b": None},
        "seconds": {"train": seconds, "cluster": 0.5, "evaluate": 9.0, "checkpoint": 7.0},
        "bytes": {"up": 1_000_000 * number, "down": 500_000},
        "sent": {"parameters": 7, "prototype_floats": 3},
    }


def run(*accuracies: float | None, seconds: float = 1.0) -> FinishedRun:
    records = [record(number, each, seconds) for number, each in enumerate(accuracies, 1)]
    return FinishedRun(records, "personal_prototype")


def test_the_last_round_counts_not_the_best() -> None:
    assert measures.OWN_TEST.compute(run(10.0, 90.0, 50.0), None) == 50.0
    assert measures.UNION_TEST.compute(run(10.0, 90.0, 50.0), None) == 50.0


def test_a_client_by_name() -> None:
    assert measures.accuracy_of_client("a").compute(run(1.0, 2.0), None) == 2.0
    assert measures.accuracy_of_client("b").compute(run(1.0, 2.0), None) is None


def test_accuracy_after_rounds() -> None:
    assert measures.accuracy_after(2).compute(run(1.0, 2.0, 3.0), None) == 2.0
    assert measures.accuracy_after(9).compute(run(1.0, 2.0, 3.0), None) == 3.0
    assert measures.accuracy_after(2).compute(run(1.0, None, 3.0), None) is None


def test_rounds_and_megabytes_until_an_accuracy_is_first_read() -> None:
    finished = run(10.0, None, 40.0, 30.0, 50.0)
    assert measures.rounds_to_accuracy(40).compute(finished, None) == 3
    assert measures.rounds_to_accuracy(41).compute(finished, None) == 5
    assert measures.rounds_to_accuracy(60).compute(finished, None) is None
    # Rounds 1 to 3: 1 + 2 + 3 up, 0.5 each down.
    assert measures.megabytes_to_accuracy(40).compute(finished, None) == pytest.approx(7.5)
    assert measures.megabytes_to_accuracy(60).compute(finished, None) is None


def test_the_same_time_leaves_out_reading_and_checkpoints() -> None:
    reference = run(5.0, 6.0)
    assert measures.training_seconds(reference) == pytest.approx(3.0)
    # Rounds of 0.75 s: four of them in 3 s. Rounds of 2.5 s: one.
    assert measures.EQUAL_TIME.compute(run(1.0, 2.0, 3.0, 4.0, 5.0, seconds=0.25), reference) == 4.0
    assert measures.EQUAL_TIME.compute(run(1.0, 2.0, seconds=2.0), reference) == 1.0
    assert measures.EQUAL_TIME.compute(reference, reference) == 6.0
    assert measures.EQUAL_TIME.compute(run(1.0, seconds=20.0), reference) is None


def test_what_is_sent() -> None:
    assert measures.PARAMETERS_SENT.compute(run(1.0), None) == 7
    assert measures.PROTOTYPE_FLOATS_SENT.compute(run(1.0), None) == 3
