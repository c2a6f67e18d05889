"""Export of a run's model as one file: traced, checked on real samples, and only then written."""

import io
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import FORMAT, write_atomically
from mpfedcl.core.tensors import Tensors, pack_tensors
from mpfedcl.data.loading import pixel_constants
from mpfedcl.data.samples import VectorFormat
from mpfedcl.inference.export import onnx_graph
from mpfedcl.inference.export.verification import (
    ExportedFunction,
    ExportRule,
    check_against_pytorch,
    load_check_samples,
)
from mpfedcl.inference.predictor import Predictor
from mpfedcl.inference.trained_run import TrainedRun
from mpfedcl.methods import ClosedForm, prototype_rule
from mpfedcl.models import GaussianClassifier
from mpfedcl.models.encoders.encoder import NOTE, channels_first
from mpfedcl.models.encoders.onnx_encoder import OnnxEncoder
from mpfedcl.models.encoders.random_filters import RandomFilters, apply_filters
from mpfedcl.models.encoders.torch_encoders import ResNetEncoder, make_model
from mpfedcl.models.resnet import ResNet18
from mpfedcl.prototypes import PrototypePool

Format = Literal["onnx", "safetensors", "torch-export"]
SUFFIXES: dict[Format, str] = {
    "onnx": ".onnx",
    "safetensors": ".safetensors",
    "torch-export": ".pt2",
}
_IN_TORCH = ResNetEncoder | RandomFilters
"""Encoders that are traced with the model, and whose tensors can be exported."""
_PREFIX = "encoder."
_RESIZE = "Lanczos if the image has more pixels than this, bicubic if it has fewer"
_TABLE = (
    "by the caller, column after column: numeric (value - mean) / deviation, 0 if it is missing "
    "or the deviation is 0; text a 1 for its category and 0 for the others"
)


@dataclass(frozen=True)
class ExportSettings:
    """The options of an export; `rule` None is that of the run's primary predictor."""

    format: Format = "onnx"
    rule: ExportRule | None = None
    with_encoder: bool = True
    quantized: bool = False
    check_images: int = 1000
    held_out: Path | None = None
    """Labeled samples for the check, and for the ranges of int8."""


@dataclass(frozen=True)
class ExportedFile:
    """An exported file and its metadata."""

    path: Path
    num_bytes: int
    note: dict[str, Any]


def export_run(
    predictor: Predictor,
    wanted: ExportSettings,
    out: Path | None = None,
    folder: Path | None = None,
) -> ExportedFile:
    """Write a run's model as one file [default: into `exported` in `folder`, the run's]."""
    trained = predictor.trained
    rule = _choose_rule(predictor, wanted)
    _refuse_unsupported(trained, wanted)
    note = _describe(predictor, wanted, rule)
    params, prior = predictor.params, predictor.log_prior
    if rule == "classifier" and prior is not None and isinstance(trained.model, GaussianClassifier):
        note["prior"] = prior.exp().tolist()
        params = {**params, "bias": params["bias"] + prior.to(params["bias"]).unsqueeze(1)}
    if wanted.format == "safetensors":
        content = _pack_tensors(trained, params, wanted, rule, note)
    else:
        content = _pack_program(trained, params, wanted, rule, note)
    parts = [predictor.client or "global", rule]
    parts += [] if wanted.with_encoder else ["head"]
    parts += ["int8"] if wanted.quantized else []
    name = "-".join(parts) + SUFFIXES[wanted.format]
    path = out or (folder or trained.path) / "exported" / name
    if path.is_dir():
        raise InvalidInput(f"out is {str(path)!r}; it must be a file, and this is a folder.")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)
    return ExportedFile(path, len(content), note)


def _choose_rule(predictor: Predictor, wanted: ExportSettings) -> ExportRule:
    """Return the chosen rule, or that of the run's primary predictor."""
    reference = predictor.trained.reference
    if wanted.rule == "prototype" and (reference is None or not len(reference)):
        raise InvalidInput(
            f"predictor is 'prototype', but this run of {predictor.trained.experiment.method} has "
            "no prototypes; it must be 'classifier'."
        )
    return wanted.rule or ("prototype" if predictor.has_prototypes else "classifier")


