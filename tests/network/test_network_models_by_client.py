"""Clients with different models over a network: each builds its own, by its name."""

from pathlib import Path

import pytest
from federations import LoopbackFederation, assert_same_predictors, float64_experiment

from equivalent_runs import assert_close_tensors, load_results
from mpfedcl import Predictor, run
from mpfedcl.core.errors import InvalidInput, RunCutShort
from mpfedcl.experiment import Experiment
from mpfedcl.runs.directory import RunDirectory
from small_experiments import read_records

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("quick_network")]

OWN = "own_models:Convolution"


def experiment_of(images: Path, method: str = "fedproto", **changes: object) -> Experiment:
    settings: dict[str, object] = {"share_model": False, "model__hidden": (8, 5), "rounds": 2}
    clients = {"client-1": OWN}
    return float64_experiment(images, method, **settings | {"model__clients": clients} | changes)


def connect(experiment: Experiment, folder: Path) -> LoopbackFederation:
    """Return a federation in which only client-1 has the module installed."""
    federation = LoopbackFederation(experiment, folder, count=0)
    for share in range(3):
        federation.join(share, models=OWN if share == 1 else "")
    return federation


@pytest.mark.parametrize("method", ["fedproto", "fedpcl", "local", "mp-fedcl"])
def test_federation_equals_simulation(images: Path, tmp_path: Path, method: str) -> None:
    experiment = experiment_of(images, method)
    federation = connect(experiment, tmp_path)
    found = federation.serve().path
    wanted = run(experiment, tmp_path / "simulation").path
    ours, theirs = load_results(found), load_results(wanted)
    if method != "local":
        assert_close_tensors(ours["pool.safetensors"], theirs["pool.safetensors"], 1e-10)
    for record, simulated in zip(read_records(found), read_records(wanted), strict=True):
        assert_same_predictors(record, simulated, method)
        assert record["bytes"] == simulated["bytes"]
    partitions = [RunDirectory(path).read_json("partition.json") or {} for path in (found, wanted)]
    assert list(partitions[0]["models"]) == ["client-1"]
    assert partitions[0]["models"] == partitions[1]["models"]
    for share in range(3):
        (final,) = federation.state_folder(share).glob("*/final")
        name = f"client-{share}"
        kept = Predictor.load(final, name)
        assert_close_tensors(kept.params, theirs[f"models/{name}.safetensors"], 1e-10, name)


def test_other_sizes_of_embeddings_are_refused_before_training(
    images: Path, tmp_path: Path
) -> None:
    experiment = experiment_of(images, model__hidden=(8, 4), min_clients=3)
    federation = connect(experiment.replace(network__patience=1.0), tmp_path)
    reason = "client-1: its embeddings have 5 values, the others' 4: models may differ"
    with pytest.raises(RunCutShort, match=reason):
        federation.serve()
    assert not federation.path.exists()


def test_methods_that_share_parameters_are_rejected(images: Path, tmp_path: Path) -> None:
    federation = connect(experiment_of(images, "fedavg", share_model=True), tmp_path)
    with pytest.raises(InvalidInput, match="clients of method 'fedavg' must have the same model"):
        federation.serve()


def test_resumed_federation_continues_with_the_same_models(images: Path, tmp_path: Path) -> None:
    whole = connect(experiment_of(images, rounds=3), tmp_path / "whole").serve().path
    begun = connect(experiment_of(images, rounds=1), tmp_path / "begun")
    begun.serve()
    found, wanted = load_results(begun.resume(3).path), load_results(whole)
    assert_close_tensors(found["pool.safetensors"], wanted["pool.safetensors"], 1e-12)
