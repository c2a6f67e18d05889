"""Frozen encoders: equal images, equal features; and a fingerprint for everything that matters."""

import os
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.images import Images
from mpfedcl.data.image_files import ImageFileStore
from mpfedcl.data.samples import ImageFormat
from mpfedcl.models.encoders.encoder import Preprocessing, find_encoder
from mpfedcl.models.encoders.torch_encoders import ResNetEncoder
from mpfedcl.models.resnet import ResNet18

pytestmark = pytest.mark.whole


@pytest.fixture(autouse=True)
def _own_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPFEDCL_WEIGHTS", raising=False)


@pytest.fixture(scope="module")
def encoder() -> ResNetEncoder:
    tensors = ResNet18().init(torch.Generator().manual_seed(0), torch.float32)
    return ResNetEncoder("test", tensors, Preprocessing(16))


def draw_images(count: int, *shape: int, seed: int = 0) -> Images:
    return numpy.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=numpy.uint8)


def find_real_data() -> Path | None:
    """Return the data folder with real images and weights beside it, where there is one."""
    beside = Path(__file__).parents[2].parent / "shared" / "data"
    folder = Path(os.environ.get("MPFEDCL_DATA") or beside)
    weights = folder.parent / "weights" / "resnet18_domainnet_clipart.safetensors"
    return folder if weights.is_file() and (folder / "office10").is_dir() else None


@pytest.mark.parametrize("shape", [(16, 16), (16, 16, 3), (28, 28), (9, 21, 3), (128, 128, 3)])
def test_features_have_one_shape_for_any_image_size_and_color(
    encoder: ResNetEncoder, shape: tuple[int, ...]
) -> None:
    images = draw_images(3, *shape)
    features = encoder.encode(images)
    assert features.shape == (3, 512)
    assert features.dtype == numpy.float32
    assert numpy.array_equal(features, encoder.encode(images))
    assert numpy.abs(features[0] - features[1]).max() > 1e-3


def test_gray_images_equal_three_equal_channels(encoder: ResNetEncoder) -> None:
    gray = draw_images(2, 20, 20)
    color = numpy.repeat(gray[..., None], 3, axis=3)
    assert numpy.array_equal(encoder.encode(gray), encoder.encode(color))


