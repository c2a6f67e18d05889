"""The folder that a command writes to or resumes: what is there is never lost."""

import os
from pathlib import Path

import pytest

from command_results import Cli, Refused
from mpfedcl import run
from mpfedcl.core.files import FORMAT
from small_experiments import flags, small

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("elsewhere")]


def test_folder_of_another_run_is_rejected(images: Path, tmp_path: Path, refused: Refused) -> None:
    run(small(images), tmp_path / "run")
    before = {each: each.stat().st_mtime_ns for each in (tmp_path / "run").rglob("*.*")}
    sentence = refused("run", *flags(images, rounds=3), "--out", tmp_path / "run")
    assert f"out is '{tmp_path / 'run'}'; it already holds a run" in sentence
    assert "--resume" in sentence
    assert {each: each.stat().st_mtime_ns for each in (tmp_path / "run").rglob("*.*")} == before


def test_folder_with_other_files_is_rejected(
    images: Path, tmp_path: Path, refused: Refused
) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter.txt").write_text("precious")
    assert "must be a new or an empty folder" in refused("run", *flags(images), "--out", folder)
    assert [each.name for each in folder.iterdir()] == ["chapter.txt"]


def test_file_as_output_is_rejected(images: Path, tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "file").write_text("precious")
    assert "this is a file" in refused("run", *flags(images), "--out", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "precious"


def test_empty_folder_is_accepted(images: Path, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "empty").mkdir()
    assert cli("run", *flags(images, rounds=1), "--out", tmp_path / "empty").code == 0


@pytest.mark.parametrize("command", ["run", "compare"])
@pytest.mark.parametrize("place", ["/dev/null/run", "/proc/run", "FILE/run"])
def test_folder_that_cannot_be_made_is_named(
    images: Path, tmp_path: Path, refused: Refused, command: str, place: str
) -> None:
    (tmp_path / "file").write_text("")
    place = place.replace("FILE", str(tmp_path / "file"))
    assert place in refused(command, *flags(images), "--out", place)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_without_permission_is_rejected(
    images: Path, tmp_path: Path, refused: Refused
) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    sentence = refused("run", *flags(images), "--out", tmp_path / "locked" / "run")
    assert "Permission denied" in sentence


def test_resume_of_a_newer_format_is_rejected(
    images: Path, tmp_path: Path, refused: Refused
) -> None:
    run(small(images), tmp_path / "run")
    file = tmp_path / "run" / "experiment.toml"
    file.write_text(file.read_text().replace(f"format = {FORMAT}", "format = 99"))
    assert "has format 99" in refused("run", "--resume", tmp_path / "run")


@pytest.mark.parametrize("words", ["--seed 5", "--train.lr 0.5", "--method local"])
def test_resume_with_other_settings_is_rejected(
    images: Path, tmp_path: Path, refused: Refused, words: str
) -> None:
    run(small(images), tmp_path / "run")
    sentence = refused("run", "--resume", tmp_path / "run", *words.split())
    assert (
        "resume allows only --rounds, --engine, --workers, --worker-timeout, --track, "
        "--track-to" in sentence
    )


def test_resume_with_fewer_rounds_is_rejected(
    images: Path, tmp_path: Path, refused: Refused
) -> None:
    run(small(images), tmp_path / "run")
    assert "rounds is 1; " in refused("run", "--resume", tmp_path / "run", "--rounds", 1)
