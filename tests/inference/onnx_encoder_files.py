"""A small ONNX encoder for tests."""

from pathlib import Path

import numpy
import onnx
from onnx import TensorProto, helper, numpy_helper


def save_convolution(path: Path, output: str) -> Path:
    """Write RGB [batch, 3, 32, 32] to 8 maps, or to their means, in an opset older than exports."""
    weight = numpy.random.default_rng(5).normal(size=(8, 3, 5, 5)).astype(numpy.float32)
    nodes = [helper.make_node("Conv", ["image", "weight"], ["maps"], strides=[4, 4])]
    shape: list[str | int | None] = ["batch", 8, 7, 7]
    if output == "vector":
        nodes.append(helper.make_node("GlobalAveragePool", ["maps"], ["mean"]))
        nodes.append(helper.make_node("Flatten", ["mean"], ["features"]))
        shape = ["batch", 8]
    graph = helper.make_graph(
        nodes,
        "encoder",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, 32, 32])],
        [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(weight, "weight")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, path)
    return path
