"""What all tests share."""

from pathlib import Path

import pytest

from mpfedcl.cli import main
from small_runs import EXAMPLES, Say, save_images


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a tiny image set: one domain, three classes, 60 training and 30 test images."""
    root = tmp_path_factory.mktemp("images")
    save_images(root / "stripes.npz")
    return root


@pytest.fixture(scope="session")
def many_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a tiny image set that is enough for fifty clients."""
    root = tmp_path_factory.mktemp("many-images")
    save_images(root / "stripes.npz", num_train=160, num_test=40)
    return root


@pytest.fixture
def small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """For whole runs over a network: a model of a thousand weights, and nobody waits for long."""
    monkeypatch.setattr("mpfedcl.loading._HIDDEN", (24, 12))
    monkeypatch.syspath_prepend(EXAMPLES)
    # Nobody pulls the plug here, and waiting for the disk is most of what such small runs do.
    monkeypatch.setattr("os.fsync", lambda _: None)
    for module in ("engine", "roster"):
        monkeypatch.setattr(f"mpfedcl.network.{module}.POLL_SECONDS", 0.01)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Say:
    """Call the command line in this process; return its exit code and what it said."""

    def run_words(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        assert isinstance(end.value.code, int)
        return end.value.code, *capsys.readouterr()

    return run_words
