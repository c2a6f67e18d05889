"""A server of Flower's own, and clients that connect to it."""

from collections.abc import Iterator

import pytest
from executed_runs import Connect, connections, running_lab
from superlinks import RunningServer


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_lab(tmp_path_factory.mktemp("server") / "lab") as lab:
        yield lab


@pytest.fixture
def connect(lab: RunningServer) -> Iterator[Connect]:
    with connections(lab) as connect:
        yield connect
