"""The exported network, traced by PyTorch, and its ONNX graph with weights and prototypes."""

import contextlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn.functional import embedding

from mpfedcl.core.errors import InvalidInput, explain
from mpfedcl.core.tensors import Tensors
from mpfedcl.data.loading import pixel_constants
from mpfedcl.data.samples import ArrayFormat
from mpfedcl.inference.trained_run import TrainedRun
from mpfedcl.methods import prototype_rule
from mpfedcl.models import make_mlp
from mpfedcl.models.encoders.encoder import TorchEncoder, channels_first
from mpfedcl.models.encoders.onnx_encoder import open_session
from mpfedcl.prototypes import PrototypePool

NOTE = "mpfedcl"
"""The metadata key that holds everything as JSON: one key, so that equal files have equal bytes."""
_ENCODER = "encoder."

ExportRule = Literal["prototype", "classifier"]
ExportedFunction = Callable[[NDArray[Any]], list[NDArray[Any]]]
"""Runs the exported network: a batch to label, distance (by prototype) and scores."""


class ExportedNetwork(nn.Module):
    """Maps images as bytes [B, h, w] or [B, h, w, 3], or features [B, ...], to label and scores.

    By prototype: label [B], distance [B] and scores [B, C], the negative distance to the nearest
    prototype of each class. By classifier: label and softmax. All in float32.

    Runs on arrays take features in the shape of the arrays, such as [B, channels, length] of
    series, and runs whose encoder is no network in torch take the encoder's features [B, n].
    """

    def __init__(
        self, trained: TrainedRun, params: Tensors, rule: ExportRule, *, sharpness: float
    ) -> None:
        super().__init__()
        self.params, self.rule, self.sharpness = params, rule, sharpness
        is_encoded = trained.encoder is not None and not isinstance(trained.encoder, TorchEncoder)
        arrays = trained.input_format if isinstance(trained.input_format, ArrayFormat) else None
        self.takes_features = is_encoded or arrays is not None
        self.dtype = torch.float32 if self.takes_features else torch.uint8
        if arrays is not None and arrays.holds_tokens:
            self.dtype = torch.int64
        shape = (trained.input_size,) if is_encoded else trained.input_format.shape
        self.example = torch.zeros(2, *shape, dtype=self.dtype)
        weights, self._prepare = _choose_preprocessing(trained, params)
        self._head = trained.model
        if trained.experiment.encoder.train:
            # The encoder is part of the preprocessing here.
            size, classes = trained.input_size, len(trained.class_names)
            self._head = make_mlp(size, classes, trained.experiment.model.hidden, is_encoded=True)
        head = {n: v for n, v in params.items() if not n.startswith(_ENCODER)}
        self._weights = self._register("weights", weights)
        self._head_params = self._register("params", head)
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
        embeddings, logits = self._head.apply(self._tensors(self._head_params), inputs)
        if self._prototypes is None:
            scores = torch.softmax(self.sharpness * logits, dim=1)
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


def _choose_preprocessing(trained: TrainedRun, params: Tensors) -> tuple[Tensors, Prepare]:
    """Return the weights before the head, and the function from the input to the head's inputs."""
    encoder = trained.encoder
    if isinstance(encoder, TorchEncoder):
        preprocessing, apply = encoder.preprocessing, encoder.apply

        def prepare(weights: Tensors, images: Tensor) -> Tensor:
            return apply(weights, preprocessing.standardize(channels_first(images), torch.float32))

        own = {n.removeprefix(_ENCODER): v for n, v in params.items() if n.startswith(_ENCODER)}
        # The weights of a trained encoder are part of the model; batch statistics never are.
        return {**encoder.tensors, **own}, prepare
    if encoder is not None or isinstance(trained.input_format, ArrayFormat):
        # Models take flat inputs, which the user's own modules reshape.
        return {}, lambda _, features: features.flatten(1) if features.dim() > 2 else features
    mean, deviation = pixel_constants(trained.experiment)
    return {}, lambda _, images: (images.float().flatten(1) / 255 - mean) / deviation


# The ONNX graph


def trace(network: ExportedNetwork) -> ExportedProgram:
    """Return the network as a program of torch, for batches of any size."""
    batch = {"images": {0: torch.export.Dim("batch", min=1)}}
    with exporting("it cannot be traced"):
        return torch.export.export(network.eval(), (network.example,), dynamic_shapes=batch)


def make_graph(program: ExportedProgram, name: str, outputs: list[str]) -> Any:
    """Return the network as an ONNX model (a ModelProto) for batches of any size."""
    with exporting("it cannot be written as ONNX"):
        exported = torch.onnx.export(
            program, dynamo=True, input_names=[name], output_names=outputs, verbose=False
        )
        assert exported is not None
        return _strip(exported.model_proto)


def pack_graph(model: Any, note: dict[str, Any]) -> bytes:
    """Return the file's bytes, with the metadata in it."""
    del model.metadata_props[:]
    entry = model.metadata_props.add()
    entry.key, entry.value = NOTE, json.dumps(note, allow_nan=False)
    with exporting("it is too large for one ONNX file"):
        content: bytes = model.SerializeToString(deterministic=True)
    return content


def open_graph(model: Any, name: str) -> ExportedFunction:
    """Return a function that runs the model on one thread."""
    session = open_session(import_module("onnxruntime"), model.SerializeToString())

    def answer(images: NDArray[Any]) -> list[NDArray[Any]]:
        found: list[NDArray[Any]] = session.run(None, {name: images})
        return found

    return answer


def require_packages() -> None:
    """Raise `InvalidInput` if a package for ONNX is not installed."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        try:
            import_module(package)
        except ImportError:
            raise InvalidInput(
                f"the export needs {package}, which is not installed; "
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
def exporting(fault: str) -> Iterator[None]:
    """Silence the messages of torch and onnx, and turn any of their errors into one sentence."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
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
