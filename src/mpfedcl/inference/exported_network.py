"""The exported network, traced by PyTorch, and its ONNX graph with weights and prototypes."""

import contextlib
import io
import json
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import embedding

from mpfedcl.core.errors import InvalidInput, explain
from mpfedcl.core.tensors import Tensors
from mpfedcl.data.loading import pixel_constants
from mpfedcl.data.samples import Samples
from mpfedcl.inference.trained_run import TrainedRun
from mpfedcl.methods import prototype_rule
from mpfedcl.models.encoders.encoder import NOTE, channels_first
from mpfedcl.models.encoders.onnx_encoder import OnnxEncoder, open_session
from mpfedcl.models.encoders.random_filters import RandomFilters, apply_filters
from mpfedcl.models.encoders.torch_encoders import ResNetEncoder
from mpfedcl.models.factory import make_model
from mpfedcl.models.resnet import ResNet18
from mpfedcl.prototypes import PrototypePool

_LARGEST = 2**31 - 1
"""The largest protobuf message in bytes, and so the largest single ONNX file."""
_SAMPLES_AT_ONCE = 20
_PREFIX = "encoder/"
_ENCODER = "encoder."
_TYPES = {1: "float", 10: "float16"}
"""The types of an encoder's input, by their number in ONNX."""


ExportRule = Literal["prototype", "classifier"]
ExportedFunction = Callable[[NDArray[Any]], list[NDArray[Any]]]
"""Runs the exported network: a batch to label, distance (by prototype) and scores."""


