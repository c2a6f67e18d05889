"""Encoder and head as one model: what is trained, what is constant, and batching over clients."""

from functools import cache
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn.functional import cross_entropy

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment import Experiment
from mpfedcl.models import Mlp, Model
from mpfedcl.models.encoders.encoder import Preprocessing, find_encoder
from mpfedcl.models.encoders.torch_encoders import ResNetEncoder, TrainableEncoder
from mpfedcl.models.factory import make_model
from mpfedcl.models.resnet import ResNet18, is_statistic

pytestmark = pytest.mark.whole

SIZE = 16


def make_weights() -> Tensors:
    return {n: value.clone() for n, value in draw_weights(ResNet18.feature_size).items()}


@cache
def draw_weights(_feature_size: int) -> Tensors:
    weights = ResNet18().init(torch.Generator().manual_seed(1), torch.float32)
    key = torch.Generator().manual_seed(2)
    for name, value in weights.items():
        if is_statistic(name):
            # Means on both sides of 0: positive ones alone would silence every unit.
            shift = 0.2 if name.endswith("running_mean") else 0.0
            weights[name] = value + 0.4 * torch.rand(value.shape, generator=key) - shift
    return weights


def make_trainable_encoder(
    weights: Tensors | None = None, num_classes: int = 10
) -> TrainableEncoder:
    return TrainableEncoder(weights or make_weights(), Preprocessing(SIZE), num_classes)


def start(model: Model, dtype: torch.dtype = torch.float32) -> Tensors:
    return model.init(torch.Generator().manual_seed(5), dtype)


def draw_pixels(count: int, seed: int = 0) -> Tensor:
    key = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, SIZE, SIZE), generator=key).to(torch.uint8)


def test_parameters_are_encoder_and_head_without_statistics() -> None:
    params = start(make_trainable_encoder())
    assert sum(value.numel() for value in params.values()) == 11_176_512 + 133_898
    assert {n.split(".")[0] for n in params} == {"encoder", "hidden", "classifier"}
    assert params["hidden.0.weight"].shape == (256, 512)
    assert not any(is_statistic(name) for name in params)


def test_initial_encoder_is_a_copy_of_the_given_weights() -> None:
    weights = make_weights()
    model = make_trainable_encoder(weights)
    params = start(model)
    assert torch.equal(params["encoder.conv1.weight"], weights["conv1.weight"])
    params["encoder.conv1.weight"].zero_()
    assert float(weights["conv1.weight"].abs().sum()) > 0
    assert torch.equal(start(model)["encoder.conv1.weight"], weights["conv1.weight"])


