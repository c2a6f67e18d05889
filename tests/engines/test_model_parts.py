"""Runs that train or send a part of the model: the rest is constant, or stays with each client."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from equivalent_runs import assert_close_tensors, load_results
from mpfedcl import load, resume
from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.rng import seed_for
from mpfedcl.data.loading import load_federated_data
from mpfedcl.engines.trainers.base import draw_batches
from mpfedcl.experiment import Experiment
from mpfedcl.report.results import LoadedRun
from mpfedcl.runs.observer import NO_CALLBACKS, Observer, RunResult
from mpfedcl.runs.simulation import run_simulation
from own_models import Plain, with_dropout, with_low_rank
from small_experiments import assert_close_results, assert_same_results, read_records, small

pytestmark = [pytest.mark.whole]

PLAIN, DROPOUT, LORA = (f"own_models:{n}" for n in ("Plain", "with_dropout", "with_low_rank"))
PARTS: dict[str, dict[str, Any]] = {
    "train": {"model__train": ("hidden.1.*", "classifier.*")},
    "head": {"model__train": ("classifier.*",)},
    "no-bias": {"model__train": ("*.weight",)},
    "share": {"model__share": ("hidden.*",)},
    "both": {"model__train": ("hidden.1.*", "classifier.*"), "model__share": ("hidden.*",)},
}


def run(experiment: Experiment, path: Path) -> RunResult:
    """Run without card and calibration."""
    return run_simulation(experiment, path, Observer(), NO_CALLBACKS)


def experiment_of(images: Path, method: str = "fedavg", **changes: Any) -> Experiment:
    settings = {"dtype": "float64", "train__lr": 0.1, "model__hidden": (8, 6)}
    settings |= {"model__hidden": ()} if ":" in changes.get("model__name", "") else {}
    return small(images, method, **settings | changes)


def make_module(factory: Any, experiment: Experiment) -> nn.Module:
    """Return a user's module as a run initializes it."""
    torch.manual_seed(seed_for(experiment.seed, "weights"))
    module: nn.Module = factory(3, (1, 6, 6)).to(getattr(torch, experiment.dtype))
    return module


def global_state(path: Path) -> dict[str, Tensor]:
    """Return all tensors of the global model of a run, constants included."""
    loaded = load(path)
    assert isinstance(loaded, LoadedRun)
    module = loaded.global_model
    assert module is not None
    return module.state_dict()


