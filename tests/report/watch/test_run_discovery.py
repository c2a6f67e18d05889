"""Runs are found at any depth, and nothing outside the folder ever is."""

import os
from pathlib import Path

import pytest

from mpfedcl.core.errors import InvalidInput
from mpfedcl.report.watch import files
from mpfedcl.report.watch.files import file_signature, find_runs, read_regular_file


def make(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "experiment.toml").write_text("")
    return path


def names_in(root: Path) -> list[str]:
    return ["/".join(place.parts) for place in find_runs(root)[0]]


def test_runs_at_any_depth(tmp_path: Path) -> None:
    for name in ("b", "a", "deep/er/still/c", "one/two/three/four/five/six"):
        make(tmp_path / name)
    make(tmp_path / "one/two/three/four/five/seven/eight")
    assert names_in(tmp_path) == ["a", "b", "deep/er/still/c", "one/two/three/four/five/six"]


def test_the_folder_itself_may_be_a_run(tmp_path: Path) -> None:
    make(tmp_path / "run")
    assert names_in(tmp_path / "run") == [""]


def test_hidden_folders_and_those_of_runs_are_not_entered(tmp_path: Path) -> None:
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


def test_what_is_called_like_a_file_of_settings(tmp_path: Path) -> None:
    (tmp_path / "folder" / "experiment.toml").mkdir(parents=True)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "experiment.toml")
    assert names_in(tmp_path) == []


def test_names_that_are_no_text(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    make(path)
    (place,) = find_runs(tmp_path)[0]
    assert place.path == path
    assert set(place.id) <= set("0123456789abcdef")


def test_a_folder_too_large_is_not_walked_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(30):
        make(tmp_path / f"{number:02}")
    monkeypatch.setattr(files, "MOST_FOLDERS", 11)
    places, is_too_large = find_runs(tmp_path)
    assert is_too_large
    assert len(places) == 10


def test_plain_files_alone_are_read(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"12345")
    (tmp_path / "link").symlink_to(tmp_path / "plain")
    os.mkfifo(tmp_path / "pipe")
    assert read_regular_file(tmp_path / "plain") == b"12345"
    for name in ("link", "pipe", "nothing", "."):
        assert file_signature(tmp_path / name) is None
        with pytest.raises(InvalidInput, match="cannot be read"):
            read_regular_file(tmp_path / name)
    with pytest.raises(InvalidInput, match="has 5 bytes; at most 4 are read"):
        read_regular_file(tmp_path / "plain", 4)
