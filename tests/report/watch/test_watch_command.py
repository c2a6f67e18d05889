"""What the command refuses, each in one sentence."""

import sys
from pathlib import Path

import pytest

from mpfedcl.cli.main import parse
from small_experiments import Say


def test_what_is_watched_by_default() -> None:
    found = parse(["watch"])
    assert (found.folder, found.host, found.port) == (Path("runs"), "127.0.0.1", 8700)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere"], "RUNS_FOLDER is 'nowhere', which does not exist; it must be a folder."),
        (["file"], "RUNS_FOLDER is 'file', which is a file; it must be a folder."),
        ([".", "--port", "70000"], "port is 70000; it must be from 0 (any that is free) to 65535."),
        ([".", "--port", "-1"], "port is -1; it must be from 0 (any that is free) to 65535."),
        (
            [".", "--host", "example.org"],
            "host is 'example.org'; it must be an address of this machine, such as 127.0.0.1 or "
            "::1.",
        ),
        (
            [".", "--host", "203.0.113.9"],
            "port is 8700; it cannot be used on 203.0.113.9 (Cannot assign requested address): "
            "give another by --port, or 0 for any that is free.",
        ),
    ],
)
def test_bad_input_gets_one_sentence(
    said: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], sentence: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert said("watch", *words) == (2, "", f"mpfedcl: {sentence}\n")


@pytest.mark.parametrize("package", ["uvicorn", "starlette"])
def test_a_missing_extra_is_named(
    said: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    for name in list(sys.modules):
        if name.startswith(("mpfedcl.report.watch.", f"{package}.")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    code, out, error = said("watch", tmp_path)
    assert (code, out) == (2, "")
    assert error.startswith(f"mpfedcl: watch needs {package}")
    assert error.endswith("which is not installed: pip install 'mpfedcl[watch]'.\n")