def _refuse_unsupported(trained: TrainedRun, wanted: ExportSettings) -> None:
    if wanted.quantized and wanted.format != "onnx":
        raise InvalidInput(
            f"quantize is 'int8'; it must be left out, because format is {wanted.format!r} and "
            "only onnx has it."
        )
    if wanted.quantized and not trained.method.trains:
        raise InvalidInput(
            f"quantize is 'int8'; it must be left out, because {trained.experiment.method} has no "
            "trained layers, and its scores need all digits."
        )
    if not wanted.with_encoder and trained.encoder is None:
        raise InvalidInput("encoder is 'exclude'; it must be left out: this run has no encoder.")
    if not wanted.with_encoder and trained.experiment.encoder.train:
        raise InvalidInput(
            "encoder is 'exclude'; it must be 'include', because the run has trained the encoder."
        )
    encoder, known = trained.encoder, _IN_TORCH
    if wanted.format == "onnx":
        known |= OnnxEncoder
    if wanted.with_encoder and encoder is not None and not isinstance(encoder, known):
        raise InvalidInput(
            f"encoder is 'include', but the encoder {encoder.name} cannot be exported as "
            f"{wanted.format}; it must be 'exclude'."
        )


def _pack_program(
    trained: TrainedRun,
    params: Tensors,
    wanted: ExportSettings,
    rule: ExportRule,
    note: dict[str, Any],
) -> bytes:
    encoder, name = trained.encoder, note["input"]["name"]
    is_joined = wanted.with_encoder and isinstance(encoder, OnnxEncoder)
    takes_features = _takes_features(trained, wanted)
    from_features = is_joined or takes_features
    sharpness = note["sharpness"]
    network = ExportedNetwork(
        trained, params, rule, from_features=from_features, sharpness=sharpness
    )
    client = None if note["model"] == "global" else note["model"]
    real = load_check_samples(trained, wanted.check_images, client, wanted.held_out)
    if wanted.quantized and real.training is None:
        nouns = f"{trained.input_format.noun}s"
        where = f"dataset.name {trained.experiment.dataset.name!r} must be here, and it is not"
        if trained.partition.get("network"):
            where = f"they are with its clients, so --held-out must name a folder of such {nouns}"
        raise InvalidInput(
            "quantize is 'int8', whose ranges and accuracy are measured on the run's own "
            f"{nouns}; {where}."
        )
    example = torch.zeros(2, trained.input_size)
    if not from_features:
        example = torch.zeros(2, *trained.input_format.shape, dtype=torch.uint8)
    program = onnx_graph.trace(network, example)
    graph: Any = None
    if wanted.format == "torch-export":
        answer = _run_program(program)
    else:
        source = "features" if is_joined else name
        graph = onnx_graph.make_graph(program, source, list(note["outputs"]))
        if is_joined:
            assert isinstance(encoder, OnnxEncoder)
            graph = onnx_graph.prepend_encoder(graph, encoder, name)
        if wanted.quantized:
            assert real.training is not None
            seen = trained.inputs(real.training).numpy() if takes_features else real.training
            graph = onnx_graph.quantize(graph, name, seen)
        answer = onnx_graph.open_graph(graph, name)
    note["checked"] = check_against_pytorch(
        trained,
        params,
        rule,
        real,
        answer,
        from_features=takes_features,
        is_quantized=wanted.quantized,
        sharpness=sharpness,
    )
    return _pack_torch(program, note) if graph is None else onnx_graph.pack_graph(graph, note)


def _takes_features(trained: TrainedRun, wanted: ExportSettings) -> bool:
    """Return whether the input is features: no encoder, or a run on vectors."""
    return not wanted.with_encoder or isinstance(trained.input_format, VectorFormat)


