"""Central pretraining: it learns, its file is an encoder, and its bytes are its seed's."""

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from mpfedcl.cli.arguments.experiments import Pretrain
from mpfedcl.cli.commands.pretrain import pretrain_command
from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.pretraining import load_pretraining_data
from mpfedcl.experiment.pretraining import PretrainSettings
from mpfedcl.experiment.settings import DatasetSettings
from mpfedcl.models.encoders.encoder import find_encoder
from mpfedcl.models.encoders.pretraining import (
    Epoch,
    PretrainObserver,
    PretrainResult,
    augment,
    checkpoint_path,
)
from mpfedcl.models.encoders.pretraining import pretrain as pretrain_on
from mpfedcl.models.encoders.weights import load_weights, read_safetensors_file

pytestmark = pytest.mark.whole

SIZE = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a set of two domains and three classes that color and stripes tell apart."""
    root = tmp_path_factory.mktemp("pictures")
    generator = numpy.random.default_rng(0)
    for domain in ("day", "night"):
        for label, name in enumerate(("blue", "red", "stripes")):
            (root / domain / name).mkdir(parents=True)
            for number in range(12):
                pixels = generator.integers(0, 60, (20, 24, 3), dtype=numpy.uint8)
                if name == "stripes":
                    pixels[::4] += 150
                else:
                    pixels[..., 2 - 2 * label] += 120
                Image.fromarray(pixels).save(root / domain / name / f"{number}.png")
    return root


def make_settings(folder: Path, **changes: Any) -> PretrainSettings:
    values: dict[str, Any] = {
        "dataset": DatasetSettings(name="folder", root=folder),
        "epochs": 2,
        "batch_size": 12,
        "lr": 0.05,
        "image_size": SIZE,
        **changes,
    }
    return PretrainSettings(**values)


def pretrain(settings: PretrainSettings, out: Path, **options: Any) -> PretrainResult:
    return pretrain_on(settings, load_pretraining_data, out, **options)


def refusal(action: Any) -> str:
    with pytest.raises(InvalidInput) as caught:
        action()
    assert str(caught.value).endswith(".")
    return str(caught.value)


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Epoch]]:
    out = tmp_path_factory.mktemp("trained") / "new" / "encoder.safetensors"
    seen: list[Epoch] = []
    result = pretrain(make_settings(folder), out, observer=PretrainObserver(on_epoch=seen.append))
    assert result.path == out
    assert result.history == seen
    return out, seen


def test_the_loss_falls_and_held_out_images_are_told_apart(
    trained: tuple[Path, list[Epoch]],
) -> None:
    _, history = trained
    assert [each.epoch for each in history] == [1, 2]
    assert history[-1].loss < 0.8 * history[0].loss
    assert history[-1].accuracy is not None
    assert history[-1].accuracy > 60


def test_the_file_is_an_encoder_with_its_preprocessing(
    trained: tuple[Path, list[Epoch]], folder: Path
) -> None:
    path, history = trained
    encoder = find_encoder("resnet18", path, folder)
    assert encoder.preprocessing.image_shape == (SIZE, SIZE, 3)
    images = numpy.random.default_rng(1).integers(0, 256, (4, 20, 24, 3), dtype=numpy.uint8)
    features = encoder.encode(images)
    assert features.shape == (4, 512)
    assert numpy.abs(features[0] - features[1]).max() > 1e-4
    tensors, metadata = read_safetensors_file(path)
    assert not any(name.startswith("fc.") for name in tensors)
    assert {value.dtype for value in tensors.values()} == {torch.float16}
    assert list(metadata) == ["mpfedcl"]
    told = json.loads(metadata["mpfedcl"])["training"]
    assert told["classes"] == ["blue", "red", "stripes"]
    assert told["images"] == 66
    assert told["last"]["loss"] == history[-1].loss
    assert str(folder) not in metadata["mpfedcl"]
    assert not checkpoint_path(path).exists()


@pytest.mark.usefixtures("narrow_resnet")
def test_a_stopped_training_resumes_to_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole.safetensors", tmp_path / "encoder.safetensors"
    pretrain(make_settings(folder), whole)

    def stop(epoch: Epoch) -> None:
        if epoch.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pretrain(make_settings(folder), out, observer=PretrainObserver(on_epoch=stop))
    assert checkpoint_path(out).exists()
    assert not out.exists()
    assert "--resume" in refusal(lambda: pretrain(make_settings(folder), out))
    other = make_settings(folder, lr=0.1)
    assert "other settings or images" in refusal(lambda: pretrain(other, out, resume=True))
    seen: list[Epoch] = []
    pretrain(
        make_settings(folder), out, resume=True, observer=PretrainObserver(on_epoch=seen.append)
    )
    # One epoch was kept, one was left; nothing tells the file from one that was never stopped.
    assert [each.epoch for each in seen] == [2]
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.usefixtures("narrow_resnet")
def test_single_precision_and_another_seed(folder: Path, tmp_path: Path) -> None:
    whole, other = tmp_path / "whole.safetensors", tmp_path / "other.safetensors"
    pretrain(make_settings(folder, epochs=1, half=False), whole)
    pretrain(make_settings(folder, epochs=1, half=False, seed=1), other)
    weights = load_weights(whole).tensors
    assert not torch.equal(weights["conv1.weight"], weights["conv1.weight"].half().float())
    assert not torch.equal(weights["conv1.weight"], load_weights(other).tensors["conv1.weight"])
    # The statistics were measured: they have left their start.
    assert float((weights["bn1.running_mean"]).abs().max()) > 1e-3
    assert float((weights["layer4.1.bn2.running_var"] - 1).abs().max()) > 1e-3


def test_images_are_split_by_class_and_official_tests_are_kept(
    folder: Path, tmp_path: Path
) -> None:
    data = load_pretraining_data(make_settings(folder))
    assert data.images.shape == (66, 3, SIZE, SIZE)
    assert torch.bincount(data.labels).tolist() == [22, 22, 22]
    assert torch.bincount(data.test_labels).tolist() == [2, 2, 2]
    drawn = load_pretraining_data(
        make_settings(folder, dataset=DatasetSettings(name="folder", root=folder, train_size=10))
    )
    assert len(drawn.labels) == 10
    numpy.savez(
        tmp_path / "ink.npz",
        x_train=numpy.zeros((6, 9, 9), dtype=numpy.uint8),
        y_train=numpy.arange(6) % 2,
        x_test=numpy.ones((4, 9, 9), dtype=numpy.uint8),
        y_test=numpy.arange(4) % 2,
    )
    official = load_pretraining_data(make_settings(tmp_path))
    assert official.images.shape == (6, 3, SIZE, SIZE)
    assert official.test_images.min() == official.test_images.max() == 1


def test_augmentation_shifts_and_mirrors_by_its_key_alone() -> None:
    pixels = torch.arange(16 * 16).view(1, 1, 16, 16).expand(50, 3, 16, 16).to(torch.int32)
    key = torch.Generator
    once = augment(pixels, key().manual_seed(0), flip=True)
    assert torch.equal(once, augment(pixels, key().manual_seed(0), flip=True))
    assert not torch.equal(once, augment(pixels, key().manual_seed(1), flip=True))
    steps = once[:, 0, 8, 8] - once[:, 0, 8, 7]
    assert set(steps.tolist()) == {1, -1}
    kept = augment(pixels, key().manual_seed(0), flip=False)
    assert set((kept[:, 0, 8, 8] - kept[:, 0, 8, 7]).tolist()) == {1}
    rows = kept[:, 0, 8, 8] // 16
    assert set(rows.tolist()) == {6, 7, 8, 9, 10}
    # All channels of an image move together, and images on their own.
    assert torch.equal(kept[:, 0], kept[:, 2])
    assert len({tuple(image.flatten().tolist()) for image in kept[:, 0]}) > 10


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"lr": 1e30}, "lr is 1e+30"),
        ({"device": "abacus"}, "device is 'abacus'"),
        ({"dataset": DatasetSettings(name="folder", train_size=5000)}, "train_size is 5,000"),
        ({"dataset": DatasetSettings(name="folder", train_size=1)}, "at least 2 classes"),
    ],
)
def test_refuses_settings_that_cannot_work(
    folder: Path, tmp_path: Path, changes: dict[str, Any], part: str
) -> None:
    if "dataset" in changes:
        changes["dataset"] = DatasetSettings(**{**changes["dataset"].model_dump(), "root": folder})
    settings = make_settings(folder, **changes)
    assert part in refusal(lambda: pretrain(settings, tmp_path / "encoder.safetensors"))
    assert not (tmp_path / "encoder.safetensors").exists()


def test_refuses_places_that_cannot_work(folder: Path, tmp_path: Path) -> None:
    settings = make_settings(folder)
    assert "ends in .safetensors" in refusal(lambda: pretrain(settings, tmp_path / "x.pth"))
    there = tmp_path / "there.safetensors"
    there.write_bytes(b"precious")
    assert "must be a new file" in refusal(lambda: pretrain(settings, there))
    assert there.read_bytes() == b"precious"
    new = tmp_path / "new.safetensors"
    assert "to resume" in refusal(lambda: pretrain(settings, new, resume=True))
    checkpoint_path(new).write_bytes(b"broken")
    assert "cannot be read" in refusal(lambda: pretrain(settings, new, resume=True))


@pytest.mark.parametrize(
    "changes", [{"epochs": 0}, {"batch_size": 1}, {"lr": 0}, {"held_out": 1}, {"image_size": 4}]
)
def test_refuses_values_out_of_range(changes: dict[str, Any]) -> None:
    sentence = refusal(lambda: PretrainSettings(**changes))
    assert f"{next(iter(changes))} is" in sentence


def test_the_command_prints_what_it_made(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = make_settings(
        folder,
        epochs=1,
        dataset=DatasetSettings(name="folder", root=folder, train_size=12),
    )
    out = tmp_path / "encoder.safetensors"
    assert pretrain_command(Pretrain(out=out, json=True, settings=settings)) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["path"] == str(out)
    assert len(content["epochs"]) == 1
    out.unlink()
    assert pretrain_command(Pretrain(out=out, settings=settings)) == 0
    assert "--encoder.weights" in capsys.readouterr().out
