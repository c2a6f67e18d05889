"""Runs on pictures behind an encoder, from files to a trained head."""

import math
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

from encoder_experiments import pictured
from mpfedcl import InvalidInput, resume, run
from mpfedcl.data.image_files import ImageFileStore
from mpfedcl.experiment import Experiment
from mpfedcl.models.encoders.torch_encoders import ResNetEncoder
from mpfedcl.models.resnet import ResNet18, is_statistic
from mpfedcl.runs.observer import Observer
from small_experiments import read_summary

SHARED = Path(__file__).parents[2] / "shared"


pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("drawn_once", "own_places")]


@pytest.mark.usefixtures("narrow_resnet")
def test_second_run_opens_no_image(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(pictured(pictures), tmp_path / "first")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an image was opened, or encoded, again")

    for kind, name in (
        (ImageFileStore, "load"),
        (ImageFileStore, "inspect"),
        (ResNetEncoder, "encode"),
    ):
        monkeypatch.setattr(kind, name, refuse)
    second = run(pictured(pictures), tmp_path / "second")
    for name in ("model.safetensors", "pool.safetensors"):
        assert (first.path / name).read_bytes() == (second.path / name).read_bytes()


@pytest.mark.usefixtures("narrow_resnet")
def test_changed_image_is_encoded_again(pictures: Path, tmp_path: Path) -> None:
    first = run(pictured(pictures), tmp_path / "first")
    for path in sorted((pictures / "photo" / "dog").iterdir()):
        Image.fromarray(numpy.full((30, 30, 3), 255, dtype=numpy.uint8)).save(path)
    second = run(pictured(pictures), tmp_path / "second")
    assert (first.path / "model.safetensors").read_bytes() != (
        second.path / "model.safetensors"
    ).read_bytes()


def test_head_size_depends_on_encoder_and_classes(pictures: Path, tmp_path: Path) -> None:
    summary = run(pictured(pictures), tmp_path / "run").summary
    assert summary is not None
    assert summary["parameters_sent"] == 512 * 256 + 256 + 256 * 4 + 4
    assert list(summary["accuracy_per_client"]) == ["ink", "paint", "photo"]


@pytest.mark.thorough
def test_resnet18_encoder_is_trained(pictures: Path, tmp_path: Path) -> None:
    assert parameters_sent(pictures, tmp_path, "fedavg") == 11_176_512 + 512 * 256 + 256 + 1028


@pytest.mark.usefixtures("narrow_resnet")
@pytest.mark.parametrize("method", ["mp-fedcl", "fedavg", "fedproto"])
def test_encoder_is_trained_with_every_method(pictures: Path, tmp_path: Path, method: str) -> None:
    # All of the encoder but its running statistics, and the head.
    shapes = ResNet18().shapes().items()
    encoder = sum(math.prod(shape) for name, shape in shapes if not is_statistic(name))
    whole = encoder + ResNet18.feature_size * 256 + 256 + 256 * 4 + 4
    sent = parameters_sent(pictures, tmp_path, method)
    assert sent == (0 if method == "fedproto" else whole)


def parameters_sent(pictures: Path, tmp_path: Path, method: str) -> int:
    experiment = pictured(pictures, method=method, encoder__train=True, train__lr=0.01)
    result = run(experiment.replace(rounds=1), tmp_path / "run")
    assert result.summary is not None
    assert result.summary["rejected"] == 0
    sent: int = result.summary["parameters_sent"]
    return sent


def test_missing_encoder_weights_are_a_one_line_error(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="random-resnet18"):
        run(pictured(pictures, encoder__name="resnet18"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("narrow_resnet")
def test_broken_image_and_empty_class_are_named(pictures: Path, tmp_path: Path) -> None:
    (pictures / "photo" / "cat" / "9.jpg").write_bytes(b"\xff\xd8 cut off")
    with pytest.raises(InvalidInput, match=r"photo/cat/9\.jpg"):
        run(pictured(pictures), tmp_path / "run")
    (pictures / "photo" / "cat" / "9.jpg").unlink()
    (pictures / "photo" / "emu").mkdir()
    with pytest.raises(InvalidInput, match=r"photo/emu has no images"):
        run(pictured(pictures), tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"encoder__name": "none", "encoder__train": True}, "encoder.train"),
        ({"encoder__name": "vgg"}, "encoder.name is 'vgg'"),
        ({"encoder__name": "onnx:absent.onnx"}, "absent.onnx"),
        ({"encoder__weights": Path("x.pth")}, "encoder.weights"),
    ],
)
def test_invalid_encoders_are_rejected(
    pictures: Path, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        run(pictured(pictures, **changes), tmp_path / "run")
    assert sentence in str(refused.value)


@pytest.mark.usefixtures("narrow_resnet")
def test_resume_with_another_encoder_is_rejected(pictures: Path, tmp_path: Path) -> None:
    result = run(pictured(pictures), tmp_path / "run")
    file = result.path / "experiment.toml"
    file.write_text(file.read_text().replace('"random-resnet18"', '"random-resnet18:7"'))
    with pytest.raises(InvalidInput, match="started with other data"):
        resume(result.path, rounds=3)


@pytest.mark.skipif(
    not (SHARED / "data" / "office10").is_dir(), reason="needs office10 beside the checkout"
)
@pytest.mark.parametrize(
    ("encoder", "features"),
    [("resnet18", 512), (f"onnx:{SHARED / 'weights' / 'mobilenet_v2_imagenet.onnx'}", 1280)],
)
def test_office10_run_follows_its_protocol(tmp_path: Path, encoder: str, features: int) -> None:
    starts: list[int] = []
    experiment = Experiment(rounds=1).replace(
        dataset__name="office10",
        dataset__root=SHARED / "data",
        dataset__per_class=4,
        dataset__test_per_class=3,
        partition__kind="feature",
        encoder__name=encoder,
    )
    observer = Observer(on_start=lambda _, done: starts.append(done))
    result = run(experiment, tmp_path / "run", observer)
    assert starts == [0]
    summary = read_summary(result.path)
    assert summary["parameters_sent"] == features * 256 + 256 + 256 * 10 + 10
    if features == 512:
        assert summary["parameters_sent"] == 133_898
    assert summary["prototype_floats_sent"] == 10 * 4 * 256
    assert list(summary["accuracy_per_client"]) == ["amazon", "caltech", "dslr", "webcam"]