def _run_program(program: torch.export.ExportedProgram) -> ExportedFunction:
    module = program.module()

    @torch.no_grad()
    def answer(images: Any) -> list[Any]:
        return [each.numpy() for each in module(torch.from_numpy(images))]

    return answer


def _pack_torch(program: torch.export.ExportedProgram, note: dict[str, Any]) -> bytes:
    # Example inputs would be pickled.
    program.example_inputs = None
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={NOTE: json.dumps(note, allow_nan=False)})
    return buffer.getvalue()


def _pack_tensors(
    trained: TrainedRun,
    params: Tensors,
    wanted: ExportSettings,
    rule: ExportRule,
    note: dict[str, Any],
) -> bytes:
    tensors, encoder = dict(params), trained.encoder
    if wanted.with_encoder and isinstance(encoder, _IN_TORCH):
        # Weights that the run has trained replace those of the encoder.
        tensors = {f"encoder.{n}": v for n, v in encoder.tensors.items()} | tensors
    if rule == "prototype":
        pool = trained.reference
        assert pool is not None
        tensors |= {
            "prototypes.vectors": pool.vectors,
            "prototypes.labels": pool.labels,
            "prototypes.counts": pool.counts,
        }
    return pack_tensors(tensors, note=(NOTE, json.dumps(note, allow_nan=False)))


def _describe(predictor: Predictor, wanted: ExportSettings, rule: ExportRule) -> dict[str, Any]:
    """Return the metadata that a program needs to use the file."""
    trained = predictor.trained
    # With a classifier distances are in its own metric, which is not in the file.
    limit = predictor.threshold if rule == "prototype" and predictor.has_prototypes else None
    outputs = {"label": "number of the class, from 0"}
    if rule == "prototype":
        outputs["distance"] = "to the nearest prototype"
        outputs["scores"] = "of each class: minus the distance to its nearest prototype"
    else:
        outputs["scores"] = "of each class: the softmax"
    return {
        "format": FORMAT,
        "version": version("mpfedcl"),
        "method": trained.experiment.method,
        "dataset": trained.experiment.dataset.name,
        "model": predictor.client or "global",
        "predictor": rule,
        "classes": list(trained.class_names),
        "input": _describe_input(trained, wanted),
        "outputs": outputs,
        "unknown": None if limit is None else asdict(limit),
        "prior": None,
        "sharpness": predictor.sharpness if rule == "classifier" else 1.0,
        "quantized": "int8" if wanted.quantized else None,
        "checked": None,
    }


def _describe_input(trained: TrainedRun, wanted: ExportSettings) -> dict[str, Any]:
    input_format, encoder = trained.input_format, trained.encoder
    described: dict[str, Any]
    if isinstance(input_format, VectorFormat):
        described = {
            "name": "features",
            "type": "float32",
            "shape": ["batch", *input_format.shape],
            "scaling": "none: values as they are",
        }
        if trained.columns is None:
            return described
        return {**described, "scaling": _TABLE, "columns": trained.columns.to_json()["columns"]}
    described = {
        "name": "images",
        "type": "uint8",
        "shape": ["batch", *input_format.shape],
        "height": input_format.height,
        "width": input_format.width,
        "color": "RGB" if input_format.is_color else "gray",
        "resize": _RESIZE,
        "scaling": "none: bytes 0 to 255, the rest is inside",
    }
    if encoder is not None and not wanted.with_encoder:
        size = encoder.feature_size
        described |= {"name": "features", "type": "float32", "shape": ["batch", size]}
        described |= {"encoder": encoder.name, "encoder_fingerprint": encoder.fingerprint}
        described["scaling"] = encoder.preprocessing.to_json()
    return described


