"""Nothing is lost: a run that died at any file operation ends as one that never died."""

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from crashes_at_file_operations import OPERATIONS, Crash
from mpfedcl import InvalidInput, resume, run
from mpfedcl.core.files import FORMAT
from mpfedcl.experiment import Experiment
from mpfedcl.runs.observer import Observer
from small_experiments import (
    EXAMPLES,
    Warnings,
    assert_same_results,
    assert_same_run,
    read_records,
    read_summary,
    results_of,
    save_images,
    small,
)

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("small_models")]

SCAFFOLD = "custom_method:Scaffold"
TINY = (16, 8)
"""Layers of a model that is written in no time: some tests run hundreds of rounds."""


@pytest.fixture
def own_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


@pytest.mark.usefixtures("own_methods")
@pytest.mark.parametrize("method", ["mp-fedcl", "fedproto", SCAFFOLD])
def test_resume_after_a_crash_at_any_file_operation_is_bit_identical(
    images: Path, tmp_path: Path, method: str
) -> None:
    # Four rounds, so that checkpoints are dropped; two clients of three, so that some idle.
    changes = {"rounds": 4, "fraction": 0.7, "prototypes__pool_ttl": 2, "model__hidden": TINY}
    experiment = small(images, method, **changes)
    with OPERATIONS.watch(tmp_path / "whole") as seen:
        run(experiment, tmp_path / "whole")
    assert len(seen) > 30, seen
    # Half a file is never seen under its own name; records alone are added to.
    opened = {name for name in seen if name.startswith("open ") and not name.endswith(".tmp")}
    assert opened == {"open .lock", "open rounds.jsonl"}
    # make test-all crashes before each; methods write the same files, with other tensors in them.
    every = 1 if os.environ.get("MPFEDCL_CASES") == "all" else 3 if method == "mp-fedcl" else 7
    for number in range(0, len(seen), every):
        path = tmp_path / f"crash-{number:03}"
        with OPERATIONS.watch(path, allowed=number), pytest.raises(Crash):
            run(experiment, path)
        if (path / "experiment.toml").exists():
            resume(path)
        else:
            run(experiment, path)
        assert_same_run(path, tmp_path / "whole")


@pytest.mark.thorough
def test_crash_while_more_rounds_are_run_is_resumed(images: Path, tmp_path: Path) -> None:
    experiment = small(images, "fedproto", rounds=2, model__hidden=TINY)
    run(experiment.replace(rounds=3), tmp_path / "whole")
    run(experiment, tmp_path / "two")
    shutil.copytree(tmp_path / "two", tmp_path / "more")
    with OPERATIONS.watch(tmp_path / "more") as seen:
        resume(tmp_path / "more", rounds=3)
    assert_same_run(tmp_path / "more", tmp_path / "whole")
    assert "os.remove client-1.safetensors" in seen
    for number in range(1, len(seen)):
        path = tmp_path / f"crash-{number:03}"
        shutil.copytree(tmp_path / "two", path)
        with OPERATIONS.watch(path, allowed=number), pytest.raises(Crash):
            resume(path, rounds=3)
        resume(path, rounds=3)
        assert_same_run(path, tmp_path / "whole")


def test_repeated_crashes_are_resumed(images: Path, tmp_path: Path) -> None:
    experiment = small(images, rounds=4)
    run(experiment, tmp_path / "whole")
    path = tmp_path / "broken"
    with OPERATIONS.watch(path, allowed=15), pytest.raises(Crash):
        run(experiment, path)
    crashes = 0
    for allowed in (3, 5, 9, 12, 14, 15, 17, 19, 20, 21):
        with OPERATIONS.watch(path, allowed=allowed):
            try:
                resume(path)
            except Crash:
                crashes += 1
    assert crashes >= 5
    resume(path)
    assert_same_run(path, tmp_path / "whole")


# What is found on disk may be worse than a crash leaves it


