"""A run over Flower, TLS and processes equals its simulation."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mpfedcl import Experiment, run
from mpfedcl.runs.directory import RunDirectory
from process_federation import CLIENTS, FederationRun, ProcessFederation

pytestmark = pytest.mark.federation


def settings(**changes: Any) -> list[str]:
    return [word for name, value in changes.items() for word in (f"--{name}", str(value))]


def simulate(over_network: FederationRun, path: Path) -> RunDirectory:
    """Run the experiment of a run directory in this process."""
    experiment = RunDirectory(over_network.path).read_experiment()
    run(Experiment.parse_toml(experiment.to_toml(), path), path)
    return RunDirectory(path)


@pytest.mark.parametrize(
    ("method", "rounds"), [("mp-fedcl", 3), ("fedavg", 2), ("fedproto", 2), ("fedgauss", 1)]
)
def test_float64_weights_and_accuracies_equal_simulation(
    federation: ProcessFederation, tmp_path: Path, method: str, rounds: int
) -> None:
    changes = settings(method=method, rounds=rounds, dtype="float64")
    over_network = federation.begin(f"float64-{method}", *changes)
    over_network.finish()
    simulated = simulate(over_network, tmp_path / "simulated")
    ours = RunDirectory(over_network.path).read_summary()
    theirs = simulated.read_summary()
    assert ours is not None
    assert theirs is not None
    assert ours["accuracy"] == theirs["accuracy"]
    assert ours["accuracy_per_client"] == theirs["accuracy_per_client"]
    # A client evaluates only its method's predictors and computes no prototypes for others.
    read = {
        name: value for name, value in ours["predictors"]["local_test"].items() if value is not None
    }
    assert read
    assert read == {name: theirs["predictors"]["local_test"][name] for name in read}
    files = sorted(each.name for each in over_network.path.glob("*.safetensors"))
    assert "pool.safetensors" in files or method == "fedavg"
    assert "model.safetensors" in files or method == "fedproto"
    for name in files:
        mine, other = load_file(over_network.path / name), load_file(simulated.path / name)
        assert mine.keys() == other.keys()
        for key, value in mine.items():
            torch.testing.assert_close(value, other[key], rtol=1e-5, atol=1e-9)


def test_float32_accuracy_is_within_a_point_of_simulation(
    federation: ProcessFederation, tmp_path: Path
) -> None:
    over_network = federation.begin("float32", *settings(method="mp-fedcl", rounds=3))
    over_network.finish()
    ours = RunDirectory(over_network.path).read_summary()
    theirs = simulate(over_network, tmp_path / "simulated").read_summary()
    assert ours is not None
    assert theirs is not None
    assert abs(ours["accuracy"] - theirs["accuracy"]) <= 1
    answered = [each["clients"]["answered"] for each in over_network.records()]
    assert answered == [list(CLIENTS)] * 3
