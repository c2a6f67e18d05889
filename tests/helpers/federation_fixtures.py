"""A federation of processes that tests share, and the log of what faults cost."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from process_federation import CLIENTS, FaultLog, ProcessFederation


@pytest.fixture(scope="session")
def shared_federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessFederation]:
    """A federation with TLS and keys; each of its clients holds a share of the embedded data.

    One for all tests: its processes take seconds to start. Others than the usual clients have keys.
    """
    federation = ProcessFederation(tmp_path_factory.mktemp("federation"))
    try:
        federation.make("--names", *CLIENTS, "spare", "tamperer")
        yield federation
    finally:
        federation.finish()


@pytest.fixture
def federation(shared_federation: ProcessFederation) -> ProcessFederation:
    """The same, with its server and all its clients running."""
    shared_federation.repair()
    return shared_federation


@pytest.fixture(scope="session")
def fault_log() -> Iterator[FaultLog]:
    """Collects how long faults took; the table is left in build/faults.md."""
    fault_log = FaultLog()
    yield fault_log
    folder = Path(__file__).parents[2] / "build"
    folder.mkdir(exist_ok=True)
    fault_log.save(folder / "faults.md")
