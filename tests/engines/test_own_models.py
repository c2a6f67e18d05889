"""Modules of users equal a loop by hand, on every engine, with workers, and resumed."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from equivalent_runs import assert_close_tensors, assert_same_records, load_results
from mpfedcl import resume
from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.rng import seed_for
from mpfedcl.core.tensors import Tensors
from mpfedcl.data.loading import load_federated_data
from mpfedcl.engines.trainers.base import draw_batches
from mpfedcl.experiment import Experiment
from mpfedcl.methods import Asynchronous, PartialModel, TwoModels, built_in_methods
from mpfedcl.runs.observer import NO_CALLBACKS, Observer, RunResult
from mpfedcl.runs.simulation import run_simulation
from own_models import WithNorm
from small_experiments import assert_close_results, assert_same_results, read_records, small

pytestmark = [pytest.mark.whole]

NORM, DROPOUT, PLAIN = "own_models:WithNorm", "own_models:with_dropout", "own_models:Plain"
FLAT_NORM = "own_models:with_flat_norm"
TRAINED = {name: cls for name, cls in built_in_methods().items() if cls.trains}
WITH_STATISTICS = [
    name for name, cls in TRAINED.items() if not issubclass(cls, PartialModel | TwoModels)
]
WITHOUT = [n for n, cls in TRAINED.items() if not issubclass(cls, PartialModel) and n != "fedbn"]


def run(experiment: Experiment, path: Path, observer: Observer | None = None) -> RunResult:
    """Run without card and calibration."""
    return run_simulation(experiment, path, observer or Observer(), NO_CALLBACKS)


def experiment_of(images: Path, method: str, model: str, **changes: Any) -> Experiment:
    settings = {
        "rounds": 3,
        "dtype": "float64",
        "train__lr": 0.1,
        "train__batch_size": 8,
        "partition__alpha": 0.5,
        "model__name": model,
        "model__hidden": (),
    }
    return small(images, method, **settings | changes)


def train_by_hand(experiment: Experiment) -> Tensors:
    """Return FedAvg's model, trained with nothing but PyTorch."""
    data = load_federated_data(experiment)
    torch.manual_seed(seed_for(experiment.seed, "weights"))
    model: nn.Module = WithNorm(data.num_classes, (1, 6, 6)).double()
    for number in range(1, experiment.rounds + 1):
        mean: dict[str, Tensor] = {}
        for client in data.clients:
            own = copy.deepcopy(model).train()
            lr, momentum = experiment.train.learning_rate(number), experiment.train.momentum
            optimizer = torch.optim.SGD(own.parameters(), lr, momentum)
            for batch in draw_batches(client, experiment, number, least=2):
                optimizer.zero_grad()
                logits = own(client.inputs[batch].reshape(-1, 1, 6, 6))
                cross_entropy(logits, client.labels[batch]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            share = len(client.labels) / sum(data.table.sizes)
            for name, value in own.state_dict().items():
                if value.is_floating_point():
                    mean[name] = mean.get(name, torch.zeros_like(value)) + share * value
        model.load_state_dict(mean, strict=False)
    return mean


def test_fedavg_with_batch_normalization_equals_a_loop_by_hand(
    images: Path, tmp_path: Path
) -> None:
    experiment = experiment_of(images, "fedavg", NORM).resolved()
    found = load_file(run(experiment, tmp_path / "run").path / "model.safetensors")
    assert_close_tensors(found, train_by_hand(experiment), 1e-10)


def test_record_says_why_clients_are_trained_in_turn(images: Path, tmp_path: Path) -> None:
    for model, reason in ((NORM, ["loop: the model has running statistics"]), (PLAIN, None)):
        experiment = experiment_of(images, "fedprox", model, clients=6, partition__min_size=1)
        record = read_records(run(experiment, tmp_path / model[-5:]).path)[-1]
        assert record["remarks"]["training"].get("fallback") == reason
        assert ("stacked" in record["remarks"]["training"]) == (reason is None)
    with pytest.raises(InvalidInput, match="engine is 'stacked'; it must be auto or loop, because"):
        run(experiment_of(images, "fedavg", NORM, engine="stacked"), tmp_path / "stacked")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", WITHOUT)
def test_every_method_stacks_a_module(images: Path, tmp_path: Path, method: str) -> None:
    experiment = experiment_of(images, method, PLAIN)
    engines = {name: experiment.replace(engine=name) for name in ("loop", "stacked")}
    if issubclass(TRAINED[method], Asynchronous):
        engines["stacked"] = experiment
    paths = {name: run(each, tmp_path / name).path for name, each in engines.items()}
    found, wanted = load_results(paths["stacked"]), load_results(paths["loop"])
    assert found.keys() == wanted.keys()
    for name, tensors in wanted.items():
        assert_close_tensors(found[name], tensors, 1e-5, name)
    assert_same_records(read_records(paths["stacked"]), read_records(paths["loop"]), 1e-5)


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("method", WITH_STATISTICS)
def test_every_method_takes_batch_normalization_and_dropout(
    images: Path, tmp_path: Path, method: str
) -> None:
    experiment = experiment_of(images, method, DROPOUT, rounds=2)
    path = run(experiment, tmp_path / "one").path
    models = [load_file(each) for each in sorted((path / "models").iterdir())]
    assert len({float(each["norm.running_mean"].sum()) for each in models}) > 1
    if not issubclass(TRAINED[method], Asynchronous):
        together = run(experiment.replace(workers=2), tmp_path / "two").path
        assert_close_results(together, path, 1e-9)


def test_resumed_run_draws_the_same_dropout(images: Path, tmp_path: Path) -> None:
    experiment = experiment_of(images, "mp-fedcl", DROPOUT, rounds=4)
    whole = run(experiment, tmp_path / "whole").path
    begun = run(experiment.replace(rounds=2), tmp_path / "begun").path
    assert_same_results(resume(begun, rounds=4).path, whole)


def test_fedbn_keeps_normalization_with_its_statistics(images: Path, tmp_path: Path) -> None:
    path = run(experiment_of(images, "fedbn", NORM), tmp_path / "run").path
    models = [load_file(each) for each in sorted((path / "models").iterdir())]
    first, second = models[:2]
    for name in ("norm.weight", "norm.running_var"):
        assert not torch.equal(first[name], second[name])
    sent = read_records(path)[-1]["sent"]["parameters"]
    kept = sum(value.numel() for name, value in first.items() if name.startswith("norm."))
    assert sent == sum(value.numel() for value in first.values()) - kept


def test_batch_normalization_meets_no_single_sample_where_there_are_more(
    images: Path, tmp_path: Path
) -> None:
    # 60 images: each client has 20, in batches of 19 and 1.
    settings = {"partition__kind": "iid", "clients": 3, "train__batch_size": 19}
    experiment = experiment_of(images, "fednova", FLAT_NORM, **settings)
    assert all(record["loss"] for record in read_records(run(experiment, tmp_path / "a").path))
    with pytest.raises(InvalidInput, match=r"cannot train on 1 samples at a time \(Expected more"):
        run(experiment.replace(train__batch_size=1), tmp_path / "b")


def test_running_statistics_do_not_fit_two_models_or_a_privacy_budget(
    images: Path, tmp_path: Path
) -> None:
    for method, changes, reason in (
        ("ditto", {}, "method is 'ditto', which trains two models in turn"),
        ("fedavg", {"privacy__epsilon": 8.0, "privacy__unit": "client"}, "with a privacy budget"),
        ("fed-dropout", {}, "with method fed-dropout it must be mlp or cnn"),
    ):
        with pytest.raises(InvalidInput, match=reason):
            run(experiment_of(images, method, NORM, **changes), tmp_path / method)
