"""Clients with different models: on every engine, resumed, saved, and used for predictions."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import linear

import mpfedcl
from mpfedcl import resume
from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors
from mpfedcl.data.loading import load_federated_data
from mpfedcl.experiment import Experiment
from mpfedcl.inference.predictor import Predictor
from mpfedcl.runs.observer import NO_CALLBACKS, Observer, RunResult
from mpfedcl.runs.simulation import run_simulation
from own_models import Convolution
from small_experiments import (
    assert_close_results,
    assert_same_results,
    assert_same_run,
    read_records,
    results_of,
    small,
)

pytestmark = [pytest.mark.whole]

OWN, NORM = "own_models:Convolution", "own_models:with_dropout"
MIXED = ("client-1=own_models:Convolution", "client-[2-5]=own_models:Convolution")
METHODS = ("fedproto", "fedpcl", "local", "mp-fedcl")
SETTINGS: dict[str, Any] = {
    "rounds": 3,
    "clients": 8,
    "share_model": False,
    "dtype": "float64",
    "train__lr": 0.1,
    "partition__alpha": 0.5,
    "partition__min_size": 1,
    "model__hidden": (8, 5),
}


def experiment_of(images: Path, method: str = "fedproto", **changes: Any) -> Experiment:
    return small(images, method, **SETTINGS | {"model__clients": MIXED} | changes)


def run(experiment: Experiment, path: Path) -> RunResult:
    """Run without card and calibration."""
    return run_simulation(experiment, path, Observer(), NO_CALLBACKS)


@pytest.mark.parametrize("method", METHODS)
def test_same_model_by_client_equals_one_model(images: Path, tmp_path: Path, method: str) -> None:
    one = experiment_of(images, method, model__clients=())
    mapped = one.replace(model__name="linear", model__clients={"client-*": "mlp"})
    assert_same_results(run(mapped, tmp_path / "mapped").path, run(one, tmp_path / "one").path)
    own = one.replace(model__name=OWN, model__hidden=())
    mapped = own.replace(model__name="mlp", model__clients={"client-*": OWN})
    assert_same_results(run(mapped, tmp_path / "b").path, run(own, tmp_path / "a").path)


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("method", METHODS)
def test_engines_and_workers_agree(images: Path, tmp_path: Path, method: str) -> None:
    experiment = experiment_of(images, method)
    loop = run(experiment.replace(engine="loop"), tmp_path / "loop").path
    assert len(results_of(loop)) == 8 + (method != "local")
    others: dict[str, dict[str, Any]] = {
        "auto": {},
        "stacked": {"engine": "stacked"},
        "workers": {"engine": "loop", "workers": 2},
    }
    for name, changes in others.items():
        path = run(experiment.replace(**changes), tmp_path / name).path
        assert_close_results(path, loop, 1e-9)
        for ours, theirs in zip(read_records(path), read_records(loop), strict=True):
            assert ours["accuracy"] == theirs["accuracy"]
            if name == "stacked":
                assert ours["remarks"]["training"] == {"stacked": 8}


def test_clients_that_train_alone_have_the_models_of_runs_with_one_model(
    images: Path, tmp_path: Path
) -> None:
    experiment = experiment_of(images, "local", engine="loop")
    mixed = results_of(run(experiment, tmp_path / "mixed").path)
    one = experiment.replace(model__clients=())
    for name, changes in {"mlp": {}, OWN: {"model__name": OWN, "model__hidden": ()}}.items():
        alone = results_of(run(one.replace(**changes), tmp_path / name[-4:]).path)
        for number in range(8):
            file = f"models/client-{number}.safetensors"
            is_own = 1 <= number <= 5
            assert (mixed[file] == alone[file]) == (is_own == (name == OWN))


@pytest.mark.parametrize("method", METHODS)
def test_resumed_run_is_the_same(images: Path, tmp_path: Path, method: str) -> None:
    experiment = experiment_of(images, method)
    whole = mpfedcl.run(experiment, tmp_path / "whole").path
    begun = mpfedcl.run(experiment.replace(rounds=1), tmp_path / "begun").path
    assert_same_run(resume(begun, rounds=3).path, whole)


def test_running_statistics_and_dropout_stay_with_their_clients(
    images: Path, tmp_path: Path
) -> None:
    clients = {"client-0": NORM, "client-1": OWN}
    changes: dict[str, Any] = {"clients": 3, "model__hidden": (9, 8), "model__clients": clients}
    with pytest.raises(InvalidInput, match=r"client-0 embeddings of 8 values and client-1 of 5"):
        run(experiment_of(images, **changes), tmp_path / "unequal")
    experiment = experiment_of(images, **changes | {"model__clients": {"client-0": NORM}})
    path = run(experiment, tmp_path / "run").path
    assert "norm.running_mean" in load_file(path / "models" / "client-0.safetensors")
    assert "norm.running_mean" not in load_file(path / "models" / "client-1.safetensors")
    training = read_records(path)[-1]["remarks"]["training"]
    assert training["fallback"] == ["loop: the model has running statistics"]
    begun = run(experiment.replace(rounds=1), tmp_path / "begun").path
    assert_same_results(resume(begun, rounds=3).path, path)


# Models by hand


def apply_by_hand(params: Tensors, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return embeddings and logits of a client's saved model, of either kind."""
    if "conv.weight" in params:
        module = Convolution(3, (1, 6, 6)).double()
        module.load_state_dict(params)
        return module.embed(images.reshape(-1, 1, 6, 6)), module(images.reshape(-1, 1, 6, 6))
    embeddings = images
    for name in ("hidden.0", "hidden.1"):
        embeddings = linear(embeddings, params[f"{name}.weight"], params[f"{name}.bias"]).relu()
    return embeddings, linear(embeddings, params["classifier.weight"], params["classifier.bias"])


