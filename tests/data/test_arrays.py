"""Series, float images and token ids: one shape per set, given to the model as they are."""

import os
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from numpy.typing import NDArray

import mpfedcl
from mpfedcl import Experiment
from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.loading import load_data_and_model, load_federated_data
from mpfedcl.data.samples import ArrayFormat
from mpfedcl.inference.export import export_run
from mpfedcl.inference.predictor import Predictor
from mpfedcl.inference.trained_run import load_trained_run

SHARED = Path(__file__).parents[3] / "shared" / "data"
HAR = Path(os.environ.get("MPFEDCL_DATA") or SHARED) / "har"


def save(folder: Path, x: NDArray[Any], num_classes: int = 2) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    labels = numpy.arange(len(x)) % num_classes
    numpy.savez(folder / "a.npz", x_train=x, y_train=labels, x_test=x[:4], y_test=labels[:4])
    return folder


def experiment_on(root: Path, **changes: Any) -> Experiment:
    base = Experiment(method="fedavg", clients=2, rounds=2, evaluate_every=1)
    return base.replace(
        dataset__name="folder",
        dataset__root=root,
        partition__kind="iid",
        partition__test="shared",
        **changes,
    )


def draw(*shape: int) -> NDArray[Any]:
    return numpy.random.default_rng(0).normal(size=shape).astype(numpy.float16)


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 2), (3, 2, 2, 1)])
def test_run_on_arrays_equals_the_run_on_the_same_numbers_as_vectors(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    """The built-in model flattens; half precision is exact in float32."""
    x = draw(20, *shape)
    runs = [
        mpfedcl.run(experiment_on(save(tmp_path / name, values)), out=tmp_path / f"run-{name}")
        for name, values in (("arrays", x), ("vectors", x.reshape(20, 12).astype(numpy.float32)))
    ]
    weights = [(run.path / "model.safetensors").read_bytes() for run in runs]
    assert weights[0] == weights[1]
    assert load_trained_run(runs[0].path).input_format == ArrayFormat(shape)
    answers = [
        Predictor.load(run.path).predict(x.reshape(20, *s))
        for run, s in zip(runs, (shape, (12,)), strict=True)
    ]
    assert answers[0] == answers[1]


def test_prediction_names_the_shape_that_a_run_takes(tmp_path: Path) -> None:
    x = draw(20, 3, 4)
    run = mpfedcl.run(experiment_on(save(tmp_path / "data", x)), out=tmp_path / "run")
    predictor = Predictor.load(run.path)
    assert predictor.predict(torch.from_numpy(x[:2])) == predictor.predict(list(x[:2]))
    with pytest.raises(InvalidInput, match=r"an array is an array float16 \[4, 3\]; .* \[3, 4\]"):
        predictor.predict(x.transpose(0, 2, 1))
    exported = export_run(predictor, tmp_path / "model.onnx")
    assert exported.note["input"]["shape"] == ["batch", 3, 4]
    assert exported.note["checked"]["from"] == "test arrays of folder"
    assert exported.note["checked"]["labels_differ"] == 0
    card = (run.path / "CARD.md").read_text()
    assert "20 training arrays" in card


def test_array_that_is_not_finite_is_located(tmp_path: Path) -> None:
    x = draw(20, 3, 4)
    x[17, 2, 1] = numpy.inf
    with pytest.raises(InvalidInput, match=r"x_train has inf at \[17, 2, 1\]; arrays must be"):
        load_federated_data(experiment_on(save(tmp_path, x)))


def test_token_ids_stay_whole_numbers_and_need_a_model_that_takes_them(tmp_path: Path) -> None:
    x = numpy.random.default_rng(0).integers(0, 2**40, (20, 6))
    experiment = experiment_on(save(tmp_path, x)).resolved()
    data = load_federated_data(experiment)
    assert data.table.inputs.dtype == torch.int64
    assert sorted(data.table.inputs.tolist()) == sorted(x.tolist())
    with pytest.raises(InvalidInput) as caught:
        load_data_and_model(experiment, torch.device("cpu"))
    assert str(caught.value) == (
        "model.name is 'mlp', which takes numbers, but the samples are sequences of 6 token ids; "
        "it must be a model of your own, or measured integers must be given as floats."
    )


def test_series_of_natural_clients_are_read() -> None:
    if not HAR.is_dir():
        pytest.skip(f"UCI HAR is not at {HAR}")
    experiment = Experiment(method="fedavg").replace(
        dataset__name="folder", dataset__root=HAR, partition__kind="natural", clients=3
    )
    data = load_federated_data(experiment)
    assert data.partition["input_shape"] == [9, 128]
    assert [name[:8] for name in data.names] == ["subject-"] * 3
    file = numpy.load(HAR / "har.npz")
    of_first = file["x_train"][file["clients_train"] == data.names[0]]
    assert torch.equal(
        data.clients[0].inputs, torch.from_numpy(of_first.astype(numpy.float32)).flatten(1)
    )
