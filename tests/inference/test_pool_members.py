"""Joining and leaving a run with a prototype pool: every change is atomic and can be undone."""

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from command_processes import CommandProcess
from crashes_at_file_operations import OPERATIONS, Crash
from mpfedcl import InvalidInput, PrototypePool, Prototypes, resume, run
from mpfedcl.inference.membership import PoolMembers, join, leave
from mpfedcl.inference.trained_run import load_trained_run
from mpfedcl.report.document import build_document
from mpfedcl.report.result_folders import find_result_folders
from mpfedcl.runs.directory import RunDirectory, pack_pool
from small_experiments import Warnings, save_images, small

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("small_models")]

Json = dict[str, Any]


@pytest.fixture(scope="module")
def finished(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; tests copy it."""
    return run(small(images), tmp_path_factory.mktemp("runs") / "finished").path


@pytest.fixture
def path(finished: Path, tmp_path: Path) -> Path:
    """A finished run of the test's own."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("late") / "late.npz"
    save_images(path, num_train=21, num_test=15)
    return path


def pool_of(path: Path) -> bytes:
    return (path / "pool.safetensors").read_bytes()


def events_of(path: Path) -> list[Json]:
    return [json.loads(line) for line in (path / "joins.jsonl").read_text().splitlines()]


def story_of(path: Path) -> list[tuple[str, str]]:
    return [(each["event"], each["client"]) for each in events_of(path)]


def files_of(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file() and file.name not in (".lock", "joins.jsonl")
    }


def test_leaving_undoes_joining_to_the_byte(path: Path, late: Path) -> None:
    before = files_of(path)
    joined = join(path, late, "late", add=True)
    pool = load_trained_run(path).pool
    assert pool is not None
    assert pool.names == ("client-0", "client-1", "client-2", "late")
    assert torch.equal(pool.of("late").vectors, joined.outcome.prototypes.vectors)
    assert pack_pool(pool.without("late")) == before["pool.safetensors"]
    leave(path, "late")
    assert files_of(path) == before
    assert story_of(path) == [("joined", "late"), ("left", "late")]
    assert events_of(path)[0]["accuracy"]["after"] == joined.after


def test_clients_leave_in_any_order(path: Path, late: Path) -> None:
    start = pool_of(path)
    join(path, late, "a", add=True)
    with_a = pool_of(path)
    # One that sorts before the others, so that owners' numbers move.
    join(path, late, "0", epochs=0, add=True)
    leave(path, "0")
    assert pool_of(path) == with_a
    join(path, late, "0", epochs=0, add=True)
    rows = load_trained_run(path).pool
    leave(path, "a")
    after = load_trained_run(path).pool
    assert rows is not None
    assert after is not None
    assert after.names == ("0", "client-0", "client-1", "client-2")
    for name in after.names:
        assert torch.equal(after.of(name).vectors, rows.of(name).vectors)
        assert torch.equal(after.of(name).counts, rows.of(name).counts)
    leave(path, "0")
    assert pool_of(path) == start
    assert not (path / "models" / "late.safetensors").exists()


def test_names_in_use_are_rejected(path: Path, late: Path) -> None:
    with pytest.raises(InvalidInput, match="'client-1', a client that the run was trained with"):
        join(path, late, "client-1", add=True, replace=True)
    with pytest.raises(InvalidInput, match="only a client that has joined can leave"):
        leave(path, "client-1")
    with pytest.raises(InvalidInput, match="no client has joined"):
        leave(path, "late")
    join(path, late, "late", epochs=0, add=True)
    before = pool_of(path)
    with pytest.raises(InvalidInput, match="name is 'late', a client of the federation"):
        join(path, late, "late", add=True)
    with pytest.raises(InvalidInput, match="must be one of late"):
        leave(path, "other")
    assert pool_of(path) == before


def test_replacing_equals_joining_once(path: Path, late: Path, tmp_path: Path) -> None:
    once = Path(shutil.copytree(path, tmp_path / "once"))
    join(once, late, "late", epochs=2, add=True)
    join(path, late, "late", epochs=0, add=True)
    # Its old prototypes are used neither in training nor in prediction.
    trial = join(path, late, "late", epochs=2, replace=True)
    assert not trial.was_added
    join(path, late, "late", epochs=2, add=True, replace=True)
    assert pool_of(path) == pool_of(once)
    assert files_of(path / "models") == files_of(once / "models")
    assert story_of(path) == [("joined", "late"), ("replaced", "late")]


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a\nb", "x" * 201])
def test_invalid_names_are_rejected(path: Path, late: Path, name: str) -> None:
    with pytest.raises(InvalidInput, match="printable text"):
        join(path, late, name, add=True)


def test_model_of_a_joined_client_is_used_until_it_leaves(path: Path, late: Path) -> None:
    joined = join(path, late, "late", epochs=2, add=True)
    trained = load_trained_run(path)
    assert "late" in trained.clients
    for name, value in trained.parameters("late").items():
        assert torch.equal(value, joined.outcome.params[name])
    leave(path, "late")
    assert "late" not in load_trained_run(path).clients


def test_no_personal_model_is_kept_if_the_run_keeps_none(
    images: Path, late: Path, tmp_path: Path
) -> None:
    path = run(small(images, personal_models=False, rounds=1), tmp_path / "run").path
    join(path, late, "late", add=True)
    assert load_trained_run(path).clients == ()
    assert not (path / "models" / "late.safetensors").exists()


def test_report_shows_a_joined_client(path: Path, late: Path) -> None:
    join(path, late, "late", add=True)
    document = build_document(find_result_folders([path]), lambda _: None)
    assert "late" in str(document)


# Crashes


@pytest.mark.parametrize("epochs", [0, 1])
def test_crash_while_joining_leaves_the_old_or_the_new_run(
    path: Path, late: Path, tmp_path: Path, epochs: int
) -> None:
    old, whole = pool_of(path), Path(shutil.copytree(path, tmp_path / "whole"))
    with OPERATIONS.watch(whole) as seen:
        join(whole, late, "late", epochs=epochs, add=True)
    new = pool_of(whole)
    assert "os.rename .change.tmp" in seen
    found = set()
    for number in range(len(seen)):
        crashed = Path(shutil.copytree(path, tmp_path / f"crash-{number:02}"))
        with OPERATIONS.watch(crashed, allowed=number), pytest.raises(Crash):
            join(crashed, late, "late", epochs=epochs, add=True)
        is_in = "late" in load_trained_run(crashed).clients
        found.add(pool_of(crashed))
        assert is_in == (pool_of(crashed) == new)
        assert PoolMembers.open(crashed).joined == ["late"] * is_in
        if not is_in:
            join(crashed, late, "late", epochs=epochs, add=True)
        assert pool_of(crashed) == new
        join(crashed, late, "next", epochs=0, add=True)
        assert story_of(crashed) == [("joined", "late"), ("joined", "next")]
        leave(crashed, "next")
        leave(crashed, "late")
        assert pool_of(crashed) == old
    assert found == {old, new}


def test_crash_while_leaving_leaves_the_old_or_the_new_run(
    path: Path, late: Path, tmp_path: Path
) -> None:
    join(path, late, "late", add=True)
    joined, whole = pool_of(path), Path(shutil.copytree(path, tmp_path / "whole"))
    with OPERATIONS.watch(whole) as seen:
        leave(whole, "late")
    for number in range(len(seen)):
        crashed = Path(shutil.copytree(path, tmp_path / f"crash-{number:02}"))
        with OPERATIONS.watch(crashed, allowed=number), pytest.raises(Crash):
            leave(crashed, "late")
        is_in = "late" in load_trained_run(crashed).clients
        assert pool_of(crashed) == (joined if is_in else pool_of(whole))
        if is_in:
            leave(crashed, "late")
        join(crashed, late, "next", epochs=0, add=True)
        leave(crashed, "next")
        assert files_of(crashed) == files_of(whole)
        assert len([kind for kind, name in story_of(crashed) if name == "late"]) == 2


@pytest.mark.thorough
def test_kill_during_training_changes_nothing(path: Path, late: Path) -> None:
    before = files_of(path)
    words = ["join", path, "--data", late, "--name", "late", "--epochs", 100_000, "--add"]
    process = CommandProcess(words, path.parent, small_model=True)
    try:
        wait_for_lock(path, process)
        with pytest.raises(InvalidInput, match="another process is writing this run"):
            join(path, late, "other", epochs=0, add=True)
        with pytest.raises(InvalidInput, match="another process is writing this run"):
            leave(path, "other")
        # A trial needs no lock.
        assert join(path, late, "other", epochs=0).test_images == 15
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert files_of(path) == before
    assert join(path, late, "late", epochs=0, add=True).was_added


def wait_for_lock(path: Path, process: CommandProcess) -> None:
    """Wait until the other process holds the run."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, "the other process has ended"
        try:
            RunDirectory.resume(path).close()
        except InvalidInput:
            return
        time.sleep(0.05)
    raise AssertionError("the other process never took the lock")


# Resume and damage


def test_resumed_run_drops_joined_clients(path: Path, late: Path, tmp_path: Path) -> None:
    plain = Path(shutil.copytree(path, tmp_path / "plain"))
    join(path, late, "late", add=True)
    # Nothing is left to run: nothing changes.
    with_late = pool_of(path)
    resume(path)
    assert pool_of(path) == with_late
    warnings = Warnings()
    resume(path, rounds=3, observer=warnings.observer())
    assert ["late" in each and "join again" in each for each in warnings] == [True]
    resume(plain, rounds=3)
    assert pool_of(path) == pool_of(plain)
    assert load_trained_run(path).clients == ("client-0", "client-1", "client-2")
    assert PoolMembers.open(path).joined == []
    join(path, late, "late", add=True)
    assert story_of(path) == [("joined", "late")] * 2
    assert events_of(path)[-1]["rounds"] == 3
    assert "late" in load_trained_run(path).clients


def test_damaged_log_and_foreign_files_do_no_harm(path: Path, late: Path) -> None:
    join(path, late, "late", add=True)
    (path / "models" / "notes.txt").write_text("mine")
    (path / "joins.jsonl").write_text("not json\n[1]\n")
    leave(path, "late")
    assert (path / "models" / "notes.txt").read_text() == "mine"
    (path / "pool.safetensors").write_bytes(os.urandom(99))
    with pytest.raises(InvalidInput, match=r"pool\.safetensors"):
        leave(path, "late")


def test_client_without_prototypes_is_rejected(tmp_path: Path) -> None:
    pool = PrototypePool.empty(3, 4, 2)
    members = PoolMembers(tmp_path, pool, {"client-0": {}})
    with pytest.raises(InvalidInput, match="no prototype to add"):
        members.add("late", Prototypes.empty(4), None, {})


# The pool


@given(
    sizes=st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers(1, 4), max_size=5),
    size=st.integers(1, 4),
    seed=st.integers(0, 100),
)
@settings(max_examples=60, deadline=None)
def test_pool_without_undoes_with_client(sizes: dict[str, int], size: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)

    def draw(count: int) -> Prototypes:
        labels = torch.randint(0, 3, (count,), generator=random).sort().values
        return Prototypes(torch.randn(count, 5, generator=random), labels, torch.ones_like(labels))

    others = {name: draw(count) for name, count in sizes.items()}
    pool = PrototypePool.gather(others, num_classes=3, dimension=5)
    rows = draw(size)
    joined = pool.with_client("ab-new", rows)
    assert list(joined.names) == sorted([*sizes, "ab-new"])
    assert torch.equal(joined.of("ab-new").vectors, rows.vectors)
    assert pack_pool(joined.without("ab-new")) == pack_pool(pool)
    assert pool.without("nobody") is pool


def test_pool_file_has_the_documented_tensors(path: Path, late: Path) -> None:
    join(path, late, "late", add=True)
    tensors = load_file(path / "pool.safetensors")
    assert sorted(tensors) == ["counts", "labels", "owners", "vectors"]
    assert set(tensors["owners"].tolist()) == {0, 1, 2, 3}
