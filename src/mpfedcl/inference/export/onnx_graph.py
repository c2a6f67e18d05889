"""The exported network as one ONNX graph that contains the weights and the prototypes."""

import contextlib
import json
import logging
import tempfile
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from mpfedcl.core.errors import InvalidInput, explain
from mpfedcl.data.samples import Samples
from mpfedcl.inference.export.verification import ExportedFunction
from mpfedcl.models.encoders.encoder import NOTE
from mpfedcl.models.encoders.onnx_encoder import OnnxEncoder, open_session

_LARGEST = 2**31 - 1
"""The largest protobuf message in bytes, and so the largest single ONNX file."""
_SAMPLES_AT_ONCE = 20
_PREFIX = "encoder/"


def trace(network: torch.nn.Module, example: torch.Tensor) -> torch.export.ExportedProgram:
    """Return the network as a program for batches of any size."""
    batch = torch.export.Dim("batch", min=1)
    with _quietly(), _in_one_sentence("it cannot be traced"):
        return torch.export.export(
            network.eval(), (example,), dynamic_shapes={"images": {0: batch}}
        )


def make_graph(program: torch.export.ExportedProgram, name: str, outputs: list[str]) -> Any:
    """Return the program as an ONNX model (a ModelProto)."""
    require_packages("onnx", "onnxscript")
    with _quietly(), _in_one_sentence("it cannot be written as ONNX"):
        exported = torch.onnx.export(
            program,
            dynamo=True,
            input_names=[name],
            output_names=outputs,
            verbose=False,
        )
    assert exported is not None
    return _strip(exported.model_proto)


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
        # The input that is not a weight: some files list weights as inputs too.
        weights = {each.name for each in model.graph.initializer}
        (source,) = [each for each in model.graph.input if each.name not in weights]
        (target,) = [each for each in model.graph.output if each.name == _PREFIX + encoder.output]
        front = _make_preprocessing(onnx, encoder, name, source, head)
        back = _make_pooling(onnx, encoder, target, head)
        joined = compose.merge_models(front, model, io_map=[("standard", source.name)])
        # The encoder's other outputs are dropped.
        joined = compose.merge_models(
            joined, back, io_map=[(target.name, "found")], outputs=["means"]
        )
        joined = compose.merge_models(joined, head, io_map=[("means", "features")])
        # Merging repeats operator sets, which other tools reject.
        versions = {each.domain: each.version for each in joined.opset_import}
        del joined.opset_import[:]
        joined.opset_import.extend(onnx.helper.make_opsetid(*each) for each in versions.items())
        checker.check_model(joined)
    except InvalidInput:
        raise
    # The converter and the checker raise many kinds of errors.
    except Exception as error:
        raise InvalidInput(
            f"encoder is 'include', but {encoder.name} cannot be joined to the model "
            f"({explain(error)}); it must be 'exclude'."
        ) from None
    return joined


