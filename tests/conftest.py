"""What all tests share."""

from pathlib import Path

import pytest

from mpfedcl.cli import main
from small_runs import Say, save_images


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a tiny image set: one domain, three classes, 60 training and 30 test images."""
    root = tmp_path_factory.mktemp("images")
    save_images(root / "stripes.npz")
    return root


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Say:
    """Call the command line in this process; return its exit code and what it said."""

    def run_words(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        assert isinstance(end.value.code, int)
        return end.value.code, *capsys.readouterr()

    return run_words
