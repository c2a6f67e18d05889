"""What all tests share."""

from pathlib import Path

import pytest

from mpfedcl.cli import main
from pictured_runs import save_pictures
from small_runs import Say, save_images


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a tiny image set: one domain, three classes, 60 training and 30 test images."""
    root = tmp_path_factory.mktemp("images")
    save_images(root / "stripes.npz")
    return root


@pytest.fixture
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No data and weights but those that a test names, and a cache of its own."""
    monkeypatch.setenv("MPFEDCL_CACHE", str(tmp_path / "cache"))
    for name in ("MPFEDCL_DATA", "MPFEDCL_WEIGHTS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """The root of a tiny set of pictures: three domains, four classes, mixed sizes and colours."""
    root = tmp_path / "pictures"
    save_pictures(root)
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
