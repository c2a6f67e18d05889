"""Vision transformers as encoders: which output, which tokens, which scale; torch is the oracle."""

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from numpy.typing import NDArray

from command_results import Refused
from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.images import Images
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.settings import EncoderSettings
from mpfedcl.models.encoders.encoder import Encoder, find_encoder

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (mpfedcl[onnx])")
from vision_transformers import SIZE, export_transformer, make_transformer

MEAN, DEVIATION = (0.5, 0.4, 0.3), (0.5, 0.25, 0.2)
TOKENS, POOLED = {"output": "last_hidden_state"}, {"output": "pooler_output"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "vit.onnx"
    path.write_bytes(export_transformer())
    return path


def load(path: Path, **choices: Any) -> Encoder:
    settings = EncoderSettings(name=f"onnx:{path}", **choices)
    return find_encoder(str(settings.name), None, path.parent, settings=settings)


def draw_images(count: int = 5) -> Images:
    shape = (count, SIZE, SIZE, 3)
    return numpy.random.default_rng(1).integers(0, 256, shape, dtype=numpy.uint8)


def run_torch(images: Images, mean: Any = 0.0, deviation: Any = 1.0) -> list[NDArray[Any]]:
    """Return what torch gives: tokens, pooled."""
    pixels = (images / 255 - numpy.asarray(mean)) / numpy.asarray(deviation)
    with torch.no_grad():
        planes = torch.from_numpy(pixels).permute(0, 3, 1, 2).float()
        return [each.numpy() for each in make_transformer()(planes)]


def test_output_and_tokens_are_selected_by_settings(file: Path) -> None:
    images = draw_images()
    tokens, pooled = run_torch(images)
    expected = {
        "pooled": (POOLED, pooled),
        "mean": (TOKENS, tokens.mean(1)),
        "said mean": ({**TOKENS, "tokens": "mean"}, tokens.mean(1)),
        "class": ({**TOKENS, "tokens": "class"}, tokens[:, 0]),
        "patches": ({**TOKENS, "tokens": "patches"}, tokens[:, 1:].mean(1)),
    }
    prints = set()
    for choices, wanted in expected.values():
        encoder = load(file, **choices)
        assert encoder.feature_size == 16
        numpy.testing.assert_allclose(encoder.encode(images), wanted, atol=1e-5)
        prints.add(encoder.fingerprint)
    assert len(prints) == len(expected)


def test_scaling_by_metadata_equals_scaling_by_settings(tmp_path: Path, file: Path) -> None:
    told = {"mean": list(MEAN), "std": list(DEVIATION), "image_size": SIZE}
    metadata = {name: json.dumps(value) for name, value in told.items()}
    images = draw_images()
    _, pooled = run_torch(images, MEAN, DEVIATION)
    given = load(file, **POOLED, mean=MEAN, deviation=DEVIATION)
    numpy.testing.assert_allclose(given.encode(images), pooled, atol=1e-5)
    path = tmp_path / "told.onnx"
    path.write_bytes(export_transformer(**metadata))
    assert numpy.array_equal(load(path, **POOLED).encode(images), given.encode(images))
    # What is given wins over what the file says.
    other = load(path, **POOLED, mean=(0.0, 0.0, 0.0))
    _, expected = run_torch(images, 0.0, DEVIATION)
    numpy.testing.assert_allclose(other.encode(images), expected, atol=1e-5)


def test_fingerprint_depends_on_the_settings(file: Path) -> None:
    plain = load(file, **POOLED)
    assert load(file, **POOLED).fingerprint == plain.fingerprint
    changes: list[dict[str, Any]] = [{"mean": MEAN}, {"deviation": MEAN}, {"image_size": SIZE}]
    prints = {load(file, **POOLED, **each).fingerprint for each in changes}
    assert len(prints | {plain.fingerprint}) == 4


@pytest.mark.parametrize(
    ("choices", "sentence"),
    [
        ({}, "encoder.output is not set; it must be one of the outputs of"),
        ({}, "last_hidden_state ['batch', 17, 16], pooler_output ['batch', 16]."),
        ({"output": "logits"}, "encoder.output is 'logits'; it must be one of the outputs of"),
        (
            {**POOLED, "tokens": "class"},
            "encoder.tokens is 'class'; it must be left out, because the output pooler_output is",
        ),
        (
            {**POOLED, "image_size": 224},
            "encoder.image_size is 224; it must be left out or 32, because the model",
        ),
    ],
)
def test_settings_that_do_not_fit_the_model_are_rejected(
    file: Path, choices: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        load(file, **choices).encode(draw_images(1))
    assert sentence in str(caught.value)


@pytest.mark.parametrize("name", ["resnet18", "none", "random-resnet18"])
def test_onnx_settings_for_other_encoders_are_rejected(name: str) -> None:
    for choices in (TOKENS, {"tokens": "class"}, {"mean": MEAN}, {"image_size": 224}):
        (setting,) = choices
        with pytest.raises(InvalidInput, match=rf"encoder\.{setting} is .* only onnx:FILE"):
            EncoderSettings(name=name, **choices)
    # A name that is still open is filled in by the data set.
    with pytest.raises(InvalidInput, match=r"because encoder\.name is 'none' and only onnx:FILE"):
        Experiment().replace(encoder__image_size=224).resolved()


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--encoder.deviation 0.5 0.5 0", "encoder.deviation.2 is 0.0; it must be greater than 0"),
        ("--encoder.mean 0.5 0.5 nan", "encoder.mean.2 is nan; it must be finite"),
        ("--encoder.mean 0.5 x", "--encoder.mean is '0.5', 'x'; it must be three numbers"),
        ("--encoder.tokens last", "encoder.tokens is 'last'; it must be one of"),
        ("--encoder.image-size 0", "encoder.image_size is 0"),
        ("--encoder.output x", "encoder.output is 'x'; it must be left out, because encoder.name"),
    ],
)
def test_invalid_encoder_flags_give_a_one_line_error(
    refused: Refused, words: str, sentence: str
) -> None:
    assert sentence in refused("run", *words.split(" "))


def test_encoder_settings_are_read_back_from_toml() -> None:
    experiment = Experiment().replace(
        encoder__name="onnx:vit.onnx",
        encoder__output="last_hidden_state",
        encoder__tokens="class",
        encoder__mean=MEAN,
        encoder__deviation=DEVIATION,
        encoder__image_size=224,
    )
    assert Experiment.parse_toml(experiment.to_toml(), Path("x")) == experiment
