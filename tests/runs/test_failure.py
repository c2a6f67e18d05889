"""Runs that learned nothing: the sentence about them, and the accuracy of guessing."""

from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.dummy import DummyClassifier

from mpfedcl import Experiment, RunWarning, run
from mpfedcl.runs.failure import _guess, describe_failure
from mpfedcl.runs.observer import Observer
from small_experiments import small

labels = st.lists(st.integers(0, 3), max_size=12)


@given(clients=st.lists(labels, min_size=1, max_size=4), draw=st.randoms())
def test_accuracy_of_guessing_is_that_of_a_dummy_classifier(clients, draw) -> None:  # type: ignore[no-untyped-def]
    rows = {}
    for number, truth in enumerate(clients):
        counts = [[0] * 4 for _ in range(4)]
        for label in truth:
            counts[label][draw.randrange(4)] += 1
        rows[f"client-{number}"] = counts
    pooled = [label for truth in clients for label in truth]
    if len(set(pooled)) < 2:
        assert _guess({"clients": rows}) is None
        return
    dummy = DummyClassifier(strategy="most_frequent").fit(numpy.zeros((len(pooled), 1)), pooled)
    tested = [dummy.score(numpy.zeros((len(each), 1)), each) for each in clients if each]
    assert _guess({"clients": rows}) == pytest.approx(100 * sum(tested) / len(tested))


def test_unanswered_samples_count_by_their_true_class() -> None:
    confusion = {"clients": {"a": [[1, 0], [0, 1]]}, "unanswered": {"a": [0, 2]}}
    assert _guess(confusion) == 75.0
    assert _guess(None) is None


def test_diverged_run_ends_with_a_warning_that_names_the_learning_rate(
    images: Path, tmp_path: Path
) -> None:
    experiment = small(images, method="fedavg", train__lr=1e6, seed=3)
    with pytest.warns(RunWarning, match=r"learned nothing: accuracy .* Lower --train\.lr \(now 1e"):
        result = run(experiment, tmp_path / "run")
    # Equally many of three classes.
    assert describe_failure(result.path) == (
        f"The run learned nothing: accuracy {result.accuracy:.1f} %, always the most frequent "
        "class gives 33.3 %. Lower --train.lr (now 1e+06)."
    )
    assert str(describe_failure(result.path)) in repr(result)


def test_warning_about_the_whole_run_comes_last(images: Path, tmp_path: Path) -> None:
    told: list[str] = []
    watch = Observer(on_warning=told.append, on_finish=lambda _: told.append("finished"))
    run(small(images, method="fedavg", train__lr=1e-9, rounds=1, seed=3), tmp_path / "run", watch)
    assert told[-2] == "finished"
    assert told[-1].endswith("Try more rounds or another --train.lr (now 1e-09).")


def test_runs_with_class_weights_may_give_up_accuracy(tmp_path: Path) -> None:
    # The feature is 0 for 160 of 200 samples of the common class, and 1 for all of the rare one.
    x = numpy.repeat([0.0, 1.0], [160, 60])[:, None]
    y = numpy.repeat([0, 1], [200, 20])
    base = Experiment(method="fedavg", rounds=20, clients=2).replace(
        model__name="linear", partition__kind="iid", train__class_weights="balanced", train__lr=0.5
    )
    result = run(base, tmp_path / "run", data=(x, y))
    assert result.accuracy is not None
    assert result.accuracy < 90
    assert describe_failure(result.path) is None
    # Nothing but the intercept can be learned.
    constant = run(base, tmp_path / "constant", data=(numpy.zeros_like(x), y))
    assert "learned nothing" in str(describe_failure(constant.path))


def test_run_that_learned_says_nothing(images: Path, tmp_path: Path) -> None:
    result = run(small(images, method="fedavg", train__lr=0.2, rounds=6), tmp_path / "run")
    assert result.accuracy is not None
    assert result.accuracy > 50
    assert describe_failure(result.path) is None
    assert describe_failure(tmp_path) is None
