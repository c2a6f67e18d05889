"""Runs whose clients' states are in files: the same bits after any crash."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command_processes import with_states_in_files
from crashes_at_file_operations import OPERATIONS, Crash
from mpfedcl import InvalidInput, resume, run
from mpfedcl.engines import client_states
from mpfedcl.experiment import Experiment
from mpfedcl.runs.observer import Observer
from small_experiments import assert_close_results, assert_same_run, small
from worker_processes import run_together

pytestmark = pytest.mark.whole

CASES: dict[str, dict[str, Any]] = {
    "scaffold": {"update__compress": "topk"},
    "fedproto": {},
    "local": {},
    "fedper": {},
    "ditto": {},
    "feddyn": {},
    "moon": {},
}
FILES = {
    "scaffold": ["own", "unsent"],
    "fedproto": ["kept"],
    "local": ["kept"],
    "fedper": ["kept"],
}


@pytest.fixture
def in_files() -> Iterator[None]:
    """Keep states in files from the first byte on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_states, "MOST_IN_MEMORY", 0)
        yield


def experiment_of(images: Path, method: str) -> Experiment:
    changes = {"rounds": 5, "fraction": 0.7, "model__hidden": (16, 8), **CASES[method]}
    return small(images, method, **changes)


def kinds_in_files(path: Path) -> list[str]:
    return sorted(each.name for each in (path / "checkpoint" / "clients").glob("*"))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", CASES)
def test_resumed_run_with_state_files_equals_the_run_in_memory(
    images: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, path = experiment_of(images, method), tmp_path / "run"
    run(experiment, tmp_path / "memory")
    assert kinds_in_files(tmp_path / "memory") == []
    monkeypatch.setattr(client_states, "MOST_IN_MEMORY", 0)
    done: list[object] = []
    observer = Observer(on_round=done.append, should_stop=lambda: len(done) == 3)
    run(experiment, path, observer)
    assert kinds_in_files(path) == FILES.get(method, ["own"])
    # A run can be moved.
    resume(shutil.move(path, tmp_path / "moved"))
    assert_same_run(tmp_path / "moved", tmp_path / "memory")


@pytest.mark.usefixtures("in_files")
@pytest.mark.parametrize("method", ["scaffold", "fedproto"])
def test_resume_after_a_crash_at_any_state_file_is_bit_identical(
    images: Path, tmp_path: Path, method: str
) -> None:
    experiment = experiment_of(images, method)
    with OPERATIONS.watch(tmp_path / "whole") as seen:
        run(experiment, tmp_path / "whole")
    places = [n for n, each in enumerate(seen) if re.search(r" \.?\d+-\d+\.safetensors", each)]
    assert len(places) > 15
    every = 1 if os.environ.get("MPFEDCL_CASES") == "all" else 7
    for number in places[::every]:
        path = tmp_path / f"crash-{number:03}"
        with OPERATIONS.watch(path, allowed=number), pytest.raises(Crash):
            run(experiment, path)
        resume(path)
        assert_same_run(path, tmp_path / "whole")
        assert not list(path.rglob("*.tmp"))


@pytest.mark.usefixtures("in_files")
def test_checkpoint_before_a_damaged_one_has_its_states(images: Path, tmp_path: Path) -> None:
    experiment, path = experiment_of(images, "fedproto"), tmp_path / "run"
    run(experiment, tmp_path / "whole")
    done: list[object] = []
    run(experiment, path, Observer(on_round=done.append, should_stop=lambda: len(done) == 4))
    (path / "checkpoint" / "round-000004.json").write_text("{}")
    warnings: list[str] = []
    resume(path, observer=Observer(on_warning=warnings.append))
    assert "round-000004 is damaged" in warnings[0]
    assert_same_run(path, tmp_path / "whole")


@pytest.mark.usefixtures("in_files")
def test_lost_or_damaged_state_file_is_a_one_line_error(images: Path, tmp_path: Path) -> None:
    experiment, path = experiment_of(images, "fedproto"), tmp_path / "run"
    done: list[object] = []
    run(experiment, path, Observer(on_round=done.append, should_stop=lambda: len(done) == 3))
    newest = max((path / "checkpoint" / "clients" / "kept").glob("*-3.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    with pytest.raises(InvalidInput, match=rf"{newest.name} is damaged"):
        resume(path)
    newest.unlink()
    with pytest.raises(InvalidInput, match=rf"{newest.name} is missing"):
        resume(path)


@pytest.mark.thorough
def test_state_files_support_another_number_of_processes(images: Path, tmp_path: Path) -> None:
    experiment = experiment_of(images, "scaffold").replace(clients=5, dtype="float64")
    run(experiment, tmp_path / "alone")
    (tmp_path / "settings.toml").write_text(experiment.replace(rounds=2).to_toml())
    words = ["run", "settings.toml", "--out", "together"]
    run_together(words, tmp_path, 2, program=with_states_in_files)
    assert kinds_in_files(tmp_path / "together") == FILES["scaffold"]
    words = ["run", "--resume", "together", "--rounds", "5"]
    run_together(words, tmp_path, 3, program=with_states_in_files)
    assert_close_results(tmp_path / "alone", tmp_path / "together", 1e-5)