@pytest.fixture(scope="module")
def whole(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four rounds that nothing happened to."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    run(small(images, rounds=4), path)
    return path


def stop_after(images: Path, path: Path, rounds: int) -> None:
    """Leave a run of four rounds after so many of them."""
    done: list[object] = []
    observer = Observer(on_round=done.append, should_stop=lambda: len(done) == rounds)
    result = run(small(images, rounds=4), path, observer)
    assert result.summary is None
    assert result.accuracy is None
    assert len(result.history) == rounds
    assert not (path / "summary.json").exists()


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def test_stopped_run_is_resumed(images: Path, tmp_path: Path, whole: Path) -> None:
    stop_after(images, tmp_path / "run", 2)
    result = resume(tmp_path / "run")
    assert_same_run(tmp_path / "run", whole)
    assert [record["round"] for record in result.history] == [1, 2, 3, 4]


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_resume_skips_a_damaged_newest_checkpoint(
    images: Path, tmp_path: Path, whole: Path, suffix: str
) -> None:
    stop_after(images, tmp_path / "run", 3)
    damage(tmp_path / "run" / "checkpoint" / f"round-000003{suffix}")
    warnings = Warnings()
    resume(tmp_path / "run", observer=warnings.observer())
    assert len(warnings) == 1
    assert "round-000003" in warnings[0]
    assert_same_run(tmp_path / "run", whole)


def test_run_without_a_valid_checkpoint_starts_over(
    images: Path, tmp_path: Path, whole: Path
) -> None:
    path = tmp_path / "run"
    stop_after(images, path, 3)
    for each in (path / "checkpoint").glob("*.safetensors"):
        damage(each)
    warnings, done = Warnings(), list[Any]()
    observer = Observer(on_round=done.append, on_warning=warnings.append)
    resume(path, observer=observer)
    assert [record["round"] for record in done] == [1, 2, 3, 4]
    assert len(warnings) >= 2
    assert_same_run(path, whole)


def test_run_that_starts_over_can_be_interrupted(images: Path, tmp_path: Path, whole: Path) -> None:
    path = tmp_path / "run"
    stop_after(images, path, 3)
    for each in (path / "checkpoint").glob("*.safetensors"):
        damage(each)
    done: list[Any] = []
    resume(path, observer=Observer(on_round=done.append, should_stop=lambda: len(done) == 1))
    started: list[int] = []
    resume(path, observer=Observer(on_start=lambda _, rounds: started.append(rounds)))
    assert started == [1]
    assert_same_run(path, whole)


def test_half_written_record_is_replaced(images: Path, tmp_path: Path, whole: Path) -> None:
    path = tmp_path / "run"
    stop_after(images, path, 3)
    records = path / "rounds.jsonl"
    records.write_bytes(records.read_bytes()[:-200])
    resume(path)
    assert_same_run(path, whole)


def test_record_without_a_checkpoint_is_replaced(images: Path, tmp_path: Path, whole: Path) -> None:
    path = tmp_path / "run"
    stop_after(images, path, 2)
    with (path / "rounds.jsonl").open("a") as file:
        file.write(json.dumps({**read_records(path)[-1], "round": 3, "loss": 99.0}) + "\n")
    resume(path)
    assert_same_run(path, whole)


def test_damaged_record_loses_only_that_record(images: Path, tmp_path: Path, whole: Path) -> None:
    path = tmp_path / "run"
    stop_after(images, path, 3)
    lines = (path / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    lines[0] = lines[0].replace(b'"loss"', b'"l\xff\xfes"')
    (path / "rounds.jsonl").write_bytes(b"".join(lines))
    resume(path)
    assert [record["round"] for record in read_records(path)] == [2, 3, 4]
    assert_same_results(path, whole)


def test_resume_without_records_keeps_the_results(
    images: Path, tmp_path: Path, whole: Path
) -> None:
    path = tmp_path / "run"
    stop_after(images, path, 3)
    (path / "rounds.jsonl").unlink()
    resume(path)
    assert [record["round"] for record in read_records(path)] == [3, 4]
    assert_same_results(path, whole)


# More rounds, or none


@pytest.mark.usefixtures("own_methods")
@pytest.mark.parametrize("method", ["mp-fedcl", "fedproto", "local", SCAFFOLD])
def test_run_extended_by_rounds_is_bit_identical(images: Path, tmp_path: Path, method: str) -> None:
    run(small(images, method, rounds=4), tmp_path / "four")
    run(small(images, method, rounds=2), tmp_path / "more")
    result = resume(tmp_path / "more", rounds=4)
    assert_same_run(tmp_path / "more", tmp_path / "four")
    assert result.accuracy == read_summary(tmp_path / "four")["accuracy"]


def test_interrupted_extension_is_resumed(images: Path, tmp_path: Path) -> None:
    run(small(images, rounds=4), tmp_path / "four")
    path = tmp_path / "more"
    run(small(images, rounds=2), path)
    resume(path, rounds=4, observer=Observer(should_stop=iter([False, True]).__next__))
    assert not (path / "summary.json").exists()
    resume(path)
    assert_same_run(path, tmp_path / "four")


def test_resuming_a_complete_run_is_harmless(images: Path, tmp_path: Path, whole: Path) -> None:
    run(small(images, rounds=4), tmp_path / "run")
    before = results_of(tmp_path / "run"), read_summary(tmp_path / "run")
    result = resume(tmp_path / "run")
    assert result.accuracy == before[1]["accuracy"]
    assert len(result.history) == 4
    assert (results_of(tmp_path / "run"), read_summary(tmp_path / "run")) == before
    assert_same_run(tmp_path / "run", whole)


def test_fewer_rounds_than_done_are_rejected(whole: Path) -> None:
    before = read_summary(whole), results_of(whole), read_records(whole)
    with pytest.raises(InvalidInput, match="rounds is 3; "):
        resume(whole, rounds=3)
    assert (read_summary(whole), results_of(whole), read_records(whole)) == before


@pytest.mark.parametrize("evaluate_every", [1, 3])
def test_fewer_rounds_than_planned_are_rejected(
    images: Path, tmp_path: Path, evaluate_every: int
) -> None:
    # Round 2 was not run as the last one: nothing was evaluated, perhaps, and no model written.
    path, done = tmp_path / "run", list[object]()
    run(
        small(images, rounds=4, evaluate_every=evaluate_every),
        path,
        Observer(on_round=done.append, should_stop=lambda: len(done) == 2),
    )
    with pytest.raises(InvalidInput, match="rounds is 2; "):
        resume(path, rounds=2)
    assert not (path / "summary.json").exists()
    assert resume(path).accuracy is not None


# What must not be gone on with


def test_resume_of_a_folder_without_a_run_is_rejected(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(InvalidInput, match="must be a folder that holds a run"):
            resume(path)
    assert list(tmp_path.iterdir()) == []


def test_resume_of_a_newer_format_is_rejected(images: Path, tmp_path: Path) -> None:
    stop_after(images, tmp_path / "run", 1)
    file = tmp_path / "run" / "experiment.toml"
    file.write_text(file.read_text().replace(f"format = {FORMAT}", "format = 99"))
    with pytest.raises(InvalidInput, match="has format 99"):
        resume(tmp_path / "run")


def test_resume_on_changed_data_is_rejected(tmp_path: Path) -> None:
    save_images(tmp_path / "data" / "a.npz")
    experiment = small(tmp_path / "data")
    run(experiment, tmp_path / "run")
    before = read_summary(tmp_path / "run"), read_records(tmp_path / "run")
    save_images(tmp_path / "data" / "a.npz", num_train=63)
    with pytest.raises(InvalidInput, match="started with other data"):
        resume(tmp_path / "run", rounds=4)
    assert (read_summary(tmp_path / "run"), read_records(tmp_path / "run")) == before
    assert Experiment.from_toml(tmp_path / "run" / "experiment.toml").rounds == 2


def test_resume_of_a_locked_run_is_rejected(images: Path, tmp_path: Path, whole: Path) -> None:
    path = tmp_path / "run"
    stop_after(images, path, 2)
    with (path / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InvalidInput, match="another process is writing this run"):
            resume(path)
        with pytest.raises(InvalidInput, match="another process is writing this run"):
            run(small(images, rounds=4), path)
    resume(path)
    assert_same_run(path, whole)