def nearest_class_mean(path: Path, embeddings: Tensor) -> Tensor:
    """Return the classes of the nearest means over clients, as FedProto compares."""
    pool = load_file(path / "pool.safetensors")
    owned = [pool["vectors"][pool["labels"] == each].mean(0) for each in range(3)]
    return torch.cdist(embeddings, torch.stack(owned)).argmin(1)


@pytest.mark.parametrize("method", ["local", "fedproto"])
def test_predictor_and_evaluation_equal_each_model_applied_by_hand(
    images: Path, tmp_path: Path, method: str
) -> None:
    experiment = experiment_of(images, method, clients=4)
    result = mpfedcl.run(experiment, tmp_path / "run")
    data = load_federated_data(experiment.resolved())
    with numpy.load(images / "stripes.npz") as archive:
        samples: NDArray[numpy.uint8] = archive["x_test"]
    for client in data.clients:
        params = load_file(result.path / "models" / f"{client.name}.safetensors")
        predictor = result.predictor(client.name)
        inputs = predictor.inputs(samples)
        with torch.no_grad():
            embeddings, logits = apply_by_hand(params, inputs)
            personal = result.personal_model(client.name)
            shaped = inputs.reshape(-1, 1, 6, 6) if "conv.weight" in params else inputs
            torch.testing.assert_close(personal(shaped), logits)
        by_prototype = method == "fedproto"
        wanted = nearest_class_mean(result.path, embeddings) if by_prototype else logits.argmax(1)
        found = [int(each.label) for each in predictor.predict(samples)]
        assert found == wanted.tolist()
        right = (wanted == data.test_labels)[client.test].double().mean()
        assert result.summary is not None
        per_client = result.summary["accuracy_per_client"][client.name]
        assert per_client == pytest.approx(100 * float(right), abs=1e-2)


# From Python


class Linear(nn.Module):
    """A model of this file only: its objects have no importable name."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, vectors: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(vectors).tanh())
        return logits


def data_of(*clients: str) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
    draw = numpy.random.default_rng(1)
    labels = numpy.arange(30) % 3
    return {name: (draw.normal(0, 0.3, (30, 5)) + numpy.eye(5)[labels], labels) for name in clients}


def test_objects_by_client_run_resume_and_predict(tmp_path: Path) -> None:
    data, small_net = data_of("east", "north", "south"), lambda: Linear()
    model = {"north": small_net, "*": Linear()}
    settings: dict[str, Any] = {"rounds": 2, "data": data, "model": model}
    whole = mpfedcl.run("fedproto", tmp_path / "whole", **settings)
    begun = mpfedcl.run("fedproto", tmp_path / "begun", **settings | {"rounds": 1})
    with pytest.raises(InvalidInput, match=r"model has 'west'; it must have the clients that"):
        resume(begun.path, 2, data=data, model={"west": small_net})
    assert_same_results(resume(begun.path, 2, data=data, model=model).path, whole.path)
    assert isinstance(whole.personal_model("north"), Linear)
    found = Predictor.load(whole.path, "south", model=model).predict(data["south"][0])
    assert len(found) == 30


class Tokens(nn.Module):
    """A model of token ids."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.table(tokens).mean(1))
        return logits


