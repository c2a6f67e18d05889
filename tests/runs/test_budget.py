"""Whole runs under a privacy budget: what is told, where they stop, and the same bits on resume."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from mpfedcl import resume, run
from mpfedcl.core.errors import InvalidInput
from mpfedcl.privacy.ledger import FOLDER, read_ledger
from mpfedcl.runs.plan import plan
from small_experiments import (
    HIDDEN,
    Warnings,
    assert_same_results,
    read_records,
    read_summary,
    results_of,
    small,
    without_timings,
)

pytestmark = pytest.mark.whole

BUDGET = {"privacy__epsilon": 4.0, "model__hidden": HIDDEN}


def spent_by_round(path: Path) -> list[float]:
    return [record["privacy"]["spent"] for record in read_records(path)]


def drop_checkpoints(path: Path, after: int) -> None:
    """Leave a run as a crash before the checkpoints of later rounds would have."""
    for file in (path / "checkpoint").glob("*"):
        if int(file.stem.rpartition("-")[2]) > after:
            file.unlink()
    (path / "summary.json").unlink()


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("fedavg", {}),
        ("mp-fedcl", {}),
        ("fedavg", {"fraction": 0.6, "privacy__noise": 1.5}),
    ],
)
def test_repeated_private_round_is_bit_identical(
    images: Path, tmp_path: Path, method: str, changes: dict[str, Any]
) -> None:
    path = run(small(images, method, rounds=3, **BUDGET | changes), tmp_path / "run").path
    shutil.copytree(path, tmp_path / "whole")
    drop_checkpoints(path, after=2)
    ledger = read_ledger(path)
    resume(path)
    assert_same_results(path, tmp_path / "whole")
    assert read_ledger(path) == ledger
    assert without_timings(read_records(path)) == without_timings(read_records(tmp_path / "whole"))


@pytest.mark.parametrize("model", ["central", "local"])
def test_repeated_private_one_shot_run_is_bit_identical(
    vectors: Path, tmp_path: Path, model: str
) -> None:
    experiment = small(vectors, "fedgauss", privacy__model=model, **BUDGET)
    path = run(experiment, tmp_path / "run").path
    before = results_of(path)
    # Neither a client's sums nor its own model are in the folder.
    assert {"model.safetensors", "pool.safetensors", "statistics.safetensors"} <= set(before)
    assert not [name for name in before if "client-" in name]
    drop_checkpoints(path, after=0)
    resume(path)
    assert results_of(path) == before
    assert read_summary(path)["privacy"] == {
        "unit": "record",
        "epsilon": 4.0,
        "delta": 1e-5,
        "spent": pytest.approx(4.0, abs=1e-3),
    }


def test_spent_epsilon_grows_to_the_budget_and_is_recorded(images: Path, tmp_path: Path) -> None:
    path = run(small(images, "fedavg", rounds=3, **BUDGET), tmp_path / "run").path
    spent = spent_by_round(path)
    assert spent == sorted(spent)
    assert spent[0] > 0
    assert spent[-1] == pytest.approx(4.0, abs=1e-3)
    assert read_summary(path)["privacy"] == {
        "unit": "client",
        "epsilon": 4.0,
        "delta": 1e-5,
        "spent": spent[-1],
    }
    assert not list((path / "models").iterdir())


def test_more_rounds_than_the_budget_covers_are_rejected(images: Path, tmp_path: Path) -> None:
    path = run(small(images, "fedavg", rounds=2, **BUDGET), tmp_path / "run").path
    with pytest.raises(InvalidInput, match=r"privacy.epsilon is 4; 4.000 is spent after 2 rounds"):
        resume(path, rounds=3)


def test_run_stops_before_its_budget_is_exceeded(images: Path, tmp_path: Path) -> None:
    # One release with this noise costs 1.24, and three cost 2.35; four cost 2.8.
    experiment = small(images, "fedavg", rounds=9, privacy__noise=3.07, privacy__epsilon=2.5)
    warnings = Warnings()
    path = run(
        experiment.replace(model__hidden=HIDDEN), tmp_path / "run", observer=warnings.observer()
    ).path
    assert len(read_records(path)) == 3
    assert read_summary(path)["rounds"] == 3
    assert 2.2 < spent_by_round(path)[-1] <= 2.5
    assert "The privacy budget covers 3 of 9 rounds; the run ends after round 3." in warnings


def test_lost_releases_are_charged_again(images: Path, tmp_path: Path) -> None:
    path = run(small(images, "fedavg", rounds=2, **BUDGET), tmp_path / "run").path
    drop_checkpoints(path, after=0)
    for file in (path / FOLDER).glob("release-*"):
        file.unlink()
    with pytest.raises(InvalidInput, match="does not cover another"):
        resume(path)
    ledger = read_ledger(path)
    assert ledger is not None
    assert ledger.spent <= 4.0 + 1e-6


def test_prototype_releases_count_when_rounds_are_limited(images: Path) -> None:
    settings = {"rounds": 9, "privacy__noise": 3.07, "privacy__epsilon": 2.5}
    rounds = {
        method: plan(small(images, method, **settings)).experiment.rounds
        for method in ("fedavg", "mp-fedcl")
    }
    # A round of MP-FedCL releases a model and prototypes, so its budget covers fewer rounds.
    assert rounds["mp-fedcl"] < rounds["fedavg"] == 3


@pytest.mark.thorough
@pytest.mark.usefixtures("forked_workers")
def test_several_processes_use_the_leaders_noise(images: Path, tmp_path: Path) -> None:
    experiment = small(images, "fedavg", rounds=2, workers=2, fraction=0.9, **BUDGET)
    path = run(experiment.replace(privacy__noise=2.0), tmp_path / "run").path
    # All are tested on the same images: had processes drawn apart, their models would differ.
    for record in read_records(path):
        assert len(set(record["accuracy_per_client"].values())) == 1
    ledger = read_ledger(path)
    assert ledger is not None
    assert ledger.num_releases == 2
