"""What all tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from laboratory import Laboratory, Notebook
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


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    """A federation with TLS and keys; each of its clients holds a share of the embedded data.

    One for all tests of a file: its processes take seconds to start.
    """
    laboratory = Laboratory(tmp_path_factory.mktemp("federation"))
    try:
        laboratory.make("--clients", 3)
        laboratory.start_server()
        for share in range(3):
            laboratory.start_client(f"client-{share}", "--share", share)
        yield laboratory
    finally:
        laboratory.finish()


@pytest.fixture(scope="session")
def notebook() -> Iterator[Notebook]:
    """Collects how long faults took; the table is left in build/faults.md."""
    notebook = Notebook()
    yield notebook
    folder = Path(__file__).parents[1] / "build"
    folder.mkdir(exist_ok=True)
    notebook.save(folder / "faults.md")