def test_untrained_model_equals_the_frozen_encoder_with_the_same_head() -> None:
    weights, pixels = make_weights(), draw_pixels(6)
    model = make_trainable_encoder(weights)
    params = start(model)
    frozen = ResNetEncoder("test", weights, Preprocessing(SIZE))
    features = torch.from_numpy(frozen.encode(pixels.permute(0, 2, 3, 1).numpy()))
    expected = Mlp((512, 256), 10).apply(params, features)
    for found, wanted in zip(model.apply(params, pixels), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("narrow_resnet")
def test_byte_float_and_flattened_inputs_give_equal_outputs() -> None:
    model, pixels = make_trainable_encoder(), draw_pixels(3)
    params = start(model)
    _, expected = model.apply(params, pixels)
    for inputs in (pixels.float(), pixels.flatten(start_dim=1), pixels.float().flatten(1)):
        assert torch.equal(model.apply(params, inputs)[1], expected)


@pytest.mark.usefixtures("narrow_resnet")
def test_images_without_gradient_are_processed_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    model, pixels = make_trainable_encoder(), draw_pixels(7)
    params = start(model)
    with torch.no_grad():
        whole = model.apply(params, pixels)
        monkeypatch.setattr("mpfedcl.models.base.IMAGES_AT_ONCE", 3)
        sizes: list[int] = []
        network = ResNet18.apply

        def count(self: ResNet18, given: Tensors, images: Tensor) -> Tensor:
            sizes.append(len(images))
            return network(self, given, images)

        monkeypatch.setattr(ResNet18, "apply", count)
        parts = model.apply(params, pixels)
    assert sizes == [3, 3, 1]
    for left, right in zip(whole, parts, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("narrow_resnet")
def test_gradients_of_stacked_clients_equal_those_of_single_clients() -> None:
    model = make_trainable_encoder(num_classes=4)
    first = start(model, torch.float64)
    key = torch.Generator().manual_seed(9)
    second = {
        name: value + 0.01 * torch.randn(value.shape, generator=key, dtype=torch.float64)
        for name, value in first.items()
    }
    pixels = torch.stack([draw_pixels(3, 1), draw_pixels(3, 2)])
    labels = torch.tensor([[0, 1, 2], [3, 3, 0]])

    def loss(params: Tensors, inputs: Tensor, targets: Tensor) -> Tensor:
        _, logits = model.apply(params, inputs)
        return cross_entropy(logits, targets)

    stacked = {name: torch.stack([first[name], second[name]]) for name in first}
    together = vmap(grad(loss))(stacked, pixels, labels)
    for client, params in enumerate((first, second)):
        alone = grad(loss)(params, pixels[client], labels[client])
        assert alone.keys() == together.keys()
        for name, value in alone.items():
            torch.testing.assert_close(together[name][client], value, rtol=1e-8, atol=1e-10)
            assert float(value.abs().sum()) > 0


@pytest.mark.usefixtures("narrow_resnet")
def test_training_lowers_the_loss_and_keeps_the_statistics() -> None:
    weights = make_weights()
    kept = {name: value.clone() for name, value in weights.items()}
    model = make_trainable_encoder(weights, num_classes=2)
    params = {name: value.requires_grad_() for name, value in start(model).items()}
    pixels = draw_pixels(8)
    pixels[::2] //= 4
    labels = torch.arange(8) % 2
    optimizer = torch.optim.SGD(params.values(), lr=0.03, momentum=0.5)
    losses = []
    for _ in range(8):
        loss = cross_entropy(model.apply(params, pixels)[1], labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert all(torch.equal(weights[name], kept[name]) for name in kept)


def test_only_resnet_encoders_are_trainable(tmp_path: Path) -> None:
    trains = Experiment(model={"name": "mlp"}, encoder={"train": True})
    random = find_encoder("random-resnet18", None, tmp_path)
    params = start(make_model(trains, random, (512,), 10, is_image=False))
    assert sum(value.numel() for value in params.values()) == 11_310_410
    path = tmp_path / "model.onnx"
    path.write_bytes(b"anything")
    onnx = find_encoder(f"onnx:{path}", None, tmp_path)
    with pytest.raises(InvalidInput, match=r"encoder.train is true, but .* model\.onnx cannot"):
        make_model(trains, onnx, (512,), 10, is_image=False)


def test_preprocessing_converts_and_scales_images() -> None:
    preprocessing = Preprocessing(8, (0.5, 0.25, 0.0), (0.5, 0.25, 1.0))
    gray = numpy.full((2, 5, 9), 255, dtype=numpy.uint8)
    arranged = preprocessing.to_input_bytes(gray)
    assert arranged.shape == (2, 3, 8, 8)
    assert arranged.dtype == numpy.uint8
    inputs = preprocessing.standardize(torch.from_numpy(arranged), torch.float64)
    torch.testing.assert_close(
        inputs[0, :, 3, 3], torch.tensor([1.0, 3.0, 1.0], dtype=torch.float64)
    )
    red = numpy.zeros((1, 8, 8, 3), dtype=numpy.uint8)
    red[..., 0] = 200
    assert preprocessing.to_input_bytes(red)[0, :, 0, 0].tolist() == [200, 0, 0]
