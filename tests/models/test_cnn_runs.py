"""`--model.name cnn` from the flag to the files, on every engine, and whatever opens them."""

from pathlib import Path
from typing import Any

import numpy
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file

from mpfedcl import Experiment, InvalidInput, Predictor
from mpfedcl.data.loading import load_data_and_model
from mpfedcl.inference.export import export_run
from mpfedcl.methods import find_method
from mpfedcl.models import Cnn, Mlp
from small_experiments import (
    Say,
    assemble_federation,
    flags,
    read_records,
    save_images,
    small,
)

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("own_places")]

CNN: dict[str, Any] = {"model__name": "cnn", "model__hidden": (5,)}
RAGGED = {"partition__kind": "quantity", "partition__alpha": 1.0, "train__epochs": 2}
"""So that a stack has padding rows."""


def save_color(root: Path) -> Path:
    random = numpy.random.default_rng(7)
    x_train, x_test = (random.integers(0, 256, (n, 16, 13, 3), numpy.uint8) for n in (24, 6))
    root.mkdir()
    labels: dict[str, Any] = {"y_train": numpy.arange(24) % 3, "y_test": numpy.arange(6) % 3}
    numpy.savez(root / "colors.npz", x_train=x_train, x_test=x_test, **labels)
    return root


@pytest.mark.parametrize("norm", ["none", "group"])
@pytest.mark.parametrize("method", ["mp-fedcl", "fedprox"])
def test_loop_and_stacked_engines_agree(tmp_path: Path, method: str, norm: str) -> None:
    root = save_color(tmp_path / "colors")
    found = {}
    for engine in ("loop", "stacked"):
        changes = {"engine": engine, "dtype": "float64", "model__norm": norm} | RAGGED
        experiment = small(root, method, **CNN | changes).resolved()
        data, model = load_data_and_model(experiment, torch.device("cpu"))
        assert isinstance(model, Cnn)
        assert len({len(client.labels) % 8 for client in data.clients}) > 1
        federation = assemble_federation(experiment, data, model)
        for _ in range(2):
            federation.run_round(evaluate=True)
        found[engine] = federation.state.server.params, federation.pool
    (looped, pool), (stacked, other) = found["loop"], found["stacked"]
    for name, value in looped.items():
        assert torch.allclose(stacked[name], value, rtol=1e-9, atol=1e-13), name
    if pool is not None and method == "mp-fedcl":
        assert other is not None
        assert torch.allclose(other.vectors, pool.vectors, rtol=1e-9, atol=1e-13)


@pytest.mark.thorough
def test_cnn_run_is_resumed_used_for_predictions_and_exported(
    images: Path, tmp_path: Path, said: Say
) -> None:
    path = tmp_path / "run"
    words = flags(images, method="fedavg", rounds=1, model__norm="group", **CNN)
    assert said("run", *words, "--out", path)[0] == 0
    assert said("run", "--resume", path, "--rounds", 2)[0] == 0
    assert read_records(path)[1]["remarks"]["training"]["loop"] == 3
    params = load_file(path / "model.safetensors")
    assert params["conv.0.weight"].shape == (32, 1, 5, 5)
    assert params["hidden.0.weight"].shape == (5, 64)
    predictor = Predictor.load(path)
    asked = numpy.random.default_rng(0).integers(0, 256, (7, 6, 6)).astype(numpy.uint8)
    labels = [each.label for each in predictor.predict(asked)]
    exported = export_run(predictor, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(str(exported.path))
    answers = session.run(["label"], {session.get_inputs()[0].name: asked})[0]
    assert [predictor.trained.class_names[int(label)] for label in answers] == labels


def resolve(method: str = "fedavg", **changes: Any) -> Experiment:
    experiment = Experiment(method=method).replace(**changes)
    return experiment.resolved(find_method(method).defaults)


def test_default_model_depends_on_data_set_and_encoder() -> None:
    names = {
        name: resolve(dataset__name=name).model.name
        for name in ("mnist", "digit5", "cifar10", "cifar100", "femnist")
    }
    assert names == dict.fromkeys(("mnist", "digit5"), "mlp") | dict.fromkeys(
        ("cifar10", "cifar100", "femnist"), "cnn"
    )
    assert resolve(dataset__name="cifar10").encoder.name == "none"
    assert resolve(dataset__name="cifar10").clients == 10
    # What an encoder gives is no image.
    assert resolve(dataset__name="cifar10", encoder__name="resnet18").model.name == "mlp"
    # Whoever asks for convolutions wants pixels.
    assert resolve(dataset__name="office10", model__name="cnn").encoder.name == "none"


def test_method_with_its_own_model_ignores_the_model_settings() -> None:
    experiment = resolve("fedgauss", model__name="cnn", model__norm="group")
    assert (experiment.model.name, experiment.model.norm) == ("mlp", "none")
    assert experiment.encoder.name == "random-filters"
    assert resolve("fedgauss", dataset__name="cifar10").encoder.name == "random-filters"


def test_default_model_for_pixels_is_the_mlp(images: Path) -> None:
    experiment = small(images).resolved()
    data, model = load_data_and_model(experiment, torch.device("cpu"))
    assert isinstance(model, Mlp)
    assert data.partition["image_shape"] == [6, 6]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"model__name": "cnn", "encoder__name": "resnet18"},
            r"model.name is 'cnn', which takes images; with encoder.name 'resnet18' it must be mlp",
        ),
        (
            {"model__name": "cnn", "dataset__name": "table"},
            r"model.name is 'cnn', which takes images; for dataset.name 'table' it must be mlp",
        ),
        (
            {"model__norm": "group"},
            r"model.norm is 'group'; it must be left out, because model.name is 'mlp' and only cnn",
        ),
    ],
)
def test_cnn_for_other_inputs_is_rejected(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        resolve(**changes)


def test_cnn_for_vectors_is_rejected(vectors: Path, said: Say) -> None:
    code, _, errors = said("run", *flags(vectors, model__name="cnn"))
    assert code == 2
    assert errors.strip() == (
        "mpfedcl: model.name is 'cnn', which takes images as they are; for vectors, tables and an "
        "encoder's features it must be mlp, linear or your own."
    )


def test_cnn_for_tiny_images_is_rejected(tmp_path: Path) -> None:
    save_images(tmp_path / "set" / "stripes.npz")
    experiment = small(tmp_path / "set", **CNN, dataset__image_size=3).resolved()
    with pytest.raises(InvalidInput, match=r"images have 3 x 3 pixels; they must have at least 4"):
        load_data_and_model(experiment, torch.device("cpu"))