class ExportedNetwork(nn.Module):
    """Maps images as bytes [B, h, w] or [B, h, w, 3], or features [B, n], to label and scores.

    By prototype: label [B], distance [B] and scores [B, C], the negative distance to the nearest
    prototype of each class. By classifier: label and softmax. All in float32.
    """

    def __init__(
        self,
        trained: TrainedRun,
        params: Tensors,
        rule: ExportRule,
        *,
        from_features: bool,
        sharpness: float,
    ) -> None:
        super().__init__()
        self._sharpness = sharpness
        weights, self._prepare = _choose_preprocessing(trained, params, from_features)
        self._head = trained.model
        if trained.experiment.encoder.train:
            # The encoder is part of the preprocessing here.
            size, classes = trained.input_size, len(trained.class_names)
            self._head = make_model(trained.encoder, size, classes, trained.experiment.model)
        head = {n: v for n, v in params.items() if not n.startswith(_ENCODER)}
        self._weights = self._register("weights", weights)
        self._params = self._register("params", head)
        self._project = prototype_rule(trained.method).project
        self._prototypes = None
        if rule == "prototype":
            assert trained.reference is not None
            self._prototypes = PrototypeDistances(trained.reference)

    def _register(self, group: str, tensors: Tensors) -> dict[str, str]:
        """Keep tensors as float32 buffers, whose names must not have dots; return these names."""
        names = {name: f"{group}_{name.replace('.', '_')}" for name in tensors}
        for name, value in tensors.items():
            self.register_buffer(names[name], value.detach().float().clone())
        return names

    def _tensors(self, names: dict[str, str]) -> Tensors:
        return {name: self.get_buffer(own) for name, own in names.items()}

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return label, distance and scores, or label and scores."""
        inputs = self._prepare(self._tensors(self._weights), images)
        embeddings, logits = self._head.apply(self._tensors(self._params), inputs)
        if self._prototypes is None:
            scores = torch.softmax(self._sharpness * logits, dim=1)
            return scores.argmax(dim=1), scores
        distances = self._prototypes(self._project(embeddings))
        return distances.argmin(dim=1), distances.amin(dim=1), -distances


class PrototypeDistances(nn.Module):
    """Distances to the nearest prototype of each class: found by a product, measured exactly."""

    def __init__(self, pool: PrototypePool) -> None:
        super().__init__()
        vectors = pool.vectors.detach().float()
        counts = torch.bincount(pool.labels, minlength=pool.num_classes)
        # [C, P] rows of each class, repeated up to P; an absent class is infinitely far.
        places = torch.zeros(pool.num_classes, int(counts.max()), dtype=torch.int64)
        for label in set(pool.labels.tolist()):
            rows = (pool.labels == label).nonzero().squeeze(1)
            places[label] = rows[torch.arange(places.shape[1]) % len(rows)]
        self.register_buffer("vectors", vectors)
        self.register_buffer("half_squares", vectors.square().sum(1) / 2)
        self.register_buffer("places", places)
        self.register_buffer("first", torch.arange(len(places)) * places.shape[1])
        self.register_buffer("absent", torch.zeros(len(counts)).masked_fill(counts == 0, torch.inf))

    def forward(self, z: Tensor) -> Tensor:
        """Return the distance to the nearest prototype of each class [B, C]."""
        vectors, places = self.get_buffer("vectors"), self.get_buffer("places")
        costs = self.get_buffer("half_squares") - z @ vectors.T
        by_class = costs.index_select(1, places.flatten()).view(-1, *places.shape)
        nearest = by_class.argmin(dim=2) + self.get_buffer("first")
        rows = embedding(nearest, places.view(-1, 1)).squeeze(2)
        # By differences, because a product would lose half the digits of a small distance.
        distances = (z.unsqueeze(1) - embedding(rows, vectors)).square().sum(dim=2).sqrt()
        return distances + self.get_buffer("absent")


Prepare = Callable[[Tensors, Tensor], Tensor]


def _choose_preprocessing(
    trained: TrainedRun, params: Tensors, from_features: bool
) -> tuple[Tensors, Prepare]:
    """Return the weights before the head, and the function from images to the head's inputs."""
    if from_features:
        return {}, lambda _, features: features
    encoder = trained.encoder
    if encoder is None:
        mean, deviation = pixel_constants(trained.experiment)
        return {}, lambda _, images: (images.float().flatten(1) / 255 - mean) / deviation
    if isinstance(encoder, OnnxEncoder):
        # Its graph is joined to this one, which takes its output.
        return {}, lambda _, found: encoder.reduce(found.float())
    # Other encoders are rejected.
    assert isinstance(encoder, ResNetEncoder | RandomFilters)
    preprocessing, network = encoder.preprocessing, ResNet18()
    apply = apply_filters if isinstance(encoder, RandomFilters) else network.apply_folded

    def prepare(weights: Tensors, images: Tensor) -> Tensor:
        return apply(weights, preprocessing.standardize(channels_first(images), torch.float32))

    if isinstance(encoder, RandomFilters):
        return encoder.tensors, prepare
    own = {n.removeprefix(_ENCODER): v for n, v in params.items() if n.startswith(_ENCODER)}
    # The weights of a trained encoder are part of the model; batch statistics never are.
    return network.fold({**encoder.tensors, **own}), prepare


# The ONNX graph


def trace(network: torch.nn.Module, example: torch.Tensor) -> torch.export.ExportedProgram:
    """Return the network as a program for batches of any size."""
    batch = torch.export.Dim("batch", min=1)
    with _exporting("it cannot be traced"):
        return torch.export.export(
            network.eval(), (example,), dynamic_shapes={"images": {0: batch}}
        )


def make_graph(program: torch.export.ExportedProgram, name: str, outputs: list[str]) -> Any:
    """Return the program as an ONNX model (a ModelProto)."""
    with _exporting("it cannot be written as ONNX"):
        exported = torch.onnx.export(
            program, dynamo=True, input_names=[name], output_names=outputs, verbose=False
        )
    assert exported is not None
    return _strip(exported.model_proto)


def prepend_encoder(head: Any, encoder: OnnxEncoder, name: str) -> Any:
    """Return one graph from images [B, h, w, 3] as bytes through the encoder to the head's outputs.

    `name` is the image input; the head's own input is `features`, the encoder's output.
    """
    onnx = import_module("onnx")
    compose, checker, converter = (
        import_module(f"onnx.{each}") for each in ("compose", "checker", "version_converter")
    )
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
        kind = source.type.tensor_type.elem_type
        front = _make_preprocessing(onnx, encoder, name, kind, head)
        # The encoder's other outputs are dropped.
        target = _PREFIX + encoder.output
        joined = compose.merge_models(
            front, model, io_map=[("standard", source.name)], outputs=[target]
        )
        joined = compose.merge_models(joined, head, io_map=[(target, "features")])
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


