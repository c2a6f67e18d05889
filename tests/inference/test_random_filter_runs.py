"""Runs with random filters: prediction, joining, and rejection of other filters."""

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from image_sets import read_image_set
from mpfedcl import Experiment, InvalidInput, Predictor, resume, run
from mpfedcl.data.samples import ImageFormat
from mpfedcl.experiment.settings import DatasetSettings
from mpfedcl.inference.new_client import NewClient
from mpfedcl.inference.trained_run import load_trained_run
from small_experiments import read_summary

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("own_places")]


def filtered(**changes: Any) -> Experiment:
    """Return an experiment of one round behind random filters."""
    settings = {"encoder__name": "random-filters", "train__lr": 0.1, "model__hidden": (16,)}
    return Experiment(method="fedavg", rounds=1).replace(**settings | changes)


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("digits")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPFEDCL_CACHE", str(place / "cache"))
        return run(filtered(dataset__train_size=300), place / "run").path


def test_predictions_equal_those_of_the_run(digits_run: Path) -> None:
    partition = json.loads((digits_run / "partition.json").read_text())
    assert (partition["input_shape"], partition["image_shape"]) == ([1024], [28, 28])
    (domain,) = read_image_set(DatasetSettings()).domains
    assert domain.test_images is not None
    predictor = Predictor.load(digits_run)
    assert predictor.trained.input_format == ImageFormat(28, 28, is_color=False)
    said = [int(each.classifier.label) for each in predictor.predict(domain.test_images)]
    accuracy = 100 * float((numpy.array(said) == domain.test_labels).mean())
    wanted = read_summary(digits_run)["predictors"]["global_test"]["global_classifier"]
    assert accuracy == pytest.approx(wanted)


def test_color_is_removed_for_a_run_on_gray_images(digits_run: Path, tmp_path: Path) -> None:
    random = numpy.random.default_rng(0)
    pixels = random.integers(0, 256, (12, 28, 28, 3), dtype=numpy.uint8)
    labels = numpy.arange(12) % 3
    numpy.savez(
        tmp_path / "own.npz", x_train=pixels, y_train=labels, x_test=pixels[:3], y_test=labels[:3]
    )
    trained = load_trained_run(digits_run)
    client = NewClient(trained, tmp_path / "own.npz", "local_test", test_fraction=0.5)
    assert client.data.input_size == 1024
    gray = numpy.stack([numpy.asarray(Image.fromarray(each).convert("L")) for each in pixels])
    assert torch.equal(client.data.test_inputs, trained.inputs(gray[:3]))


def test_resume_with_other_filters_is_rejected(digits_run: Path, tmp_path: Path) -> None:
    partition = digits_run / "partition.json"
    content = partition.read_text()
    for shape, sentence in (([30, 28], "trained with another one"), (None, "image_shape")):
        partition.write_text(json.dumps({**json.loads(content), "image_shape": shape}))
        with pytest.raises(InvalidInput, match=sentence):
            load_trained_run(digits_run)
    partition.write_text(content)
    file = digits_run / "experiment.toml"
    before = file.read_text()
    file.write_text(before.replace('"random-filters"', '"random-filters:7"'))
    with pytest.raises(InvalidInput, match="started with other data"):
        resume(digits_run, rounds=2)
    file.write_text(before)


@pytest.mark.parametrize("changes", [{"encoder__train": True}, {"encoder__weights": Path("x")}])
def test_training_and_weights_are_rejected(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"random-filters.* (cannot be trained|takes none)"):
        run(filtered(**changes), tmp_path / "run")