def test_models_of_token_ids_predict_and_built_in_ones_are_rejected(tmp_path: Path) -> None:
    tokens = numpy.arange(120).reshape(30, 4) % 9
    data = dict.fromkeys("ab", (tokens, numpy.arange(30) % 3))
    settings: dict[str, Any] = {"data": data, "rounds": 1}
    result = mpfedcl.run("local", tmp_path / "run", model={"*": lambda: Tokens(3)}, **settings)
    assert len(result.predictor("a").predict(tokens)) == 30
    with pytest.raises(InvalidInput, match="'mlp', which takes numbers"):
        mpfedcl.run("local", tmp_path / "odd", model={"a": lambda: Tokens(3)}, **settings)


def test_settings_of_the_section_are_no_clients(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"data": data_of("a", "b"), "rounds": 1}
    result = mpfedcl.run("local", tmp_path / "run", model={"hidden": (4,)}, **settings)
    assert result.experiment.model.hidden == (4,)
    assert not result.experiment.model.clients
    both = {"hidden": (6,), "clients": {"a": lambda: Linear()}}
    result = mpfedcl.run("local", tmp_path / "both", model=both, **settings)
    assert isinstance(result.personal_model("a"), Linear)
    assert "hidden.0.weight" in dict(result.personal_model("b").named_parameters())
    with pytest.raises(InvalidInput, match=r"hiden is not a setting; did you mean model.hidden\?"):
        mpfedcl.run("local", tmp_path / "odd", model={"hiden": (4,)}, **settings)


def test_client_model_is_exported(images: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    result = mpfedcl.run(experiment_of(images, clients=3, dtype="float32"), tmp_path / "run")
    exported = [mpfedcl.export(result, client=f"client-{n}").note["checked"] for n in (0, 1)]
    assert [each["labels_differ"] for each in exported] == [0, 0]


# Invalid input


def test_changed_code_of_one_client_is_rejected(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = mpfedcl.run(experiment_of(images, rounds=1), tmp_path / "run").path

    class Other(Convolution):
        def forward(self, images: Tensor) -> Tensor:
            return -super().forward(images)

    monkeypatch.setattr("own_models.Convolution", Other)
    with pytest.raises(InvalidInput, match="whose code or constants have changed since"):
        resume(path, rounds=2)
    with pytest.raises(InvalidInput, match="whose code or constants have changed since the run"):
        Predictor.load(path, "client-1")
    assert Predictor.load(path, "client-0").trained.model.embedding_size == 5


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("fedavg", {}),
        ("mp-fedcl", {}),
        ("fedrep", {}),
        ("fedasync", {"systems__kind": "lognormal"}),
        ("fedgauss", {"model__hidden": ()}),
        ("ditto", {}),
    ],
)
def test_methods_that_share_parameters_reject_different_models(
    images: Path, tmp_path: Path, method: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(InvalidInput, match=f"clients of method '{method}' must have the same"):
        run(experiment_of(images, method, share_model=True, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("clients", "reason"),
    [
        ({"client-12": OWN}, r"names 'client-12', which fits no client; the clients are client-0"),
        ({"b*": OWN}, r"model.clients names 'b\*', which fits no client"),
        ({"client-1": "resnet8"}, r"client-0 embeddings of 5 values and client-1 of .* equal size"),
    ],
)
def test_unknown_clients_and_unequal_embeddings_are_rejected(
    images: Path, tmp_path: Path, clients: dict[str, str], reason: str
) -> None:
    with pytest.raises(InvalidInput, match=reason):
        run(experiment_of(images, model__clients=clients), tmp_path / "run")