def _make_preprocessing(onnx: Any, encoder: OnnxEncoder, name: str, kind: int, head: Any) -> Any:
    """Return the graph from bytes to the encoder's input of this type, (x / 255 - mean) / std."""
    size = encoder.preprocessing.image_size
    mean, std = (
        ", ".join(f"{each:.9g}" for each in values)
        for values in (encoder.preprocessing.mean, encoder.preprocessing.std)
    )
    return onnx.parser.parse_model(f"""
        <ir_version: {head.ir_version}, opset_import: ["" : {_opset(head)}]>
        front (uint8[batch, {size}, {size}, 3] {name})
            => ({_TYPES[kind]}[batch, 3, {size}, {size}] standard)
            <float front_255 = {{255.0}}, float[1, 3, 1, 1] front_mean = {{{mean}}},
             float[1, 3, 1, 1] front_std = {{{std}}}>
        {{
            front_planes = Transpose <perm = [0, 3, 1, 2]> ({name})
            front_float = Cast <to = 1> (front_planes)
            front_unit = Div (front_float, front_255)
            front_centered = Sub (front_unit, front_mean)
            front_scaled = Div (front_centered, front_std)
            standard = Cast <to = {kind}> (front_scaled)
        }}
    """)


def _opset(model: Any) -> int:
    versions = [int(each.version) for each in model.opset_import if each.domain in ("", "ai.onnx")]
    return versions[0] if versions else 0


def quantize(model: Any, name: str, training: Samples) -> Any:
    """Return the model with weights of 8 bits, the prototypes in full precision.

    Activations of convolutions have 8 bits too, with ranges taken from training samples; those of
    fully connected layers get their ranges in each batch.
    """
    onnx = import_module("onnx")
    tools = import_module("onnxruntime.quantization")
    kinds = [node.op_type for node in model.graph.node]
    with (
        _exporting("it cannot be quantized, and quantize must be left out"),
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
            parts = range(0, len(training), _SAMPLES_AT_ONCE)
            batches = iter([{name: training[n : n + _SAMPLES_AT_ONCE]} for n in parts])
            tools.quantize_static(
                before,
                after,
                SimpleNamespace(get_next=lambda: next(batches, None)),
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


def pack_program(program: torch.export.ExportedProgram, note: dict[str, Any]) -> bytes:
    """Return the file's bytes, with the metadata in it."""
    # Example inputs would be pickled.
    program.example_inputs = None
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={NOTE: json.dumps(note, allow_nan=False)})
    return buffer.getvalue()


def open_graph(model: Any, name: str) -> ExportedFunction:
    """Return a function that runs the model on one thread."""
    session = open_session(import_module("onnxruntime"), model.SerializeToString())

    def answer(images: NDArray[Any]) -> list[NDArray[Any]]:
        found: list[NDArray[Any]] = session.run(None, {name: images})
        return found

    return answer


def open_program(program: torch.export.ExportedProgram) -> ExportedFunction:
    """Return a function that runs a traced program."""
    module = program.module()

    @torch.no_grad()
    def answer(images: NDArray[Any]) -> list[NDArray[Any]]:
        return [each.numpy() for each in module(torch.from_numpy(images))]

    return answer


def require_packages() -> None:
    """Raise `InvalidInput` if a package for ONNX is not installed."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        try:
            import_module(package)
        except ImportError:
            raise InvalidInput(
                f"format is 'onnx', but {package} is not installed; "
                "`pip install 'mpfedcl[onnx]'` brings it."
            ) from None


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
def _exporting(fault: str) -> Iterator[None]:
    """Silence the messages of torch and onnx, and turn any of their errors into one sentence."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        reason = f"{type(error).__name__}: {explain(error)}"
        raise InvalidInput(
            f"RUN has a model that cannot be exported: {fault} ({reason})."
        ) from None
    finally:
        logging.disable(before)
