"""Random filters: what they are, what they give, and for which images."""

from pathlib import Path

import numpy
import pytest
import torch
from numpy.typing import NDArray
from torch.nn.functional import adaptive_avg_pool2d

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.images import Images
from mpfedcl.models.encoders.encoder import PixelScaling, find_encoder
from mpfedcl.models.encoders.random_filters import RandomFilters, draw_filters

FIRST_WEIGHTS = [-0.0193872, 0.1923199, -0.1823747]
SHAPES = [(28, 28), (5, 5), (30, 23), (17, 6, 3), (32, 32, 3)]


def make_filters(
    shape: tuple[int, ...] = (28, 28),
    seed: int = 0,
    count: int = 32,
    scale: tuple[float, float] = (0.1307, 0.3081),
) -> RandomFilters:
    return RandomFilters(seed, count, PixelScaling(shape, *scale))


def find_filters(name: str, *shape: int) -> RandomFilters:
    found = find_encoder(name, None, Path(), find_scaling=lambda: PixelScaling(shape, 0.5, 0.5))
    assert isinstance(found, RandomFilters)
    return found


def draw_images(count: int, *shape: int) -> Images:
    return numpy.random.default_rng(0).integers(0, 256, (count, *shape), dtype=numpy.uint8)


def encode_slowly(image: Images, filters: NDArray[numpy.float64]) -> NDArray[numpy.float64]:
    """Follow the definition, number by number."""
    pixels = (image.reshape(*image.shape[:2], -1) / 255 - 0.1307) / 0.3081
    rows, columns = pixels.shape[0] - 4, pixels.shape[1] - 4
    features = []
    for sign in (1, -1):
        for each in filters:
            answers = numpy.zeros((rows, columns))
            for row in range(rows):
                for column in range(columns):
                    patch = pixels[row : row + 5, column : column + 5].transpose(2, 0, 1)
                    answers[row, column] = max(0.0, sign * float((patch * each).sum()))
            for top in range(4):
                for left in range(4):
                    down = slice(top * rows // 4, -(-(top + 1) * rows // 4))
                    across = slice(left * columns // 4, -(-(left + 1) * columns // 4))
                    features.append(answers[down, across].mean())
    return numpy.array(features)


@pytest.mark.parametrize("channels", [1, 3])
def test_filters_have_mean_0_and_norm_1(channels: int) -> None:
    filters = draw_filters(0, 32, channels).double()
    assert filters.shape == (32, channels, 5, 5)
    assert filters.sum(dim=(1, 2, 3)).abs().max() < 1e-6
    assert (filters.square().sum(dim=(1, 2, 3)) - 1).abs().max() < 1e-6
    # Over all its weights: a filter may tell colors from each other.
    assert channels == 1 or filters.sum(dim=(2, 3)).abs().max() > 0.1


@pytest.mark.parametrize("shape", [(9, 11), (8, 12, 3)])
def test_features_follow_the_definition(shape: tuple[int, ...]) -> None:
    encoder = make_filters(shape, count=3)
    image = draw_images(1, *shape)
    filters = encoder.tensors["filters.weight"].double().numpy()
    wanted = encode_slowly(image[0], filters)
    assert wanted.max() > 0.1
    numpy.testing.assert_allclose(encoder.encode(image)[0], wanted, atol=2e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_pooling_windows_match_adaptive_pooling(shape: tuple[int, ...]) -> None:
    encoder, images = make_filters(shape), draw_images(3, *shape)
    inputs = encoder.preprocessing.standardize(
        torch.from_numpy(encoder.preprocessing.to_input_bytes(images)), torch.float64
    )
    answers = torch.conv2d(inputs, encoder.tensors["filters.weight"].double())
    wanted = adaptive_avg_pool2d(torch.cat([answers.relu(), (-answers).relu()], dim=1), 4)
    features = encoder.encode(images)
    assert features.shape == (3, encoder.feature_size) == (3, 1024)
    assert features.dtype == numpy.float32
    numpy.testing.assert_allclose(features, wanted.flatten(1), atol=5e-6)


def test_features_of_blank_images_are_zero() -> None:
    for shape in SHAPES:
        blank = numpy.full((2, *shape), 201, dtype=numpy.uint8)
        assert not make_filters(shape).encode(blank).any()


@pytest.mark.parametrize("shape", SHAPES)
def test_features_do_not_depend_on_other_images_of_the_batch(shape: tuple[int, ...]) -> None:
    encoder, images = make_filters(shape), draw_images(5, *shape)
    whole = encoder.encode(images)
    assert numpy.array_equal(whole[3:4], encoder.encode(images[3:4]))
    assert numpy.array_equal(whole[:2], encoder.encode(images[:2]))
    assert encoder.encode(images[:0]).shape == (0, 1024)


def test_images_are_converted_to_the_encoder_format() -> None:
    encoder, gray = make_filters((12, 10, 3)), draw_images(2, 12, 10)
    color = numpy.repeat(gray[..., None], 3, axis=3)
    assert numpy.array_equal(encoder.encode(gray), encoder.encode(color))
    assert encoder.encode(draw_images(2, 40, 41)).shape == (2, 1024)


def test_fingerprint_depends_on_all_filter_settings() -> None:
    prints = {
        make_filters(**changes).fingerprint
        for changes in (
            {},
            {"seed": 1},
            {"count": 31},
            {"shape": (28, 27)},
            {"shape": (28, 28, 3)},
            {"scale": (0.1307, 0.3)},
            {"scale": (0.13, 0.3081)},
        )
    }
    assert len(prints) == 7
    assert make_filters().fingerprint == make_filters().fingerprint
    # On every machine and in every version: clients draw the filters for themselves.
    first = draw_filters(0, 32, 1)[0, 0, 0, :3].tolist()
    assert first == pytest.approx(FIRST_WEIGHTS, abs=1e-6)


def test_encoder_name_may_include_seed_and_number_of_filters() -> None:
    plain = find_filters("random-filters", 28, 28)
    assert plain.fingerprint == find_filters("random-filters:0:32", 28, 28).fingerprint
    assert plain.fingerprint != find_filters("random-filters:7", 28, 28).fingerprint
    assert find_filters("random-filters:7:64", 9, 9, 3).feature_size == 2048


@pytest.mark.parametrize(
    "name", ["random-filters:", "random-filters:x", "random-filters:0:0", "random-filters:0:2000"]
)
def test_invalid_filter_names_are_rejected(name: str) -> None:
    with pytest.raises(InvalidInput, match=rf"encoder.name is '{name}'; it must be random-filters"):
        find_filters(name, 28, 28)


@pytest.mark.parametrize("shape", [(97, 20), (20, 200, 3), (4, 28), (28, 4, 3)])
def test_images_that_are_too_large_or_too_small_are_rejected(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput) as refused:
        find_filters("random-filters", *shape)
    sentence = str(refused.value)
    assert f"{shape[0]} x {shape[1]} pixels; it must be resnet18 or onnx:FILE" in sentence
    assert "--dataset.image-size 64" in sentence


def test_random_filters_need_a_known_image_size(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="made for images of a known size"):
        find_encoder("random-filters", None, tmp_path)
