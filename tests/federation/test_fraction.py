"""Sampling a quarter of eight clients per round, as processes with keys and TLS."""

from collections.abc import Iterator

import pytest
import tomli_w
import torch
from safetensors.torch import load_file

from command_processes import CommandProcess
from forked_client import preload, take_part
from mpfedcl import Experiment, run
from mpfedcl.network.flower.programs import environment
from mpfedcl.network.setup.folders import ClientFolder
from mpfedcl.runs.directory import RunDirectory
from process_federation import ProcessFederation, wait_until

pytestmark = pytest.mark.federation

NAMES = tuple(f"client-{share}" for share in range(8))
ROUNDS = 4


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessFederation]:
    """A federation with eight clients, each forked from a process that has torch loaded."""
    preload()
    federation = ProcessFederation(tmp_path_factory.mktemp("eight"))
    federation.make("--names", *NAMES)
    federation.start_server()
    folders = [ClientFolder.open(federation.folder, name) for name in NAMES]
    processes = []
    try:
        for share, folder in enumerate(folders):
            values = {"name": folder.name, "share": share, "state": str(folder.memory)}
            settings = {**values, "server": f"127.0.0.1:{federation.port}"}
            folder.settings.write_text(tomli_w.dumps(settings))
            variables = environment(folder.flower_home)
            words = ([folder.root], folder.root, variables)
            processes.append(CommandProcess(*words, program=take_part))
        wait_until(
            lambda: all((each.flower_home / "node.json").is_file() for each in folders),
            "all clients are connected",
        )
        yield federation
    finally:
        for process in processes:
            process.kill()
            process.wait()
        federation.finish()


def test_only_sampled_clients_are_asked_as_in_simulation(
    eight: ProcessFederation, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = eight.root / "quarter"
    settings = {
        "--out": path,
        "--clients": len(NAMES),
        "--rounds": ROUNDS,
        "--fraction": 0.25,
        "--dtype": "float64",
        "--model.hidden": 16,
        "--partition.alpha": 1,
    }
    words = [word for pair in settings.items() for word in pair]
    over_network = eight._start_run(path, *words)
    over_network.finish()
    simulated = tmp_path_factory.mktemp("simulated") / "quarter"
    experiment = RunDirectory(path).read_experiment()
    run(Experiment.parse_toml(experiment.to_toml(), simulated), simulated)
    ours, theirs = over_network.records(), RunDirectory(simulated).read_records()
    assert len(ours) == ROUNDS
    asked = [each["clients"]["answered"] for each in ours]
    assert [len(each) for each in asked] == [2] * ROUNDS
    for mine, other in zip(ours, theirs, strict=True):
        for key in ("round", "clients", "bytes", "sent", "unchanged"):
            assert mine[key] == other[key], key
    for name in ("model.safetensors", "pool.safetensors"):
        mine, other = load_file(path / name), load_file(simulated / name)
        assert mine.keys() == other.keys()
        for key, value in mine.items():
            torch.testing.assert_close(value, other[key], rtol=1e-5, atol=1e-9)
    # Clients that were not sampled have stored no state of a round.
    trained = {name for each in asked for name in each}
    assert 2 <= len(trained) < len(NAMES)
    for name in NAMES:
        kept = list(ClientFolder.open(eight.folder, name).memory.glob("*/round-*"))
        assert bool(kept) == (name in trained), name
