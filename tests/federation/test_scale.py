"""Fifty clients on this machine, killed at random during runs: `make test-federation-scale`.

Clients are separate processes with keys and TLS, forked from one that has torch and Flower loaded:
fifty need 1.6 GB. Started independently they would need 17 GB, and each restart four seconds of CPU
time. The model is small and there are few rounds: messages dominate the cost.
"""

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w

from command_processes import CommandProcess
from forked_client import preload, take_part
from mpfedcl.network.flower.programs import environment
from mpfedcl.network.setup.folders import ClientFolder
from process_federation import FederationRun, ProcessFederation, wait_until

pytestmark = pytest.mark.scale

NODES = int(os.environ.get("MPFEDCL_NODES", "50"))
RUNS = int(os.environ.get("MPFEDCL_RUNS", "20"))
ROUNDS = 2
MOST_SECONDS = 600.0
KILL_SECONDS = 50 / NODES
"""Seconds between two kills: each client is killed about once in fifty seconds."""
METHODS = ("fedavg", "mp-fedcl", "fedproto", "fedgauss")


class Nodes:
    """The clients' processes; a thread kills and restarts one at a time."""

    def __init__(self, federation: ProcessFederation, seed: int) -> None:
        self.kills = 0
        self._folders: list[ClientFolder] = []
        self._server = f"127.0.0.1:{federation.port}"
        width = len(str(NODES - 1))
        for share in range(NODES):
            folder = ClientFolder.open(federation.folder, f"client-{share:0{width}}")
            values = {"name": folder.name, "share": share, "state": str(folder.memory)}
            folder.settings.write_text(tomli_w.dumps({**values, "server": self._server}))
            self._folders.append(folder)
        self._processes = [self._start(folder) for folder in self._folders]
        self._random = random.Random(seed)
        self._is_over = threading.Event()
        self._killer = threading.Thread(target=self._kill_again_and_again)

    def start_killing(self) -> None:
        self._killer.start()

    def end(self) -> None:
        self._is_over.set()
        if self._killer.is_alive():
            self._killer.join()
        for process in self._processes:
            process.kill()
            process.wait()

    @property
    def are_in(self) -> bool:
        return all((folder.flower_home / "node.json").is_file() for folder in self._folders)

    def _start(self, folder: ClientFolder) -> CommandProcess:
        variables = environment(folder.flower_home)
        return CommandProcess([folder.root], folder.root, variables, program=take_part)

    def _kill_again_and_again(self) -> None:
        while not self._is_over.wait(KILL_SECONDS):
            number = self._random.randrange(NODES)
            self._processes[number].kill()
            self._processes[number].wait()
            self._processes[number] = self._start(self._folders[number])
            self.kills += 1


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ProcessFederation, Nodes]]:
    preload()
    federation = ProcessFederation(tmp_path_factory.mktemp("scale"))
    federation.make("--clients", NODES)
    federation.start_server()
    nodes = Nodes(federation, seed=0)
    try:
        wait_until(lambda: nodes.are_in, f"{NODES} clients are connected")
        nodes.start_killing()
        yield federation, nodes
    finally:
        nodes.end()
        federation.finish()


@pytest.mark.parametrize("number", range(RUNS))
def test_run_finishes_while_clients_are_killed(
    number: int, many: tuple[ProcessFederation, Nodes]
) -> None:
    federation, nodes = many
    method = METHODS[number % len(METHODS)]
    begin, kills = time.monotonic(), nodes.kills
    run = begin_run(federation, method, f"run-{number}")
    run.finish(MOST_SECONDS)
    records = run.records()
    answered = [len(each["clients"]["answered"]) for each in records]
    print(
        f"\n{method}: {time.monotonic() - begin:.0f} s, {nodes.kills - kills} kills, "
        f"answered per round: {answered}"
    )
    assert len(records) == (1 if method == "fedgauss" else ROUNDS)
    assert min(answered) >= NODES // 2
    assert (run.path / "summary.json").is_file()


def begin_run(federation: ProcessFederation, method: str, name: str) -> FederationRun:
    path: Path = federation.root / name
    settings = {
        "--method": method,
        "--rounds": ROUNDS,
        "--clients": NODES,
        "--partition.kind": "iid",
        "--network.enough": 0.8,
        "--network.round-timeout": 120,
        "--network.patience": 120,
    }
    words = [word for pair in settings.items() for word in pair]
    return federation._start_run(path, "--out", path, "--model.hidden", 16, *words)
