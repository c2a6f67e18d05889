"""Crashes while a client joins or leaves a one-shot run: all files are old or all are new."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest

from crashes_at_file_operations import OPERATIONS, Crash
from mpfedcl import InvalidInput, run
from mpfedcl.inference.membership import join, leave
from mpfedcl.inference.one_shot import open_federation
from mpfedcl.inference.trained_run import load_trained_run
from mpfedcl.runs.directory import change_files, finish_change
from one_shot_runs import (
    choose,
    contents,
    federation,
)

pytestmark = pytest.mark.whole
METHODS = ("fedgauss", "fedlda", "fedncm", "fedridge", "fedcof")


@pytest.fixture
def path(three: Path, tmp_path: Path) -> Path:
    """A copy of the run of a, b and c."""
    return Path(shutil.copytree(three, tmp_path / "run"))


def test_crash_at_any_file_operation_changes_all_files_or_none(tmp_path: Path) -> None:
    start = tmp_path / "start"
    (start / "models").mkdir(parents=True)
    for place in ("a", "b", "models/c", "models/d"):
        (start / place).write_text("old")
    written = {"a": b"new", "models/c": b"new", "statistics/e": b"new"}

    def read(path: Path) -> dict[str, str]:
        files = [file for file in path.rglob("*") if file.is_file()]
        known = {str(file.relative_to(path)): file.read_text() for file in files}
        return {name: text for name, text in known.items() if not name.startswith(".change")}

    whole = Path(shutil.copytree(start, tmp_path / "whole"))
    with OPERATIONS.watch(whole) as seen:
        change_files(whole, written, ["b", "models/d"])
    old, new = read(start), read(whole)
    assert new == {"a": "new", "models/c": "new", "statistics/e": "new"}
    found = []
    for number in range(len(seen)):
        crashed = Path(shutil.copytree(start, tmp_path / f"{number}"))
        with OPERATIONS.watch(crashed, allowed=number), pytest.raises(Crash):
            change_files(crashed, written, ["b", "models/d"])
        # A second crash on the way does no harm.
        with OPERATIONS.watch(crashed, allowed=1), contextlib.suppress(Crash):
            finish_change(crashed)
        finish_change(crashed)
        found.append(read(crashed))
        change_files(crashed, written, ["b", "models/d"])
        assert read(crashed) == new
        assert not (crashed / ".change.tmp").exists()
    decided = seen.index("os.rename .change.tmp") + 1
    assert found == [old] * decided + [new] * (len(seen) - decided)


def test_crash_while_joining_leaves_the_old_or_the_new_run(clients: Path, tmp_path: Path) -> None:
    data = choose(clients, tmp_path / "data", "ab")
    path = run(federation(data, "fedncm"), tmp_path / "run").path
    whole = Path(shutil.copytree(path, tmp_path / "whole"))

    def change(run: Path) -> None:
        join(run, clients / "d.npz", "d", add=True)

    old = contents(path)
    with OPERATIONS.watch(whole) as seen:
        change(whole)
    new, found = contents(whole), set()
    for number in range(2, len(seen), 5):
        crashed = Path(shutil.copytree(path, tmp_path / "crashed"))
        with OPERATIONS.watch(crashed, allowed=number), pytest.raises(Crash):
            change(crashed)
        # Both open it alone, and find the same.
        names = [
            open_federation(Path(shutil.copytree(crashed, tmp_path / "copy"))).pool.names,
            getattr(load_trained_run(crashed).pool, "names", None),
        ]
        shutil.rmtree(tmp_path / "copy")
        assert names[0] == names[1]
        is_new = names[0] == ("a", "b", "d")
        found.add(is_new)
        if not is_new:
            # Only uncommitted files remain next to it, until the next change.
            visible = {k: v for k, v in contents(crashed).items() if not k.startswith(".change")}
            assert visible == old
            change(crashed)
        assert contents(crashed) == new
        shutil.rmtree(crashed)
    assert found == {True, False}


def test_crash_while_leaving_leaves_the_old_or_the_new_run(path: Path, tmp_path: Path) -> None:
    whole = Path(shutil.copytree(path, tmp_path / "whole"))
    with OPERATIONS.watch(whole) as seen:
        leave(whole, "b")
    new = contents(whole)
    decided = seen.index("os.rename .change.tmp")
    for number in {decided - 1, decided, *range(decided + 1, len(seen), 6), len(seen) - 1}:
        crashed = Path(shutil.copytree(path, tmp_path / f"crash-{number}"))
        with OPERATIONS.watch(crashed, allowed=number), pytest.raises(Crash):
            leave(crashed, "b")
        has_left = "b" not in load_trained_run(crashed).clients
        assert has_left == (number > decided)
        if not has_left:
            leave(crashed, "b")
        assert contents(crashed) == new


def test_change_touches_no_file_outside_the_run(tmp_path: Path) -> None:
    run_folder = tmp_path / "run"
    (run_folder / "change").mkdir(parents=True)
    (tmp_path / "mine").write_text("mine")
    for place in ("../mine", "/etc/hosts", "a/../../mine", "a/b/c"):
        with pytest.raises(InvalidInput, match="is not in"):
            change_files(run_folder, {}, [place])
        told = {"written": [], "removed": [place]}
        (run_folder / "change" / "change.json").write_text(json.dumps(told))
        with pytest.raises(InvalidInput, match="the change cannot be completed"):
            finish_change(run_folder)
    assert (tmp_path / "mine").read_text() == "mine"
