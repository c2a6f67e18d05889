"""Opening finished runs: without their data, from before, with another encoder, damaged."""

import json
import shutil
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from encoder_experiments import pictured
from mpfedcl import InvalidInput, run
from mpfedcl.core.rng import generator
from mpfedcl.data.loading import load_data_and_model
from mpfedcl.data.samples import ImageFormat
from mpfedcl.inference.trained_run import load_trained_run
from mpfedcl.methods import prototype_rule
from mpfedcl.models.resnet import ResNet18
from mpfedcl.runs.observer import Observer
from small_experiments import small

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("drawn_once", "own_places")]


def test_run_is_opened_without_its_data(images: Path, tmp_path: Path) -> None:
    shutil.copytree(images, tmp_path / "images")
    experiment = small(tmp_path / "images")
    path = run(experiment, tmp_path / "run").path
    data, model = load_data_and_model(experiment.resolved(), torch.device("cpu"))
    shutil.rmtree(tmp_path / "images")
    trained = load_trained_run(path)
    assert trained.class_names == data.class_names
    assert trained.clients == data.names
    pixels = numpy.load(images / "stripes.npz")["x_test"]
    embeddings, logits = trained.apply(trained.parameters(), trained.input_format.convert(pixels))
    expected, expected_logits = model.apply(trained.parameters(), data.test_inputs)
    assert torch.equal(embeddings, prototype_rule(trained.method).project(expected))
    assert torch.equal(logits, expected_logits)


def test_images_that_are_not_square_keep_their_shape(tmp_path: Path) -> None:
    random = numpy.random.default_rng(0)
    pixels = random.integers(0, 256, (40, 4, 9), dtype=numpy.uint8)
    labels = numpy.arange(40) % 2
    (tmp_path / "images").mkdir()
    numpy.savez(tmp_path / "images" / "wide.npz", x_train=pixels, y_train=labels)
    path = run(small(tmp_path / "images", clients=2), tmp_path / "run").path
    assert load_trained_run(path).input_format == ImageFormat(4, 9, is_color=False)


def test_model_of_token_ids_is_opened_again(tmp_path: Path) -> None:
    tokens, labels = torch.arange(80).reshape(20, 4) % 7, torch.arange(20) % 3
    result = run("fedavg", tmp_path / "run", model=of_tokens, data=(tokens, labels), clients=2)
    assert result.global_model is not None
    params = load_file(result.path / "model.safetensors")
    logits = load_trained_run(result.path).apply(params, tokens.numpy())
    assert torch.equal(result.global_model(tokens), logits[1])


def of_tokens(num_classes: int) -> nn.Module:
    table = nn.Embedding(7, 5)
    return nn.Sequential(table, nn.Flatten(), nn.Linear(20, num_classes))


def test_run_without_a_recorded_shape_is_rejected(images: Path, tmp_path: Path) -> None:
    path = run(small(images), tmp_path / "run").path
    content = json.loads((path / "partition.json").read_text())
    assert content.pop("input_shape") == [6, 6]
    assert content.pop("image_shape") == [6, 6]
    (path / "partition.json").write_text(json.dumps(content))
    with pytest.raises(InvalidInput, match="does not give the shape of the samples"):
        load_trained_run(path)


@given(st.integers(1, 60), st.booleans())
def test_formats_are_read_from_their_shape(side: int, is_color: bool) -> None:
    form = ImageFormat(side, side, is_color)
    assert ImageFormat.from_shape(list(form.shape)) == form


@given(
    st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.sampled_from([(), (1,), (3,)]),
    st.booleans(),
)  # fmt: skip
def test_images_are_converted_to_the_format(
    count: int, height: int, width: int, channels: tuple[int, ...], is_color: bool
) -> None:
    images = numpy.full((count, height, width, *channels), 77, dtype=numpy.uint8)
    form = ImageFormat(5, 4, is_color)
    brought = form.convert(images)
    assert brought.shape == (count, *form.shape)
    assert (brought == 77).all()


def test_another_encoder_is_rejected(pictures: Path, tmp_path: Path) -> None:
    first, second, moved = (tmp_path / f"{n}.safetensors" for n in ("resnet18", "two", "moved"))
    for number, file in enumerate((first, second)):
        save_file(ResNet18().init(generator(number, "test"), torch.float32), file)
    experiment = pictured(pictures, encoder__name="resnet18", encoder__weights=first)
    path = run(experiment, tmp_path / "run").path
    assert load_trained_run(path).input_format == ImageFormat(64, 64, is_color=True)
    first.rename(moved)
    with pytest.raises(InvalidInput, match=r"resnet18\.safetensors cannot be read"):
        load_trained_run(path)
    with pytest.raises(InvalidInput, match="trained with another one"):
        load_trained_run(path, weights=second)
    assert load_trained_run(path, weights=moved).encoder is not None


@pytest.mark.usefixtures("narrow_resnet")
def test_embeddings_of_a_trained_encoder_equal_those_of_the_run(
    pictures: Path, tmp_path: Path
) -> None:
    experiment = pictured(pictures, encoder__train=True, train__lr=0.01, rounds=1)
    path = run(experiment, tmp_path / "run").path
    trained = load_trained_run(path)
    data, model = load_data_and_model(trained.experiment, torch.device("cpu"))
    params = trained.parameters("photo")
    images = data.test_inputs[:4].view(4, 3, 64, 64).permute(0, 2, 3, 1).numpy()
    embeddings, _ = trained.apply(params, images)
    expected, _ = model.apply(params, data.test_inputs[:4])
    assert torch.allclose(embeddings, prototype_rule(trained.method).project(expected), atol=1e-6)


def test_damaged_runs_are_rejected_in_one_line(images: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="must be a folder that holds a run"):
        load_trained_run(tmp_path)
    rounds: list[object] = []
    observer = Observer(on_round=rounds.append, should_stop=lambda: bool(rounds))
    path = run(small(images), tmp_path / "stopped", observer).path
    with pytest.raises(InvalidInput, match=r"has not ended; resume it .*--resume"):
        load_trained_run(path)
    path = run(small(images), tmp_path / "run").path
    with pytest.raises(InvalidInput, match="weights is 'x'; it must be left out"):
        load_trained_run(path, weights=Path("x"))
    trained = load_trained_run(path)
    with pytest.raises(InvalidInput, match=r"'\.\./model'; it must be one of client-0, client-1"):
        trained.parameters("../model")
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, "classifier.bias": torch.zeros(7)}, path / "model.safetensors")
    with pytest.raises(InvalidInput, match=r"model\.safetensors does not fit the experiment"):
        trained.parameters()
    save_file(
        {**tensors, "classifier.bias": torch.full((3,), torch.nan)}, path / "model.safetensors"
    )
    with pytest.raises(InvalidInput, match="not finite"):
        trained.parameters()
    (path / "pool.safetensors").write_bytes(b"damaged")
    with pytest.raises(InvalidInput, match=r"pool\.safetensors cannot be read"):
        load_trained_run(path)
    (path / "partition.json").write_text("{}")
    with pytest.raises(InvalidInput, match=r"partition\.json is not as .*: classes is wrong"):
        load_trained_run(path)


def test_clients_are_listed_without_a_global_model(images: Path, tmp_path: Path) -> None:
    path = run(small(images, "local"), tmp_path / "run").path
    with pytest.raises(InvalidInput, match=r"no global model; it must be one of client-0, "):
        load_trained_run(path).parameters()
    path = run(small(images, "local", personal_models=False), tmp_path / "none").path
    with pytest.raises(InvalidInput, match="no personal model was kept"):
        load_trained_run(path).parameters()