def train_by_hand(experiment: Experiment, model: nn.Module) -> dict[str, Tensor]:
    """Return FedAvg's model, trained with nothing but PyTorch, where gradients are required."""
    data = load_federated_data(experiment)
    for number in range(1, experiment.rounds + 1):
        mean = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
        for client in data.clients:
            own = copy.deepcopy(model)
            lr, momentum = experiment.train.learning_rate(number), experiment.train.momentum
            moving = [value for value in own.parameters() if value.requires_grad]
            optimizer = torch.optim.SGD(moving, lr, momentum)
            for batch in draw_batches(client, experiment, number):
                optimizer.zero_grad()
                logits = own(client.inputs[batch].reshape(-1, 1, 6, 6))
                cross_entropy(logits, client.labels[batch]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            for name, value in own.state_dict().items():
                mean[name] += len(client.labels) / sum(data.table.sizes) * value
        model.load_state_dict(mean)
    return model.state_dict()


def test_only_the_head_is_trained_and_sent(images: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "dtype": "float32",
        "model__name": DROPOUT,
        "model__train": ("head.*",),
    }
    experiment = experiment_of(images, **changes)
    path = run(experiment, tmp_path / "run").path
    before, after = make_module(with_dropout, experiment).state_dict(), global_state(path)
    assert after.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(after[name], value) == (not name.startswith("head."))
    # 3 classes with 8 inputs and a bias, in 4 bytes each, for 3 clients.
    for record in read_records(path):
        assert record["bytes"] == {"up": 3 * (3 * 8 + 3) * 4, "down": 3 * (3 * 8 + 3) * 4}
        assert record["sent"]["parameters"] == 27
    assert load_file(path / "model.safetensors").keys() == {"head.weight", "head.bias"}


@pytest.mark.parametrize("engine", ["loop", "stacked", "factored", "auto"])
@pytest.mark.parametrize("factory", [Plain, with_low_rank])
def test_trained_part_equals_a_loop_by_hand(
    images: Path, tmp_path: Path, engine: str, factory: Any
) -> None:
    name = f"own_models:{factory.__name__}"
    train: tuple[str, ...] = ("head.*",) if factory is Plain else ()
    experiment = experiment_of(images, model__name=name, model__train=train, engine=engine)
    module = make_module(factory, experiment)
    if train:
        module.get_submodule("body").requires_grad_(False)
    found = global_state(run(experiment, tmp_path / "run").path)
    assert_close_tensors(found, train_by_hand(experiment.resolved(), module), 1e-10)


def test_low_rank_updates_and_the_head_are_sent_without_the_base(
    images: Path, tmp_path: Path
) -> None:
    experiment = experiment_of(images, dtype="float32", model__name=LORA)
    by_factory = run(experiment, tmp_path / "factory").path
    patterns = ("*lora_*", "head.*")
    by_pattern = run(experiment.replace(model__train=patterns), tmp_path / "pattern").path
    assert_same_results(by_pattern, by_factory)
    sent = 2 * 36 + 8 * 2 + 3 * 8 + 3
    assert read_records(by_pattern)[-1]["bytes"] == {"up": 3 * 4 * sent, "down": 3 * 4 * sent}
    before, after = make_module(with_low_rank, experiment), global_state(by_pattern)
    for name in ("body.base.weight", "body.base.bias"):
        assert torch.equal(after[name], before.state_dict()[name])
    # Clients send their updates of the base, and keep their heads.
    personal = experiment.replace(model__share=("*lora_*",))
    record = read_records(run(personal, tmp_path / "personal").path)[-1]
    assert record["bytes"]["up"] == 3 * 4 * (sent - 27)


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_engines_workers_and_resumed_runs_agree(
    images: Path, tmp_path: Path, forked_workers: None, part: dict[str, Any]
) -> None:
    experiment = experiment_of(images, clients=5, partition__min_size=1, **part)
    path = run(experiment, tmp_path / "auto").path
    begun = run(experiment.replace(rounds=1), tmp_path / "begun").path
    assert_same_results(resume(begun, rounds=2).path, path)
    assert_close_results(run(experiment.replace(workers=2), tmp_path / "two").path, path, 1e-9)
    wanted, records = load_results(path), read_records(path)
    for engine in ("loop", "stacked", "factored"):
        other = run(experiment.replace(engine=engine), tmp_path / engine).path
        for name, tensors in load_results(other).items():
            assert_close_tensors(tensors, wanted[name], 1e-9, name)
        for record, same in zip(read_records(other), records, strict=True):
            assert record["bytes"] == same["bytes"]
            assert record["accuracy"] == same["accuracy"]


@pytest.mark.parametrize("engine", ["loop", "stacked", "auto"])
@pytest.mark.parametrize("layers", [1, 2])
def test_sharing_all_but_the_last_layers_is_fedper(
    images: Path, tmp_path: Path, engine: str, layers: int
) -> None:
    share = ("hidden.*",) if layers == 1 else ("hidden.0.*",)
    experiment = experiment_of(images, engine=engine, model__share=share)
    found = run(experiment, tmp_path / "share").path
    other = experiment.replace(method="fedper", model__share=(), fedper__layers=layers)
    wanted = run(other, tmp_path / "fedper").path
    ours, theirs = load_results(found), load_results(wanted)
    assert ours.keys() == theirs.keys()
    for name, tensors in theirs.items():
        assert all(torch.equal(ours[name][each], value) for each, value in tensors.items())
    for record, same in zip(read_records(found), read_records(wanted), strict=True):
        assert {**record, "seconds": 0} == {**same, "seconds": 0}


def test_running_statistics_follow_the_patterns(images: Path, tmp_path: Path) -> None:
    share = ("conv.*", "hidden.*", "head.*")
    experiment = experiment_of(images, model__name="own_models:WithNorm", model__share=share)
    found = run(experiment, tmp_path / "share").path
    other = run(experiment.replace(method="fedbn", model__share=()), tmp_path / "fedbn").path
    ours, theirs = load_results(found), load_results(other)
    for name, tensors in theirs.items():
        assert all(torch.equal(ours[name][each], value) for each, value in tensors.items())
    assert read_records(found)[-1]["sent"] == read_records(other)[-1]["sent"]


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("fedavg", {"model__train": ("head.*",)}, r"model.train is 'head.\*', which matches no pa"),
        ("fedavg", {"model__share": ("head.*",)}, r"model.share is 'head.\*', which matches no pa"),
        ("local", {}, r"with method local it must be left out: its clients share no model\."),
        ("fedproto", {}, "its clients share no model"),
        ("mp-fedcl", {"share_model": False}, "its clients share no model"),
        ("ditto", {}, "its clients have a personal model already"),
        ("scaffold", {}, "it sends all parameters"),
        ("fedasync", {}, "its server mixes whole models"),
        ("fed-dropout", {}, "the method draws the part of the model that a client trains"),
        ("fedper", {"model__share": ("classifier.*",)}, "it keeps all that the patterns match"),
        ("fedper", {"model__train": ("classifier.*",), "model__share": ()}, "must match more"),
        (
            "fedavg",
            {"privacy__epsilon": 8.0, "privacy__unit": "client"},
            "with a privacy budget it must be left out: only a model that clients share may be",
        ),
    ],
)
def test_what_does_not_fit_is_rejected(
    images: Path, tmp_path: Path, method: str, changes: dict[str, Any], message: str
) -> None:
    settings = {"model__share": ("hidden.*",)} if "model__train" not in changes else {}
    with pytest.raises(InvalidInput, match=message):
        run(experiment_of(images, method, **settings | changes), tmp_path / "run")


def test_methods_that_train_nothing_ignore_the_patterns(images: Path, tmp_path: Path) -> None:
    patterns = {"model__train": ("head.*",), "model__share": ("*lora_*",)}
    path = run(experiment_of(images, "fedgauss", **patterns), tmp_path / "patterns").path
    assert_same_results(path, run(experiment_of(images, "fedgauss"), tmp_path / "none").path)
