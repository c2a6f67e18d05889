"""Calibration error, fairness and the clients listed in a record."""

from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpfedcl import run
from mpfedcl.rounds.metrics import (
    MOST_LISTED,
    NUM_BINS,
    add_bins,
    count_bins,
    expected_calibration_error,
    jain_index,
    list_accuracies,
    mean_accuracy,
    measure_fairness,
)
from mpfedcl.rounds.record import RoundRecord
from small_experiments import build_federation, read_records, read_summary, save_vectors, small


def test_calibration_error_matches_a_hand_computation() -> None:
    """Use ten at 0.9 with 7 correct and ten at 0.6 with 6 correct: half of 20 points."""
    scores = torch.tensor([[0.9, 0.1]] * 10 + [[0.6, 0.4]] * 10, dtype=torch.float64).log()
    labels = torch.tensor([0] * 7 + [1] * 3 + [0] * 6 + [1] * 4)
    assert expected_calibration_error(count_bins(scores, labels)) == pytest.approx(10.0)


def test_error_of_perfect_calibration_is_zero() -> None:
    """Use bins whose share of correct predictions equals their probability."""
    scores, labels = [], []
    for right in (6, 7, 8, 9):
        scores += [[right / 10, 1 - right / 10]] * 10
        labels += [0] * right + [1] * (10 - right)
    bins = count_bins(torch.tensor(scores, dtype=torch.float64).log(), torch.tensor(labels))
    assert expected_calibration_error(bins) == pytest.approx(0, abs=1e-9)
    assert expected_calibration_error(add_bins([])) is None
    assert expected_calibration_error([]) is None


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.integers(0, 60))
def test_bins_of_parts_add_up_and_agree_with_numpy(seed: int, count: int, cut: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(count, 4, generator=draw)
    labels = torch.randint(4, (count,), generator=draw)
    whole = count_bins(scores, labels)
    parts = [count_bins(scores[:cut], labels[:cut]), count_bins(scores[cut:], labels[cut:])]
    assert add_bins(parts) == add_bins(reversed(parts)) == whole
    # Adding up several clients or processes with the same predictions does not change the error.
    assert expected_calibration_error(add_bins([whole] * 3)) == expected_calibration_error(whole)
    exponents = numpy.exp(scores.double().numpy())
    shares = exponents / exponents.sum(axis=1, keepdims=True)
    top, right = shares.max(axis=1), shares.argmax(axis=1) == labels.numpy()
    place = numpy.digitize(top, numpy.linspace(0, 1, NUM_BINS + 1), right=True)
    gaps = [
        (place == n).mean() * abs(right[place == n].mean() - top[place == n].mean())
        for n in set(place.tolist())
    ]
    assert expected_calibration_error(whole) == pytest.approx(100 * sum(gaps), abs=1e-5)


def error_of(path: Path) -> dict[str, float]:
    found: dict[str, float] = read_summary(path)["calibration_error"]
    records = read_records(path)
    assert records[-1]["calibration_error"] == found
    assert all("calibration_error" not in each for each in records[:-1])
    assert set(found) == {"local_test", "global_test"}
    return found


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("method", "change"),
    [
        pytest.param("fedgauss", {"workers": 2}, marks=pytest.mark.whole),
        ("local-gauss", {"engine": "stacked"}),
        ("local", {"engine": "stacked"}),
        ("fedavg", {"engine": "stacked"}),
    ],
)
def test_engines_agree_on_the_calibration_error(
    vectors: Path, tmp_path: Path, method: str, change: dict[str, Any]
) -> None:
    experiment = small(vectors, method, dtype="float64", partition__test="matched")
    run(experiment, tmp_path / "one")
    run(experiment.replace(**change), tmp_path / "other")
    one = error_of(tmp_path / "one")
    assert all(0 < value < 100 for value in one.values())
    assert one == pytest.approx(error_of(tmp_path / "other"), abs=1e-4)


