"""One-shot runs that several test files use."""

from pathlib import Path

import pytest

from mpfedcl import run
from one_shot_runs import choose, federation, save_client


@pytest.fixture(scope="session")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of five clients; only e has the last class."""
    root = tmp_path_factory.mktemp("clients")
    for seed, name in enumerate("abcd"):
        save_client(root / f"{name}.npz", seed)
    save_client(root / "e.npz", 5, (0, 1, 2, 3))
    return root


@pytest.fixture(scope="session")
def three(clients: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a, b and c; tests copy it."""
    root = tmp_path_factory.mktemp("three")
    return run(federation(choose(clients, root / "data", "abc")), root / "run").path


@pytest.fixture(scope="session")
def four(clients: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a, b, c and d."""
    root = tmp_path_factory.mktemp("four")
    return run(federation(choose(clients, root / "data", "abcd")), root / "run").path
