"""A server of Flower's own with three keys, and connections to it."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
from superlinks import RunningServer, running_server

from mpfedcl.network.flower.control import register_clients
from mpfedcl.network.flower.fleet import FleetNode
from mpfedcl.network.setup.folders import ClientFolder

Connect = Callable[[str], FleetNode]
"""(name) -> a connection with the key of that client."""


@pytest.fixture(scope="module", name="lab")
def lab_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Flower's server; it knows the keys of three clients."""
    with running_server(tmp_path_factory.mktemp("server") / "lab", "a", "b", "c") as server:
        register_clients(server.folder)
        yield server


@pytest.fixture(name="connect")
def connect_fixture(lab: RunningServer) -> Iterator[Connect]:
    """Connect to the server with the key of a client; without a name, with an unknown one."""
    with contextlib.ExitStack() as stack:

        def connect(name: str) -> FleetNode:
            key = ClientFolder.open(lab.folder.root, name).key if name else None
            node = FleetNode(lab.address, key, None)
            stack.callback(node.close)
            return node

        yield connect
