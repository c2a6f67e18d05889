"""Runs are found several levels deep, and nothing outside the folder is."""

import os
from pathlib import Path

import pytest

from mpfedcl.core.errors import InvalidInput
from mpfedcl.report.watch import runs
from mpfedcl.report.watch.runs import WatchedRun, find_runs, find_version


def make(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "experiment.toml").write_text("")
    return path


def names_in(root: Path) -> list[str]:
    return ["/".join(path.relative_to(root).parts) for path in find_runs(root)[0]]


def test_runs_are_found_up_to_six_levels_deep(tmp_path: Path) -> None:
    for name in ("b", "a", "deep/er/still/c", "one/two/three/four/five/six"):
        make(tmp_path / name)
    make(tmp_path / "one/two/three/four/five/seven/eight")
    assert names_in(tmp_path) == ["a", "b", "deep/er/still/c", "one/two/three/four/five/six"]


def test_watched_folder_may_be_a_run(tmp_path: Path) -> None:
    make(tmp_path / "run")
    assert names_in(tmp_path / "run") == [""]


def test_hidden_folders_and_folders_inside_runs_are_not_visited(tmp_path: Path) -> None:
    make(tmp_path / ".hidden")
    make(make(tmp_path / "run") / "models" / "inner")
    assert names_in(tmp_path) == ["run"]


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside = make(tmp_path / "outside" / "secret")
    inside = tmp_path / "inside"
    make(inside / "run")
    (inside / "link").symlink_to(outside)
    (inside / "loop").symlink_to(inside)
    (inside / "half").mkdir()
    (inside / "half" / "experiment.toml").symlink_to(outside / "experiment.toml")
    assert names_in(inside) == ["run"]


def test_settings_that_are_no_regular_file_make_no_run(tmp_path: Path) -> None:
    (tmp_path / "folder" / "experiment.toml").mkdir(parents=True)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "experiment.toml")
    assert names_in(tmp_path) == []


def test_folder_names_that_are_not_unicode(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    make(path)
    (found,) = find_runs(tmp_path)[0]
    assert found == path
    assert set(WatchedRun(found, tmp_path).id) <= set("0123456789abcdef")


def test_search_ends_after_the_largest_number_of_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(30):
        make(tmp_path / f"{number:02}")
    monkeypatch.setattr(runs, "MOST_FOLDERS", 11)
    places, is_too_large = find_runs(tmp_path)
    assert is_too_large
    assert len(places) == 10


def test_only_regular_files_have_a_version(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"12345")
    (tmp_path / "link").symlink_to(tmp_path / "plain")
    os.mkfifo(tmp_path / "pipe")
    version = find_version(tmp_path / "plain")
    assert version is not None
    assert version.size == 5
    assert find_version(tmp_path / "nothing") is None
    for name in ("link", "pipe", "."):
        with pytest.raises(InvalidInput, match="is not a regular file"):
            find_version(tmp_path / name)
