"""A head joined to an encoder that is an ONNX model itself."""

from importlib import import_module
from typing import Any

from mpfedcl.encoders.onnx_encoder import OnnxEncoder, first_line
from mpfedcl.errors import InvalidInput

_PREFIX = "encoder/"


def prepend_encoder(head: Any, encoder: OnnxEncoder, name: str) -> Any:
    """Return one graph from images [B, h, w, 3] as bytes through the encoder to the head's outputs.

    `name` is the image input; the head's own input is `features`.
    """
    onnx = import_module("onnx")
    compose, checker = import_module("onnx.compose"), import_module("onnx.checker")
    converter = import_module("onnx.version_converter")
    opset = _opset(head)
    try:
        model = onnx.load_model_from_string(encoder.content)
        if _opset(model) != opset:
            model = converter.convert_version(model, opset)
        model = compose.add_prefix(model, _PREFIX)
        model.ir_version = head.ir_version
        # The input that is no weight: old files list those among the inputs too.
        weights = {each.name for each in model.graph.initializer}
        (source,) = [each for each in model.graph.input if each.name not in weights]
        target = model.graph.output[0].name
        front = _make_preprocessing(onnx, encoder, name, source, head)
        back = _make_pooling(onnx, model.graph.output[0], head)
        joined = compose.merge_models(front, model, io_map=[("standard", source.name)])
        joined = compose.merge_models(joined, back, io_map=[(target, "found")])
        joined = compose.merge_models(joined, head, io_map=[("means", "features")])
        kept = {each.name for each in head.graph.output}
        for each in [each for each in joined.graph.output if each.name not in kept]:
            joined.graph.output.remove(each)
        # Merging lists one set of operators several times over, which other tools stumble on.
        versions = {each.domain: each.version for each in joined.opset_import}
        del joined.opset_import[:]
        joined.opset_import.extend(onnx.helper.make_opsetid(*each) for each in versions.items())
        checker.check_model(joined)
    except InvalidInput:
        raise
    # The converter and the checker raise anything for a graph that they do not know.
    except Exception as error:
        raise InvalidInput(
            f"encoder is 'include', but {encoder.name} cannot be joined to the model "
            f"({first_line(error)}); it must be 'exclude'."
        ) from None
    return joined


def _make_preprocessing(onnx: Any, encoder: OnnxEncoder, name: str, source: Any, head: Any) -> Any:
    """Bytes to the numbers that the encoder expects, (x / 255 - mean) / std."""
    helper, kinds = onnx.helper, onnx.TensorProto
    preprocessing = encoder.preprocessing
    size = preprocessing.image_size
    nodes = [
        helper.make_node("Transpose", [name], ["front/planes"], perm=[0, 3, 1, 2]),
        helper.make_node("Cast", ["front/planes"], ["front/float"], to=kinds.FLOAT),
        helper.make_node("Div", ["front/float", "front/255"], ["front/unit"]),
        helper.make_node("Sub", ["front/unit", "front/mean"], ["front/centred"]),
        helper.make_node("Div", ["front/centred", "front/std"], ["front/scaled"]),
        helper.make_node(
            "Cast", ["front/scaled"], ["standard"], to=source.type.tensor_type.elem_type
        ),
    ]
    constants = [
        helper.make_tensor("front/255", kinds.FLOAT, [], [255.0]),
        helper.make_tensor("front/mean", kinds.FLOAT, [1, 3, 1, 1], preprocessing.mean),
        helper.make_tensor("front/std", kinds.FLOAT, [1, 3, 1, 1], preprocessing.std),
    ]
    images = helper.make_tensor_value_info(name, kinds.UINT8, ["batch", size, size, 3])
    standard = helper.make_tensor_value_info(
        "standard", source.type.tensor_type.elem_type, ["batch", 3, size, size]
    )
    return _wrap(onnx, nodes, images, standard, constants, head)


def _make_pooling(onnx: Any, output: Any, head: Any) -> Any:
    """What the encoder gives, averaged over positions as `OnnxEncoder` does."""
    helper, kinds = onnx.helper, onnx.TensorProto
    rank = len(output.type.tensor_type.shape.dim)
    # [batch, tokens, features], or [batch, features, height, width].
    axes = [1] if rank == 3 else list(range(2, rank))
    nodes = [helper.make_node("Cast", ["found"], ["back/float"], to=kinds.FLOAT)]
    constants = []
    if axes:
        constants = [helper.make_tensor("back/axes", kinds.INT64, [len(axes)], axes)]
        nodes.append(
            helper.make_node("ReduceMean", ["back/float", "back/axes"], ["means"], keepdims=0)
        )
    else:
        nodes.append(helper.make_node("Identity", ["back/float"], ["means"]))
    found = helper.make_tensor_value_info("found", output.type.tensor_type.elem_type, [None] * rank)
    means = helper.make_tensor_value_info("means", kinds.FLOAT, ["batch", None])
    return _wrap(onnx, nodes, found, means, constants, head)


def _wrap(onnx: Any, nodes: Any, source: Any, target: Any, constants: Any, head: Any) -> Any:
    graph = onnx.helper.make_graph(nodes, "part", [source], [target], constants)
    imports = [onnx.helper.make_opsetid("", _opset(head))]
    return onnx.helper.make_model(graph, opset_imports=imports, ir_version=head.ir_version)


def _opset(model: Any) -> int:
    versions = [int(each.version) for each in model.opset_import if each.domain in ("", "ai.onnx")]
    return versions[0] if versions else 0
