"""ONNX models as encoders: shapes of every kind, and a sentence for each that does not fit."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.images import Images
from mpfedcl.experiment.settings import EncoderSettings
from mpfedcl.models.encoders.encoder import Encoder, Preprocessing, find_encoder


def draw_images(count: int, *shape: int) -> Images:
    return numpy.random.default_rng(0).integers(0, 256, (count, *shape), dtype=numpy.uint8)


def save_model(
    path: Path,
    input_shape: list[int | str],
    output: str = "vector",
    metadata: dict[str, str] | None = None,
    input_type: str = "FLOAT",
) -> Path:
    """Write a model that averages each channel, doubled so that there are six features."""
    onnx = pytest.importorskip("onnx", reason="onnx is not installed (mpfedcl[onnx])")
    helper, kind = onnx.helper, getattr(onnx.TensorProto, input_type)
    nodes = [helper.make_node("Concat", ["image", "image"], ["both"], axis=1)]
    if output == "vector":
        axes = helper.make_tensor("axes", onnx.TensorProto.INT64, [2], [2, 3])
        nodes.append(helper.make_node("ReduceMean", ["both", "axes"], ["out"], keepdims=0))
    elif output == "map":
        axes = helper.make_tensor("axes", onnx.TensorProto.INT64, [1], [0])
        nodes.append(helper.make_node("Identity", ["both"], ["out"]))
    elif output == "tokens":
        axes = helper.make_tensor("axes", onnx.TensorProto.INT64, [1], [3])
        nodes.append(helper.make_node("ReduceMean", ["both", "axes"], ["mean"], keepdims=0))
        nodes.append(helper.make_node("Transpose", ["mean"], ["out"], perm=[0, 2, 1]))
    else:
        axes = helper.make_tensor("axes", onnx.TensorProto.INT64, [4], [0, 1, 2, 3])
        nodes.append(helper.make_node("ReduceMean", ["both", "axes"], ["out"], keepdims=0))
    ranks: dict[str, list[Any]] = {
        "vector": [None] * 2,
        "map": [None] * 4,
        "tokens": [None] * 3,
        "scalar": [],
    }
    graph = helper.make_graph(
        nodes,
        "averages",
        [helper.make_tensor_value_info("image", kind, input_shape)],
        [helper.make_tensor_value_info("out", kind, ranks[output])],
        initializer=[] if output == "map" else [axes],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    if metadata:
        helper.set_model_props(model, metadata)
    path.write_bytes(model.SerializeToString())
    return path


def load(path: Path, **choices: Any) -> Encoder:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (mpfedcl[onnx])")
    settings = EncoderSettings(name=f"onnx:{path}", **choices)
    return find_encoder(f"onnx:{path}", None, path.parent, settings=settings)


def find_real_model() -> Path | None:
    beside = Path(__file__).parents[2].parent / "shared" / "data"
    folder = Path(os.environ.get("MPFEDCL_DATA") or beside)
    path = folder.parent / "weights" / "mobilenet_v2_imagenet.onnx"
    return path if path.is_file() else None


@pytest.mark.parametrize("output", ["vector", "map", "tokens"])
@pytest.mark.parametrize(
    "shape", [["n", 3, "h", "w"], ["n", 3, 8, 8], [1, 3, 8, 8], [4, 3, 8, 8], ["n", "c", 8, "w"]]
)
def test_onnx_outputs_of_any_shape_are_averaged_to_features(
    tmp_path: Path, shape: list[int | str], output: str
) -> None:
    encoder = load(save_model(tmp_path / "model.onnx", shape, output))
    size = 64 if "h" in shape else 8
    assert encoder.preprocessing == Preprocessing(size, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    assert encoder.feature_size == 6
    images = draw_images(6, size, size, 3)
    features = encoder.encode(images)
    expected = images.mean(axis=(1, 2)) / 255
    assert features.dtype == numpy.float32
    numpy.testing.assert_allclose(features, numpy.tile(expected, 2), rtol=1e-5)


def test_image_size_and_scaling_are_read_from_the_metadata(tmp_path: Path) -> None:
    told = {"image_size": "12", "mean": "[0.5, 0.5, 0.5]", "std": "[0.25, 0.25, 0.25]"}
    path = save_model(tmp_path / "model.onnx", ["n", 3, "h", "w"], metadata=told)
    encoder = load(path)
    assert encoder.preprocessing.image_shape == (12, 12, 3)
    white = numpy.full((1, 12, 12), 255, dtype=numpy.uint8)
    numpy.testing.assert_allclose(encoder.encode(white), 2.0, rtol=1e-6)
    # What is given wins.
    asked = load(path, image_size=20, deviation=(0.5, 0.5, 0.5))
    assert asked.preprocessing == Preprocessing(20, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    numpy.testing.assert_allclose(asked.encode(white), 1.0, rtol=1e-6)


def test_half_precision_models_are_supported(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model.onnx", ["n", 3, 8, 8], "map", input_type="FLOAT16")
    images = draw_images(2, 8, 8, 3)
    expected = numpy.tile(images.mean(axis=(1, 2)) / 255, 2)
    numpy.testing.assert_allclose(load(path).encode(images), expected, atol=2e-3)


def test_fingerprint_is_computed_from_the_file_without_onnxruntime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    prints = []
    for name, content in (("a.onnx", b"one"), ("b.onnx", b"one"), ("c.onnx", b"two")):
        (tmp_path / name).write_bytes(content)
        prints.append(find_encoder(f"onnx:{tmp_path / name}", None, tmp_path).fingerprint)
    assert prints[0] == prints[1] != prints[2]


def test_missing_onnxruntime_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"anything")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(InvalidInput, match=r"pip install 'mpfedcl\[onnx\]'"):
        find_encoder(f"onnx:{path}", None, tmp_path).encode(draw_images(1, 8, 8))


@pytest.mark.parametrize(
    ("shape", "output", "kind", "fault"),
    [
        (["n", 1, 8, 8], "vector", "FLOAT", "must take one float input"),
        (["n", 3, 8, 8], "map", "UINT8", "must take one float input"),
        (["n", 3, 8, 6], "vector", "FLOAT", "must take square images"),
        (["n", 3, 8, 8], "scalar", "FLOAT", "gives float32 [] for 1 images"),
    ],
)
def test_onnx_model_with_unsupported_inputs_or_outputs_is_rejected(
    tmp_path: Path, shape: list[int | str], output: str, kind: str, fault: str
) -> None:
    path = save_model(tmp_path / "model.onnx", shape, output, input_type=kind)
    with pytest.raises(InvalidInput) as caught:
        load(path).encode(draw_images(1, 8, 8))
    assert fault in str(caught.value)
    assert str(path) in str(caught.value)


def test_broken_or_missing_onnx_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    with pytest.raises(InvalidInput, match="No such file"):
        find_encoder(f"onnx:{path}", None, tmp_path)
    path.write_bytes(b"no model")
    encoder = load(path)
    with pytest.raises(InvalidInput, match="must be one whole ONNX file"):
        encoder.encode(draw_images(1, 8, 8))


@pytest.mark.skipif(find_real_model() is None, reason="no weights folder with a real ONNX model")
def test_real_onnx_model_encodes_images() -> None:
    path = find_real_model()
    assert path is not None
    encoder = load(path)
    assert encoder.feature_size == 1280
    assert encoder.preprocessing.image_shape == (64, 64, 3)
    images = draw_images(3, 40, 40, 3)
    features = encoder.encode(images)
    assert numpy.array_equal(features, encoder.encode(images))
    assert numpy.abs(features[0] - features[1]).max() > 1e-3
