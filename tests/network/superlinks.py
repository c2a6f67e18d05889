"""Flower's own server in a thread of the test: guarded as ours is, without TLS."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from flwr.superlink.main import create_app

from mpfedcl.network.flower.programs import write_connection
from mpfedcl.network.flower.superlink import add_guards
from mpfedcl.network.flower.transport import THREAD_NAME
from mpfedcl.network.setup.folders import ServerFolder, make_federation
from process_federation import free_port


def wait_for_calls() -> None:
    """Wait for what a transport still does in the background.

    Flower interrupts a process that asks for something of a run which is over: here, the tests'.
    """
    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:
            thread.join(10)


class RunningServer:
    """A federation's folder, its server, and what it was asked."""

    def __init__(self, folder: ServerFolder) -> None:
        self.folder = folder
        self.address = f"127.0.0.1:{folder.port}"
        self.asked: list[str] = []
        """The paths of all requests."""
        self.app = create_app()
        # Only keys that were let in, as over TLS.
        self.app.state.enable_supernode_auth = True
        add_guards(self.app, folder.read_secret())

    async def __call__(self, scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        self.asked.append(str(scope.get("path")))
        await self.app(scope, receive, send)


@contextmanager
def running_server(root: Path, *clients: str) -> Iterator[RunningServer]:
    """Run a server of a new federation."""
    folder = make_federation(root, clients, None, free_port())
    write_connection(folder, "127.0.0.1", is_insecure=True)
    server = RunningServer(folder)
    config = uvicorn.Config(
        server, host="127.0.0.1", port=folder.port, log_level="error", ws="none"
    )
    program = uvicorn.Server(config)
    thread = threading.Thread(target=program.run, daemon=True)
    thread.start()
    try:
        while not program.started:
            assert thread.is_alive()
            time.sleep(0.02)
        yield server
    finally:
        program.should_exit = True
        thread.join(20)
