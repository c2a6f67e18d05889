"""`model.hidden` from the flag to the files, and whatever opens them."""

import shutil
from pathlib import Path

import numpy
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file

from encoder_experiments import pictured, save_pictures
from mpfedcl import Experiment, InvalidInput, Predictor, resume, run
from mpfedcl.cli.main import parse
from mpfedcl.core.rng import generator
from mpfedcl.inference.export import export_run
from mpfedcl.models import make_mlp
from mpfedcl.models.resnet import ResNet18
from small_experiments import Say, assert_same_results, flags, small

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("own_places")]


def widths(path: Path) -> list[int]:
    """Return the sizes of a model's layers, from its inputs to its classes."""
    params = load_file(path)
    hidden = sorted(name for name in params if name.startswith("hidden") and "weight" in name)
    layers = [params[name] for name in [*hidden, "classifier.weight"]]
    return [layers[0].shape[1], *(each.shape[0] for each in layers)]


@pytest.mark.parametrize(
    ("hidden", "is_encoded", "wanted"),
    [
        ((), False, (512, 512, 256)),
        ((), True, (256,)),
        ((20,), False, (20,)),
        ((8, 7, 6, 5), True, (8, 7, 6, 5)),
    ],
)
def test_default_hidden_layers_match_the_paper(
    hidden: tuple[int, ...], is_encoded: bool, wanted: tuple[int, ...]
) -> None:
    model = make_mlp(30, 4, hidden, is_encoded=is_encoded)
    params = model.init(generator(0, "weights"), torch.float32)
    biases = [len(value) for name, value in params.items() if name.endswith("bias")]
    assert tuple(biases) == (*wanted, 4)
    assert model.embedding_size == wanted[-1]


def test_hidden_layers_are_kept_by_resume_prediction_and_export(
    images: Path, tmp_path: Path, said: Say
) -> None:
    path = tmp_path / "run"
    words = flags(images, model__hidden=(14, 9, 5))
    assert said("run", *words, "--out", path)[0] == 0
    assert widths(path / "model.safetensors") == [36, 14, 9, 5, 3]
    assert widths(path / "models" / "client-1.safetensors") == [36, 14, 9, 5, 3]
    assert "hidden = [\n    14,\n    9,\n    5,\n]" in (path / "experiment.toml").read_text()
    assert said("run", "--resume", path, "--rounds", 3)[0] == 0
    run(small(images, rounds=3, model__hidden=(14, 9, 5)), tmp_path / "whole")
    assert_same_results(path, tmp_path / "whole")
    predictor = Predictor.load(path)
    asked = numpy.random.default_rng(0).integers(0, 256, (7, 6, 6)).astype(numpy.uint8)
    labels = [each.label for each in predictor.predict(asked)]
    exported = export_run(predictor, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(str(exported.path))
    answers = session.run(["label"], {session.get_inputs()[0].name: asked})[0]
    assert [predictor.trained.class_names[int(label)] for label in answers] == labels


@pytest.mark.usefixtures("narrow_resnet")
@pytest.mark.parametrize("trains", [False, True])
def test_hidden_layers_behind_an_encoder(tmp_path: Path, trains: bool) -> None:
    save_pictures(tmp_path / "pictures")
    experiment = pictured(
        tmp_path / "pictures", rounds=1, encoder__train=trains, model__hidden=(12, 6)
    )
    result = run(experiment, tmp_path / "run")
    assert widths(result.path / "model.safetensors") == [ResNet18.feature_size, 12, 6, 4]
    assert Predictor.load(result.path).trained.model.embedding_size == 6


def test_runs_without_the_model_section_are_resumed(images: Path, tmp_path: Path) -> None:
    run(small(images, rounds=2), tmp_path / "whole")
    run(small(images, rounds=1), tmp_path / "old")
    file = tmp_path / "old" / "experiment.toml"
    document = file.read_text()
    section = '[model]\nname = "mlp"\nhidden = []\nnorm = "none"\ntrain = []\nshare = []\n'
    assert section in document
    file.write_text(document.replace(section, ""))
    assert Experiment.from_toml(file, complete=True).model.hidden == ()
    shutil.copytree(tmp_path / "old", tmp_path / "copy")
    assert Predictor.load(tmp_path / "copy").trained.model.embedding_size == 256
    resume(tmp_path / "old", rounds=2)
    assert_same_results(tmp_path / "old", tmp_path / "whole")


def test_hidden_layer_flags_are_parsed_and_validated() -> None:
    assert parse(["run", "--model.hidden", "32", "16"]).settings.model.hidden == (32, 16)
    with pytest.raises(InvalidInput, match=r"model\.hidden\.1 is 0; it must be greater than or"):
        parse(["run", "--model.hidden", "32", "0"])
    with pytest.raises(InvalidInput, match=r"--model\.hidden is 'wide'; it must be numbers"):
        parse(["run", "--model.hidden", "wide"])
