"""Images that are higher than wide, or wider than high, through a run and a prediction."""

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

import mpfedcl
from mpfedcl import Experiment, Predictor

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("own_places")]

SIZE = (12, 20)
MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"encoder__name": "none", "model__hidden": (16,)},
    "cnn": {"encoder__name": "none", "model__name": "cnn", "model__hidden": (16,)},
    "random-filters": {"encoder__name": "random-filters:0:2", "model__hidden": (16,)},
}


def draw_images(count: int) -> Any:
    return numpy.random.default_rng(3).integers(0, 256, (count, *SIZE), numpy.uint8)


def save_folder(root: Path) -> None:
    for number, image in enumerate(draw_images(24)):
        folder = root / "scans" / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number:02}.png")


def save_archive(root: Path) -> None:
    root.mkdir()
    numpy.savez(root / "scans.npz", x_train=draw_images(24), y_train=numpy.arange(24) % 2)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("save", [save_folder, save_archive])
def test_non_square_images_keep_their_shape_in_a_run(tmp_path: Path, save: Any, model: str) -> None:
    save(tmp_path / "images")
    experiment = Experiment(method="fedavg", rounds=1, clients=2).replace(
        dataset__name="folder",
        dataset__root=tmp_path / "images",
        partition__kind="iid",
        train__epochs=1,
        train__batch_size=8,
        **MODELS[model],
    )
    result = mpfedcl.run(experiment, out=tmp_path / "run")
    partition = json.loads((result.path / "partition.json").read_text())
    assert list(SIZE) in (partition["input_shape"], partition.get("image_shape"))
    predictor = Predictor.load(result.path)
    images = draw_images(5)
    assert len(predictor.predict(images)) == 5
    # A transposed image is resized to the shape of the run, and is another image.
    turned = numpy.ascontiguousarray(images.transpose(0, 2, 1))
    assert not torch.allclose(predictor.embed(turned), predictor.embed(images), atol=1e-6)