# The exported network


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
        sharpness: float = 1.0,
    ) -> None:
        super().__init__()
        self._sharpness = sharpness
        weights, self._prepare = _choose_preprocessing(trained, params, from_features)
        if isinstance(trained.method, ClosedForm):
            self._head = trained.method.make_model(trained.input_size)
        else:
            self._head = make_model(
                trained.encoder,
                trained.input_size,
                len(trained.class_names),
                trained.experiment.model,
                takes_features=isinstance(trained.input_format, VectorFormat),
                image_shape=trained.input_format.shape,
            )
        head = {n: v for n, v in params.items() if not n.startswith(_PREFIX)}
        self._weights = _TensorBuffers(weights)
        self._params = _TensorBuffers(head)
        self._project = prototype_rule(trained.method).project
        self._prototypes = None
        if rule == "prototype":
            assert trained.reference is not None
            self._prototypes = PrototypeDistances(trained.reference)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return label, distance and scores, or label and scores."""
        inputs = self._prepare(self._weights.tensors(), images)
        embeddings, logits = self._head.apply(self._params.tensors(), inputs)
        if self._prototypes is None:
            scores = torch.softmax(self._sharpness * logits, dim=1)
            return scores.argmax(dim=1), scores
        distances = self._prototypes(self._project(embeddings))
        return distances.argmin(dim=1), distances.amin(dim=1), -distances


class _TensorBuffers(nn.Module):
    """Tensors by name as float32 buffers, whose names must not have dots."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self._names = {name: name.replace(".", "_") for name in tensors}
        for name, value in tensors.items():
            self.register_buffer(self._names[name], value.detach().float().clone())

    def tensors(self) -> Tensors:
        return {name: self.get_buffer(own) for name, own in self._names.items()}


class PrototypeDistances(nn.Module):
    """Distances to the nearest prototype of each class: found by a product, measured exactly."""

    def __init__(self, pool: PrototypePool) -> None:
        super().__init__()
        vectors = pool.vectors.detach().float()
        counts = torch.bincount(pool.labels, minlength=pool.num_classes)
        # [C, P] rows of each class; missing rows are infinitely far.
        places = torch.full((pool.num_classes, int(counts.max())), len(pool))
        for label in range(pool.num_classes):
            rows = (pool.labels == label).nonzero().squeeze(1)
            places[label, : len(rows)] = rows
        self.register_buffer("vectors", vectors)
        self.register_buffer("half_squares", vectors.square().sum(1) / 2)
        self.register_buffer("places", places.clamp(max=len(pool) - 1))
        self.register_buffer("first", torch.arange(len(places)) * places.shape[1])
        far = torch.zeros(places.shape).masked_fill(places == len(pool), torch.inf)
        self.register_buffer("far", far)
        self.register_buffer("absent", torch.zeros(len(counts)).masked_fill(counts == 0, torch.inf))

    def forward(self, z: Tensor) -> Tensor:
        """Return the distance to the nearest prototype of each class [B, C]."""
        vectors, places = self.get_buffer("vectors"), self.get_buffer("places")
        costs = self.get_buffer("half_squares") - z @ vectors.T
        by_class = costs.index_select(1, places.flatten()).view(-1, *places.shape)
        nearest = (by_class + self.get_buffer("far")).argmin(dim=2)
        rows = embedding(nearest + self.get_buffer("first"), places.view(-1, 1)).squeeze(2)
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
    # Other encoders are refused, or joined to the head as graphs.
    assert isinstance(encoder, ResNetEncoder | RandomFilters)
    preprocessing, network = encoder.preprocessing, ResNet18()
    apply = apply_filters if isinstance(encoder, RandomFilters) else network.apply_folded

    def prepare(weights: Tensors, images: Tensor) -> Tensor:
        return apply(weights, preprocessing.standardize(channels_first(images), torch.float32))

    if isinstance(encoder, RandomFilters):
        return encoder.tensors, prepare
    own = {n.removeprefix(_PREFIX): v for n, v in params.items() if n.startswith(_PREFIX)}
    # The weights of a trained encoder are part of the model; batch statistics never are.
    return network.fold({**encoder.tensors, **own}), prepare
