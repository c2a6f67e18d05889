"""What all tests share."""

from pathlib import Path

import pytest

from small_runs import save_images


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a tiny image set: one domain, three classes, 60 training and 30 test images."""
    root = tmp_path_factory.mktemp("images")
    save_images(root / "stripes.npz")
    return root