def test_prototype_predictors_have_no_calibration_error(images: Path, tmp_path: Path) -> None:
    run(small(images, rounds=1), tmp_path / "run")
    assert read_summary(tmp_path / "run")["calibration_error"] == {
        "local_test": None,
        "global_test": None,
    }


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


def test_fairness_ignores_clients_that_were_not_evaluated() -> None:
    found = measure_fairness([None, float("nan"), 40.0])
    assert found is not None
    assert (found.clients, found.mean, found.std, found.jain) == (1, 40, None, 1)
    assert measure_fairness([None]) is None
    assert measure_fairness([]) is None


@given(ACCURACIES)
def test_fairness_values_keep_their_order(values: list[float]) -> None:
    found = measure_fairness(values)
    assert found is not None
    rounding = 1e-4
    assert 1 / len(values) - rounding <= found.jain <= 1 + rounding
    assert found.mean == pytest.approx(fmean(values), abs=rounding)
    assert found.worst <= found.worst_decile + rounding
    assert found.worst_decile <= found.mean + rounding <= found.best_decile + 2 * rounding


def name_all(values: list[float | None]) -> dict[str, float | None]:
    return {f"client-{number:04}": value for number, value in enumerate(values)}


def test_few_clients_are_all_listed() -> None:
    few = name_all([50.0, None] * (MOST_LISTED // 2))
    assert list_accuracies(few, ["client-0000"]) == (few, None)


@given(values=st.lists(st.none() | st.floats(0, 100), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_many_clients_are_listed_by_participation_and_spread(values: list[float | None]) -> None:
    several = (values * (MOST_LISTED + 1))[: MOST_LISTED + len(values)]
    many = name_all(several)
    rows, spread = list_accuracies(many, ["client-0000", "client-1000", "elsewhere"])
    read = {name: many[name] for name in ("client-0000", "client-1000")}
    assert rows == {name: value for name, value in read.items() if value is not None}
    known = [value for value in several if value is not None]
    if not known:
        assert spread is None
        return
    assert spread is not None
    fairness = measure_fairness(several)
    assert fairness is not None
    assert {**dict(fairness), "quartiles": spread.quartiles} == dict(spread)
    assert spread.quartiles == pytest.approx(numpy.percentile(known, [25, 50, 75]), abs=1e-4)


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_record_names_only_participating_clients(tmp_path: Path, method: str) -> None:
    save_vectors(tmp_path / "all.npz", num_train=2600, num_test=30)
    experiment = small(
        tmp_path,
        method,
        clients=1300,
        fraction=0.01,
        evaluate_clients=3,
        partition__kind="iid",
        partition__min_size=1,
        partition__test="shared",
    )
    loop = build_federation(experiment)
    record = loop.run_round(evaluate=True)
    written, answered = record.to_json(), set(record.clients.answered)
    assert len(answered) == 13
    assert record.clients.missing == []
    assert set(record.loss_per_client or {}) == answered
    assert set(record.accuracy_per_client or {}) <= answered
    absent = [name for name in loop.engine.sizes if name not in answered]
    text = record.model_dump_json()
    assert not any(f'"{name}"' in text for name in absent)
    # The global model is tested on all clients, personal models on three.
    assert record.accuracy is not None
    assert record.accuracy_spread is not None
    assert record.accuracy_spread.clients == (1300 if method == "fedavg" else 3)
    main = loop._method.predictor_on("local_test")
    assert record.accuracy["local_test"][main] == pytest.approx(mean_accuracy(written), abs=1e-3)
    assert RoundRecord.model_validate(written) == record


def test_record_of_few_clients_has_no_spread(tmp_path: Path) -> None:
    save_vectors(tmp_path / "all.npz", num_train=60, num_test=9)
    record = build_federation(small(tmp_path, partition__kind="iid")).run_round(evaluate=True)
    assert "accuracy_spread" not in record.to_json()
