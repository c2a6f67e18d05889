"""TOML documents that would take the parser minutes or all memory: one line at once."""

import os
from pathlib import Path

import pytest

from mpfedcl import Experiment
from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment.experiment import LONGEST_DOCUMENT
from small_experiments import Say

DOCUMENTS = {
    "too long": ("x = 1\n" * LONGEST_DOCUMENT, "has more than 4,194,304 characters"),
    "deep key": (".".join("a" * 10**6) + " = 1", "key of more than 1,000 parts in line 1"),
    "deep quoted key": (
        "rounds = 2\n[train]\nlr = {" + ".".join(['"!"'] * 10**6) + " = 1}",
        "key of more than 1,000 parts in line 3",
    ),
    "long number": ("rounds = " + "9" * 10**5, "is not valid TOML: Exceeds the limit"),
    "nested": ("rounds = " + "[" * 10**5, "is not valid TOML"),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_document_of_a_server_cannot_stop_a_client(name: str) -> None:
    document, reason = DOCUMENTS[name]
    with pytest.raises(InvalidInput) as refused:
        Experiment.parse_toml(document, Path("the server's experiment"))
    assert str(refused.value).startswith("the server's experiment ")
    assert reason in str(refused.value)


def test_names_with_dots_are_no_key(tmp_path: Path) -> None:
    names = ", ".join(f"'gene.{number}'" for number in range(3000))
    found = Experiment.parse_toml(f"[dataset]\ncolumns = [{names}]", tmp_path / "many.toml")
    assert len(found.dataset.columns) == 3000


@pytest.mark.parametrize("name", DOCUMENTS)
def test_file_is_one_line(said: Say, tmp_path: Path, name: str) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(DOCUMENTS[name][0])
    code, out, err = said("run", path)
    assert (code, out) == (2, "")
    assert DOCUMENTS[name][1] in " ".join(err.split())


def test_endless_file_is_one_line(said: Say, tmp_path: Path) -> None:
    (tmp_path / "zero.toml").symlink_to("/dev/zero")
    code, _, err = said("run", tmp_path / "zero.toml")
    assert code == 2
    assert "has more than 4,194,304 characters" in " ".join(err.split())


def test_search_for_methods_does_not_wait_for_a_pipe(said: Say, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    # The wrong setting is reported before the file is opened.
    code, _, err = said("run", tmp_path / "pipe.toml", "--rounds", "none")
    assert code == 2
    assert "rounds" in err