def test_features_do_not_depend_on_the_batch_size(
    encoder: ResNetEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = draw_images(7, 16, 16)
    whole = encoder.encode(images)
    monkeypatch.setattr("mpfedcl.models.encoders.encoder.IMAGES_AT_ONCE", 3)
    parts = encoder.encode(images)
    numpy.testing.assert_allclose(parts, whole, rtol=1e-4, atol=1e-5)
    assert encoder.encode(images[:0]).shape == (0, 512)


def test_features_equal_the_network_on_standardized_pixels(encoder: ResNetEncoder) -> None:
    images = draw_images(2, 16, 16, 3)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    inputs = (torch.from_numpy(images).float() / 255 - mean) / std
    expected = ResNet18().apply(encoder.tensors, inputs.permute(0, 3, 1, 2))
    numpy.testing.assert_allclose(encoder.encode(images), expected.numpy(), rtol=1e-4, atol=1e-5)


def test_large_images_use_lanczos_and_small_ones_bicubic_resampling() -> None:
    preprocessing = Preprocessing(64)
    for size, method in ((128, Image.Resampling.LANCZOS), (28, Image.Resampling.BICUBIC)):
        image = draw_images(1, size, size, 3)
        expected = Image.fromarray(image[0]).resize((64, 64), method)
        arranged = preprocessing.to_input_bytes(image)[0].transpose(1, 2, 0)
        assert numpy.array_equal(arranged, numpy.asarray(expected))


def test_fingerprint_depends_on_weights_and_preprocessing(encoder: ResNetEncoder) -> None:
    tensors, preprocessing = encoder.tensors, encoder.preprocessing
    same = ResNetEncoder("other name", dict(reversed(tensors.items())), preprocessing)
    assert same.fingerprint == encoder.fingerprint
    assert len(bytes.fromhex(encoder.fingerprint)) == 32
    bias = tensors["bn1.bias"].clone()
    bias[0] += 1e-6
    others = [
        ResNetEncoder("test", {**tensors, "bn1.bias": bias}, preprocessing),
        ResNetEncoder("test", tensors, Preprocessing(17)),
        ResNetEncoder("test", tensors, Preprocessing(16, mean=(0.5, 0.456, 0.406))),
        ResNetEncoder("test", tensors, Preprocessing(16, std=(0.5, 0.224, 0.225))),
    ]
    assert len({encoder.fingerprint, *(each.fingerprint for each in others)}) == 5


def test_features_that_are_not_finite_are_rejected(encoder: ResNetEncoder) -> None:
    huge = {**encoder.tensors, "bn1.weight": torch.full((64,), 3e38)}
    broken = ResNetEncoder("broken", huge, encoder.preprocessing)
    with pytest.raises(InvalidInput, match="broken gives features that are not finite"):
        broken.encode(draw_images(1, 16, 16))


def test_random_encoder_is_determined_by_its_seed(
    tmp_path: Path,
) -> None:
    first, again, other = (
        find_encoder(name, None, tmp_path)
        for name in ("random-resnet18", "random-resnet18", "random-resnet18:1")
    )
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert first.feature_size == 512
    features = first.encode(draw_images(2, 32, 32))
    assert numpy.isfinite(features).all()
    assert float(numpy.abs(features[0] - features[1]).max()) > 1e-3


def test_resnet18_takes_weights_and_preprocessing_from_its_file(tmp_path: Path) -> None:
    tensors = ResNet18().init(torch.Generator().manual_seed(4), torch.float32)
    path = tmp_path / "weights" / "resnet18_mine.safetensors"
    path.parent.mkdir()
    save_file(tensors, path, metadata={"image_size": "24"})
    found = find_encoder("resnet18", None, tmp_path)
    assert found.preprocessing.image_shape == (24, 24, 3)
    assert found.name == "resnet18 resnet18_mine.safetensors"
    assert found.fingerprint == find_encoder("resnet18", path, tmp_path / "x").fingerprint


@pytest.mark.parametrize(
    "name", ["resnet50", "", "resnet18:3", "random-resnet18:x", "onnx:", "onnx", "torchvision:x"]
)
def test_unknown_encoder_name_is_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        find_encoder(name, None, tmp_path)
    assert f"encoder.name is {name!r}" in str(caught.value)
    assert "random-filters, random-resnet18 or onnx:FILE" in str(caught.value)


@pytest.mark.parametrize("name", ["random-filters", "random-resnet18", "onnx:x.onnx"])
def test_weights_for_encoders_without_weights_are_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInput, match=r"encoder.weights is .* takes none"):
        find_encoder(name, tmp_path / "a.pth", tmp_path)


def test_resnet18_without_weights_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="random-resnet18 asks for a random encoder"):
        find_encoder("resnet18", None, tmp_path / "data")


@pytest.mark.skipif(find_real_data() is None, reason="no data folder with real images and weights")
def test_real_weights_give_distinct_features_for_real_images() -> None:
    folder = find_real_data()
    assert folder is not None
    found = find_encoder("resnet18", None, folder)
    assert found.preprocessing == Preprocessing(64)
    classes = sorted((folder / "office10" / "dslr").iterdir())
    paths = [sorted(each.iterdir())[number] for each in classes[:3] for number in range(2)]
    large = ImageFormat(128, 128, is_color=True)
    images = ImageFileStore(paths).load(numpy.arange(len(paths)), large)
    features = found.encode(images)
    assert numpy.array_equal(features, find_encoder("resnet18", None, folder).encode(images))
    assert numpy.isfinite(features).all()
    assert (features >= 0).all()
    distances = numpy.linalg.norm(features[:, None] - features[None], axis=2)
    assert distances[~numpy.eye(len(paths), dtype=bool)].min() > 0.1
    lengths = numpy.linalg.norm(features, axis=1)
    assert 1 < lengths.min() <= lengths.max() < 1000
