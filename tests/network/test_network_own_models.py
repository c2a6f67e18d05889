"""Modules of users over a network: installed everywhere, never sent, compared before training."""

from pathlib import Path
from typing import Any

import numpy
import pytest
from federations import (
    LoopbackFederation,
    assert_same_personal_models,
    assert_same_predictors,
    float64_experiment,
)
from torch import nn

import own_models
from equivalent_runs import assert_close_tensors, load_results
from mpfedcl import Predictor, run
from mpfedcl.core.errors import InvalidInput, RunCutShort
from mpfedcl.core.plugins import entry_points
from small_experiments import read_records

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("quick_network")]

MODEL = "own_models:with_dropout"
CHANGES = {"model__name": MODEL, "model__hidden": (), "rounds": 2}


@pytest.mark.parametrize("method", ["mp-fedcl", "fedbn", "scaffold"])
def test_module_with_statistics_and_dropout_equals_simulation(
    images: Path, tmp_path: Path, method: str
) -> None:
    experiment = float64_experiment(images, method, **CHANGES)
    found = LoopbackFederation(experiment, tmp_path, models=MODEL).serve().path
    wanted = run(experiment, tmp_path / "simulation").path
    ours, theirs = load_results(found), load_results(wanted)
    for name in {"model.safetensors", "pool.safetensors"} & theirs.keys():
        assert_close_tensors(ours[name], theirs[name], 1e-10, name)
    for record, simulated in zip(read_records(found), read_records(wanted), strict=True):
        assert_same_predictors(record, simulated, method)
        assert record["bytes"] == simulated["bytes"]


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        (MODEL, {"model__train": ("hidden.*", "head.*"), "model__share": ("hidden.*",)}),
        ("own_models:with_low_rank", {"model__share": ("*lora_*",)}),
        ("mlp", {"model__train": ("*.0.*", "classifier.*"), "model__share": ("hidden.*",)}),
    ],
)
def test_part_of_a_model_equals_simulation_and_sends_no_more(
    images: Path, tmp_path: Path, model: str, changes: dict[str, Any]
) -> None:
    settings = {**CHANGES, "model__name": model, **changes}
    experiment = float64_experiment(images, "fedavg", **settings)
    allowed: dict[str, Any] = {} if model == "mlp" else {"models": model}
    federation = LoopbackFederation(experiment, tmp_path, **allowed)
    found = federation.serve().path
    wanted = run(experiment, tmp_path / "simulation").path
    for record, simulated in zip(read_records(found), read_records(wanted), strict=True):
        assert_same_predictors(record, simulated, "fedavg")
        assert record["bytes"] == simulated["bytes"]
    assert_same_personal_models(federation, wanted)


def test_client_refuses_a_module_that_its_operator_has_not_allowed(
    images: Path, tmp_path: Path
) -> None:
    experiment = float64_experiment(images, "fedavg", network__patience=1.0, **CHANGES)
    with pytest.raises(RunCutShort, match=r"\[allow\] models is built-in; the server asked"):
        LoopbackFederation(experiment, tmp_path).serve()


def test_client_refuses_a_module_of_an_installed_package(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = tmp_path / "offered-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: offered\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(f"[mpfedcl.models]\noffered = {MODEL}\n")
    monkeypatch.syspath_prepend(tmp_path)
    entry_points.cache_clear()
    try:
        changes = {**CHANGES, "model__name": "offered", "network__patience": 1.0}
        experiment = float64_experiment(images, "fedavg", **changes)
        with pytest.raises(RunCutShort, match=r"built-in; the server asked for 'offered'"):
            LoopbackFederation(experiment, tmp_path / "runs").serve()
    finally:
        entry_points.cache_clear()


def test_other_code_at_the_server_is_rejected_before_training(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = float64_experiment(images, "fedavg", **CHANGES)
    federation = LoopbackFederation(experiment, tmp_path, models=MODEL)
    made = []

    def older_at_the_clients(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
        # The first three are made by the clients.
        made.append(1)
        dropout = 0.5 if len(made) <= 3 else 0.3
        return own_models.WithNorm(num_classes, input_shape, dropout)

    monkeypatch.setattr(own_models, "with_dropout", older_at_the_clients)
    with pytest.raises(InvalidInput, match="not the same model at the server and at the clients"):
        federation.serve()


@pytest.mark.parametrize("model", ["own_models:Series", "own_models:Tokens"])
def test_series_and_tokens_keep_their_shape(tmp_path: Path, model: str) -> None:
    draw = numpy.random.default_rng(0)
    labels = numpy.arange(90) % 3
    samples: Any
    if model.endswith("Series"):
        samples = draw.normal(size=(90, 2, 7)) + labels[:, None, None]
    else:
        samples = draw.integers(0, 6, (90, 5)) + 7 * labels[:, None]
    (tmp_path / "set").mkdir()
    numpy.savez(tmp_path / "set" / "a.npz", x_train=samples, y_train=labels)
    changes = {"model__name": model, "model__hidden": (), "partition__test": "matched"}
    experiment = float64_experiment(tmp_path / "set", "fedavg", **changes)
    found = LoopbackFederation(experiment, tmp_path, models=model).serve().path
    wanted = run(experiment, tmp_path / "simulation").path
    ours, theirs = load_results(found), load_results(wanted)
    assert_close_tensors(ours["model.safetensors"], theirs["model.safetensors"], 1e-10)
    predictions = Predictor.load(found).predict(samples)
    assert [each.label for each in predictions] == [
        each.label for each in Predictor.load(wanted).predict(samples)
    ]
