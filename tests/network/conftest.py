"""What the tests of a federation over a network share."""

from pathlib import Path

import pytest

from small_runs import EXAMPLES, save_images


@pytest.fixture(autouse=True)
def _small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpfedcl.loading._HIDDEN", (24, 12))
    monkeypatch.syspath_prepend(EXAMPLES)
    # Nobody pulls the plug here, and waiting for the disk is most of what such small runs do.
    monkeypatch.setattr("os.fsync", lambda _: None)
    for module in ("engine", "roster"):
        monkeypatch.setattr(f"mpfedcl.network.{module}.POLL_SECONDS", 0.01)


@pytest.fixture(scope="session")
def many_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a tiny image set that is enough for forty clients."""
    root = tmp_path_factory.mktemp("many-images")
    save_images(root / "stripes.npz", num_train=160, num_test=40)
    return root
