"""The network as one ONNX graph, whole: weights and prototypes inside, nothing of this machine."""

import contextlib
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from mpfedcl.data.sample_format import Samples
from mpfedcl.deployment.export.exported_network import ExportedNetwork
from mpfedcl.deployment.export.verification import ExportedFunction
from mpfedcl.encoders.preprocessing import NOTE
from mpfedcl.errors import InvalidInput

_LARGEST = 2**31 - 1
"""Bytes of a protobuf message: no ONNX file without files beside it can be larger."""
_SAMPLES_AT_ONCE = 20


def trace(network: ExportedNetwork, example: torch.Tensor) -> torch.export.ExportedProgram:
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


def quantize(model: Any, name: str, training: Samples) -> Any:
    """Return the model with weights of 8 bits, the prototypes in full precision.

    Convolutions have their activations in 8 bits too, with ranges taken from training samples;
    fully connected layers find theirs anew for each batch.
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
        # Seven bits of a weight: processors without VNNI add products of eight with saturation.
        common = {"per_channel": True, "reduce_range": True, "weight_type": tools.QuantType.QInt8}
        if "Conv" in kinds:
            # Up to the head's last layer: prototypes come after it.
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
            # A layer (Gemm) becomes a MatMul on the way; the one with the prototypes is left.
            own = [node.name for node in model.graph.node if node.op_type == "MatMul"]
            kinds = ["Gemm", "MatMul"]
            tools.quantize_dynamic(
                before, after, op_types_to_quantize=kinds, nodes_to_exclude=own, **common
            )
        return _strip(onnx.load(after))


def pack_graph(model: Any, note: dict[str, Any]) -> bytes:
    """Return the file's bytes, with what a program must know of it in the metadata."""
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
    """Return a function that runs the model, on one thread."""
    require_packages("onnxruntime")
    runtime = import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = max(1, int(os.environ.get("OMP_NUM_THREADS") or 1))
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = runtime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )

    def answer(images: NDArray[Any]) -> list[NDArray[Any]]:
        found: list[NDArray[Any]] = session.run(None, {name: images})
        return found

    return answer


def require_packages(*packages: str) -> None:
    """Refuse in one sentence where a package is not installed."""
    for package in packages:
        try:
            import_module(package)
        except ImportError:
            raise InvalidInput(
                f"format is 'onnx', but {package} is not installed; "
                "`pip install 'mpfedcl[onnx]'` brings it."
            ) from None


class _CalibrationBatches:
    """Training samples, batch by batch, as the quantizer asks for them."""

    def __init__(self, name: str, samples: Samples) -> None:
        parts = range(0, len(samples), _SAMPLES_AT_ONCE)
        self._batches = iter([{name: samples[n : n + _SAMPLES_AT_ONCE]} for n in parts])

    def get_next(self) -> dict[str, Samples] | None:
        return next(self._batches, None)


def _strip(model: Any) -> Any:
    """Take out what only says how the graph came about: shapes in between, traces of the stack."""
    graph = model.graph
    del graph.value_info[:]
    for part in (model, graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
        del part.metadata_props[:]
        part.doc_string = ""
    for each in (*graph.input, *graph.output):
        each.type.tensor_type.shape.dim[0].dim_param = "batch"
    # Their order changes from export to export, and equal models must give equal files.
    graph.initializer.sort(key=lambda each: each.name)
    graph.name = model.producer_name = "mpfedcl"
    model.producer_version = ""
    return model


@contextlib.contextmanager
def _in_one_sentence(fault: str) -> Iterator[None]:
    """Turn whatever torch and onnx raise for a network that they cannot do into one sentence."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise InvalidInput(
            f"RUN has a model that cannot be exported: {fault} ({type(error).__name__}: {reason})."
        ) from None


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep the exporters' remarks on their own workings from the user."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
