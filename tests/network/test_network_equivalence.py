"""Over a network, every method gives what a simulation gives."""

from pathlib import Path
from typing import Any

import pytest
from federations import (
    LoopbackFederation,
    assert_like_simulation,
    assert_same_personal_models,
    assert_same_predictors,
    float64_experiment,
)

from mpfedcl import Predictor, run
from mpfedcl.data.loading import load_federated_data
from mpfedcl.methods import Asynchronous, built_in_methods
from small_experiments import read_records

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("quick_network")]

SCAFFOLD, PULL = "custom_method:Scaffold", "pull_method:Pull"
IN_ROUNDS = [
    name
    for name, cls in built_in_methods().items()
    # fedbn's model has layers that this one has not.
    if not issubclass(cls, Asynchronous) and name != "fedbn"
]
RAGGED = {"partition__kind": "quantity", "partition__alpha": 1.0, "clients": 6}
ONES = {"partition__kind": "quantity", "partition__alpha": 0.8, "clients": 6}


def test_settings_of_ones_own_class_reach_the_clients(images: Path, tmp_path: Path) -> None:
    changes = {"pull__beta": 0.3, "pull__norm": "absolute", "pull__layers": ("hidden",)}
    experiment = float64_experiment(images, PULL, **changes)
    federation = LoopbackFederation(experiment, tmp_path, methods=PULL)
    found, wanted = federation.serve(), run(experiment, tmp_path / "simulation")
    assert_like_simulation(found.path, wanted.path, experiment)
    other = run(experiment.replace(pull__beta=0.0), tmp_path / "other")
    with pytest.raises(AssertionError):
        assert_like_simulation(found.path, other.path, experiment)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("method", [*IN_ROUNDS, SCAFFOLD])
def test_every_method_gives_the_simulations_result(
    images: Path, tmp_path: Path, method: str
) -> None:
    experiment = float64_experiment(images, method, partition__test="matched")
    federation = LoopbackFederation(experiment, tmp_path, methods=SCAFFOLD)
    found, wanted = federation.serve(), run(experiment, tmp_path / "simulation")
    assert_like_simulation(found.path, wanted.path, experiment)
    assert_same_personal_models(federation, wanted.path)
    for ours, theirs in zip(read_records(found.path), read_records(wanted.path), strict=True):
        assert_same_predictors(ours, theirs, method)
    ours_confused = (found.path / "confusion.json").read_text()
    assert ours_confused == (wanted.path / "confusion.json").read_text()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("mp-fedcl", ONES),
        ("fedproto", RAGGED | {"evaluate_every": 2}),
        ("mp-fedcl", RAGGED | {"evaluate_every": 2, "prototypes__per_class": 4}),
        ("dp-fedcl", RAGGED | {"share_model": False}),
        ("mp-fedcl", {"prototypes__min_cluster_size": 3, "contrast__form": "pooled"}),
        ("mp-fedcl", RAGGED | {"aggregation__rule": "median", "update__clip": 0.05}),
        ("fedavg", {"update__clip": 0.05}),
        ("mp-fedcl", {"update__compress": "topk", "rounds": 3}),
        ("fedproto", {"update__compress": "half", "prototypes__pool_size": 2}),
        ("mp-fedcl", {"update__compress": "half", "prototypes__pool_size": 2}),
    ],
)
def test_so_it_does_with_other_clients_and_settings(
    images: Path, tmp_path: Path, method: str, changes: dict[str, Any]
) -> None:
    experiment = float64_experiment(images, method, **changes)
    sizes = [len(client.labels) for client in load_federated_data(experiment).clients]
    assert changes != ONES or sizes.count(1) > 1
    found = LoopbackFederation(experiment, tmp_path).serve()
    wanted = run(experiment, tmp_path / "simulation")
    assert_like_simulation(found.path, wanted.path, experiment)
    clipped = [each["processed"] for each in read_records(found.path)]
    assert clipped == [each["processed"] for each in read_records(wanted.path)]
    assert any(clipped) == ("update__clip" in changes)
    for ours, theirs in zip(read_records(found.path), read_records(wanted.path), strict=True):
        assert (ours["accuracy"] is None) == (theirs["accuracy"] is None)
        if theirs["accuracy"] is not None:
            assert_same_predictors(ours, theirs, method)


@pytest.mark.parametrize("method", ["mp-fedcl", "fedgauss"])
def test_strangers_are_bounded_unless_one_says_otherwise(
    images: Path, tmp_path: Path, method: str
) -> None:
    changes = {
        "validation__bounds": "auto",
        "validation__clip_factor": 0.8,
        "aggregation__rule": "median",
    }
    experiment = float64_experiment(images, method, **RAGGED | changes)
    found = LoopbackFederation(experiment, tmp_path).serve()
    wanted = run(experiment.replace(validation__bounds="on"), tmp_path / "simulation")
    assert_like_simulation(found.path, wanted.path, experiment)
    told = [[each["processed"] for each in read_records(r.path)] for r in (found, wanted)]
    assert told[0] == told[1]
    assert any("bound on length" in each for each in told[0]) == (method == "mp-fedcl")


@pytest.mark.parametrize("method", ["mp-fedcl", "fedproto", SCAFFOLD])
def test_so_it_does_when_clients_are_sampled(images: Path, tmp_path: Path, method: str) -> None:
    changes = {"clients": 5, "fraction": 0.4, "prototypes__pool_ttl": 2, "rounds": 4}
    experiment = float64_experiment(images, method, **changes)
    federation = LoopbackFederation(experiment, tmp_path, methods=SCAFFOLD)
    found, wanted = federation.serve(), run(experiment, tmp_path / "simulation")
    for ours, theirs in zip(read_records(found.path), read_records(wanted.path), strict=True):
        assert ours["clients"] == theirs["clients"]
        assert len(ours["clients"]["answered"]) == 2
    # Everyone reads the global model at the end; personal models those that trained then.
    if method != "fedproto":
        assert_like_simulation(found.path, wanted.path, experiment)
    last, theirs = read_records(found.path)[-1], read_records(wanted.path)[-1]
    assert_same_predictors(last, theirs, method)
    # Before that only whoever is asked to train next reads a round.
    for before, after in zip(read_records(found.path), read_records(found.path)[1:], strict=False):
        assert list(before["accuracy_per_client"]) == after["clients"]["answered"]
        for name, value in before["accuracy_per_client"].items():
            assert value in (
                None,
                read_records(wanted.path)[before["round"] - 1]["accuracy_per_client"][name],
            )


def test_so_it_does_with_convolutions_and_norms_that_stay_at_home(
    images: Path, tmp_path: Path
) -> None:
    changes = {"model__name": "cnn", "model__hidden": (6,), "model__norm": "group", "rounds": 2}
    experiment = float64_experiment(images, "fedbn", partition__test="matched", **changes)
    federation = LoopbackFederation(experiment, tmp_path)
    found, wanted = federation.serve(), run(experiment, tmp_path / "simulation")
    assert_same_personal_models(federation, wanted.path)
    for ours, theirs in zip(read_records(found.path), read_records(wanted.path), strict=True):
        assert ours["bytes"] == theirs["bytes"]
        assert_same_predictors(ours, theirs, "fedbn")
    averaged = float64_experiment(images, "fedavg", **changes)
    served = LoopbackFederation(averaged, tmp_path / "averaged").serve()
    assert Predictor.load(served.path).trained.input_format.shape == (6, 6)
