"""The convolutional network, held to torch's own layers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.rng import generator
from mpfedcl.core.tensors import Tensors
from mpfedcl.models import Cnn
from mpfedcl.models.resnet import ResNet18, is_statistic

DOUBLE = torch.float64


def draw_params(model: Cnn, dtype: torch.dtype = DOUBLE) -> Tensors:
    params = model.init(generator(0, "weights"), dtype)
    # Norms begin as 1 and 0, which would hide a scale that is left out.
    key = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(value.shape, generator=key, dtype=dtype) if "norm" in name else value
        for name, value in params.items()
    }


def draw_images(count: int, *shape: int) -> Tensor:
    key = torch.Generator().manual_seed(5)
    return torch.randn(count, *shape, generator=key, dtype=DOUBLE)


def run_torch_layers(params: Tensors, planes: Tensor, *, has_norm: bool) -> tuple[Tensor, Tensor]:
    """Return what modules of torch make of [B, channels, h, w]."""
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate([(planes.shape[1], 32), (32, 64)]):
        layers.append(nn.Conv2d(before, after, 5, padding=2, dtype=DOUBLE))
        names = [f"conv.{number}"]
        if has_norm:
            layers.append(nn.GroupNorm(8, after, dtype=DOUBLE))
            names.append(f"norm.{number}")
        for layer, name in zip(layers[-len(names) :], names, strict=True):
            layer.load_state_dict({p: params[f"{name}.{p}"] for p in ("weight", "bias")})
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    hidden = nn.Sequential(*layers)(planes).flatten(1)
    embeddings = nn.functional.linear(hidden, params["hidden.0.weight"], params["hidden.0.bias"])
    embeddings = embeddings.relu()
    return embeddings, nn.functional.linear(
        embeddings, params["classifier.weight"], params["classifier.bias"]
    )


def test_cnn_matches_the_network_of_the_fedavg_paper() -> None:
    params = Cnn((28, 28), 10).init(generator(0, "weights"), torch.float32)
    assert sum(value.numel() for value in params.values()) == 1_663_370
    for name, fan_in in (("conv.0", 25), ("conv.1", 800), ("hidden.0", 3136)):
        for part in ("weight", "bias"):
            assert float(params[f"{name}.{part}"].abs().max()) <= fan_in**-0.5


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("shape", [(12, 15), (13, 12, 3)])
def test_embeddings_and_logits_match_torch_layers(shape: tuple[int, ...], has_norm: bool) -> None:
    model = Cnn(shape, 4, (7,), has_norm=has_norm)
    params, images = draw_params(model), draw_images(3, *shape)
    planes = images.movedim(3, 1) if len(shape) == 3 else images.unsqueeze(1)
    wanted = run_torch_layers(params, planes, has_norm=has_norm)
    for inputs in (images, images.flatten(1)):
        for ours, theirs in zip(model.apply(params, inputs), wanted, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)


@given(st.integers(4, 21), st.integers(4, 21), st.booleans())
def test_cnn_accepts_images_of_any_size(height: int, width: int, is_color: bool) -> None:
    shape = (height, width, 3) if is_color else (height, width)
    model = Cnn(shape, 3, (2,))
    embeddings, logits = model.apply(draw_params(model), draw_images(1, *shape).flatten(1))
    assert (embeddings.shape, logits.shape) == ((1, 2), (1, 3))
    assert logits.isfinite().all()


def test_images_too_small_for_two_poolings_are_rejected() -> None:
    with pytest.raises(InvalidInput, match=r"images have 3 x 9 pixels; they must have at least 4"):
        Cnn((3, 9), 10)


def test_many_images_are_processed_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Cnn((12, 12), 3, (4,), has_norm=True)
    params, images = draw_params(model), draw_images(7, 144)
    wanted = model.apply(params, images)
    monkeypatch.setattr("mpfedcl.models.base.IMAGES_AT_ONCE", 3)
    with torch.no_grad():
        for ours, theirs in zip(model.apply(params, images), wanted, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)


def test_stacked_models_equal_single_models() -> None:
    model = Cnn((12, 12), 3, (4,))
    models = [model.init(generator(seed, "weights"), DOUBLE) for seed in range(3)]
    stack = {name: torch.stack([each[name] for each in models]) for name in models[0]}
    images = draw_images(5, 144)
    embeddings, logits = model.apply_many(stack, images)
    for number, params in enumerate(models):
        assert torch.equal(embeddings[number], model.apply(params, images)[0])
        assert torch.equal(logits[number], model.apply(params, images)[1])


def test_parameters_of_normalization_layers_are_recognized() -> None:
    model = Cnn((12, 12), 3, has_norm=True)
    params = model.init(generator(0, "weights"), DOUBLE)
    assert model.normalization == {name for name in params if name.startswith("norm.")}
    assert not Cnn((12, 12), 3).normalization
    # In a ResNet, what is no convolution is a norm.
    shapes = {n: shape for n, shape in ResNet18().shapes().items() if not is_statistic(n)}
    assert ResNet18().normalization() == {n for n, shape in shapes.items() if len(shape) == 1}