def _make_preprocessing(onnx: Any, encoder: OnnxEncoder, name: str, source: Any, head: Any) -> Any:
    """Return the graph from bytes to the encoder's input, (x / 255 - mean) / std."""
    helper, kinds = onnx.helper, onnx.TensorProto
    preprocessing = encoder.preprocessing
    size = preprocessing.image_size
    nodes = [
        helper.make_node("Transpose", [name], ["front/planes"], perm=[0, 3, 1, 2]),
        helper.make_node("Cast", ["front/planes"], ["front/float"], to=kinds.FLOAT),
        helper.make_node("Div", ["front/float", "front/255"], ["front/unit"]),
        helper.make_node("Sub", ["front/unit", "front/mean"], ["front/centered"]),
        helper.make_node("Div", ["front/centered", "front/std"], ["front/scaled"]),
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


def _make_pooling(onnx: Any, encoder: OnnxEncoder, output: Any, head: Any) -> Any:
    """Return the graph from the encoder's output to one vector, as in `OnnxEncoder`."""
    helper, kinds = onnx.helper, onnx.TensorProto
    rank = encoder.output_rank
    # [batch, tokens, features], or [batch, features, height, width].
    axes = list(range(2, rank)) if encoder.tokens is None else [1]
    nodes = [helper.make_node("Cast", ["found"], ["back/float"], to=kinds.FLOAT)]
    constants, chosen = [], "back/float"
    if encoder.tokens in ("class", "patches"):
        chosen = "back/chosen"
        first, end = (0, 1) if encoder.tokens == "class" else (1, _LARGEST)
        bounds = {"back/first": first, "back/end": end, "back/axis": 1}
        constants = [helper.make_tensor(name, kinds.INT64, [1], [n]) for name, n in bounds.items()]
        nodes.append(helper.make_node("Slice", ["back/float", *bounds], [chosen]))
    if axes:
        constants.append(helper.make_tensor("back/axes", kinds.INT64, [len(axes)], axes))
        nodes.append(helper.make_node("ReduceMean", [chosen, "back/axes"], ["means"], keepdims=0))
    else:
        nodes.append(helper.make_node("Identity", [chosen], ["means"]))
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


def quantize(model: Any, name: str, training: Samples) -> Any:
    """Return the model with weights of 8 bits, the prototypes in full precision.

    Activations of convolutions have 8 bits too, with ranges taken from training samples; those of
    fully connected layers get their ranges in each batch.
    """
    require_packages("onnxruntime")
    onnx = import_module("onnx")
    tools = import_module("onnxruntime.quantization")
    kinds = [node.op_type for node in model.graph.node]
    with (
        _quietly(),
        _in_one_sentence("it cannot be quantized, and quantize must be left out"),
        tempfile.TemporaryDirectory() as folder,
    ):
        before, after = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
        before.write_bytes(model.SerializeToString())
        # 7-bit weights, because processors without VNNI saturate sums of 8-bit products.
        common = {"per_channel": True, "reduce_range": True, "weight_type": tools.QuantType.QInt8}
        if "Conv" in kinds:
            # Up to the head's last layer; prototypes come after it.
            last = len(kinds) - kinds[::-1].index("Gemm")
            chosen = [
                node.name
                for node in model.graph.node[:last]
                if node.op_type in ("Conv", "MaxPool", "Add", "Gemm")
            ]
            tools.quantize_static(
                before,
                after,
                _CalibrationBatches(name, training),
                quant_format=tools.QuantFormat.QDQ,
                activation_type=tools.QuantType.QUInt8,
                nodes_to_quantize=chosen,
                **common,
            )
        else:
            # A layer (Gemm) becomes a MatMul; the MatMul with the prototypes is excluded.
            own = [node.name for node in model.graph.node if node.op_type == "MatMul"]
            kinds = ["Gemm", "MatMul"]
            tools.quantize_dynamic(
                before, after, op_types_to_quantize=kinds, nodes_to_exclude=own, **common
            )
        return _strip(onnx.load(after))


def pack_graph(model: Any, note: dict[str, Any]) -> bytes:
    """Return the file's bytes, with the metadata in it."""
    del model.metadata_props[:]
    entry = model.metadata_props.add()
    entry.key, entry.value = NOTE, json.dumps(note, allow_nan=False)
    if model.ByteSize() > _LARGEST:
        raise InvalidInput(
            f"RUN gives an ONNX file of {model.ByteSize():,} bytes; it must have at most "
            f"{_LARGEST:,}."
        )
    content: bytes = model.SerializeToString(deterministic=True)
    return content


def open_graph(model: Any, name: str) -> ExportedFunction:
    """Return a function that runs the model on one thread."""
    require_packages("onnxruntime")
    session = open_session(import_module("onnxruntime"), model.SerializeToString())

    def answer(images: NDArray[Any]) -> list[NDArray[Any]]:
        found: list[NDArray[Any]] = session.run(None, {name: images})
        return found

    return answer


def require_packages(*packages: str) -> None:
    """Refuse the export if a package is not installed."""
    for package in packages:
        try:
            import_module(package)
        except ImportError:
            raise InvalidInput(
                f"format is 'onnx', but {package} is not installed; "
                "`pip install 'mpfedcl[onnx]'` brings it."
            ) from None


class _CalibrationBatches:
    """Batches of training samples for the quantizer."""

    def __init__(self, name: str, samples: Samples) -> None:
        parts = range(0, len(samples), _SAMPLES_AT_ONCE)
        self._batches = iter([{name: samples[n : n + _SAMPLES_AT_ONCE]} for n in parts])

    def get_next(self) -> dict[str, Samples] | None:
        return next(self._batches, None)


def _strip(model: Any) -> Any:
    """Remove inner shapes and stack traces from a graph."""
    graph = model.graph
    del graph.value_info[:]
    for part in (model, graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
        del part.metadata_props[:]
        part.doc_string = ""
    for each in (*graph.input, *graph.output):
        each.type.tensor_type.shape.dim[0].dim_param = "batch"
    # Their order varies between exports, and equal models must give equal files.
    graph.initializer.sort(key=lambda each: each.name)
    graph.name = model.producer_name = "mpfedcl"
    model.producer_version = ""
    return model


@contextlib.contextmanager
def _in_one_sentence(fault: str) -> Iterator[None]:
    """Turn any error of torch and onnx into one sentence."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {explain(error)}"
        raise InvalidInput(
            f"RUN has a model that cannot be exported: {fault} ({reason})."
        ) from None


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Silence the log messages and warnings of the exporters."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
