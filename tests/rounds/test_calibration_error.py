"""The expected calibration error: by hand, by another way of counting, and in every engine."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpfedcl import run
from mpfedcl.rounds.calibration_error import (
    NUM_BINS,
    add_bins,
    count_bins,
    expected_calibration_error,
)
from small_experiments import read_records, read_summary, small


def test_by_hand() -> None:
    """Ten at 0.9 with 7 right, ten at 0.6 with 6 right: half of 20 points, and half of none."""
    scores = torch.tensor([[0.9, 0.1]] * 10 + [[0.6, 0.4]] * 10, dtype=torch.float64).log()
    labels = torch.tensor([0] * 7 + [1] * 3 + [0] * 6 + [1] * 4)
    assert expected_calibration_error(count_bins(scores, labels)) == pytest.approx(10.0)


def test_perfect_calibration_is_zero() -> None:
    """In each bin as many are right as the probability says."""
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
def test_parts_add_up_and_agree_with_numpy(seed: int, count: int, cut: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(count, 4, generator=draw)
    labels = torch.randint(4, (count,), generator=draw)
    whole = count_bins(scores, labels)
    parts = [count_bins(scores[:cut], labels[:cut]), count_bins(scores[cut:], labels[cut:])]
    assert add_bins(parts) == add_bins(reversed(parts)) == whole
    # That all clients have the same answers, or that each process adds them up, changes nothing.
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
    for name in ("calibration_error", "calibration_bins"):
        assert all(name not in each for each in records[:-1])
    for test, bins in records[-1]["calibration_bins"].items():
        images = sum(count for count, _, _ in bins)
        gaps = sum(abs(right - count * probability) for count, right, probability in bins)
        assert 100 * gaps / images == pytest.approx(found[test], abs=1e-3)
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
def test_engines_agree(vectors: Path, tmp_path: Path, method: str, change: dict[str, Any]) -> None:
    experiment = small(vectors, method, dtype="float64", partition__test="matched")
    run(experiment, tmp_path / "one")
    run(experiment.replace(**change), tmp_path / "other")
    one = error_of(tmp_path / "one")
    assert all(0 < value < 100 for value in one.values())
    assert one == pytest.approx(error_of(tmp_path / "other"), abs=1e-4)


def test_prototypes_have_no_probabilities(images: Path, tmp_path: Path) -> None:
    run(small(images, rounds=1), tmp_path / "run")
    assert read_summary(tmp_path / "run")["calibration_error"] == {
        "local_test": None,
        "global_test": None,
    }
