"""From a run to one file: traced, checked on real samples, and only then written."""

import io
import json
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import FORMAT, write_atomically
from mpfedcl.core.tensors import Tensors, pack_tensors
from mpfedcl.data.samples import VectorFormat
from mpfedcl.inference.export import onnx_graph
from mpfedcl.inference.export.exported_network import ExportedNetwork, PredictionRule
from mpfedcl.inference.export.verification import (
    ExportedFunction,
    compare_with_pytorch,
    load_check_samples,
    refuse_disagreement,
)
from mpfedcl.inference.predictor import Predictor
from mpfedcl.inference.trained_run import TrainedRun
from mpfedcl.models import GaussianClassifier
from mpfedcl.models.encoders.encoder import ResNetEncoder
from mpfedcl.models.encoders.onnx_encoder import OnnxEncoder
from mpfedcl.models.encoders.preprocessing import NOTE
from mpfedcl.models.encoders.random_filters import RandomFilters

Format = Literal["onnx", "safetensors", "torch-export"]
SUFFIXES: dict[Format, str] = {
    "onnx": ".onnx",
    "safetensors": ".safetensors",
    "torch-export": ".pt2",
}
_IN_TORCH = ResNetEncoder | RandomFilters
"""Encoders that are traced together with the model, and whose tensors can be written beside it."""
_RESIZE = "Lanczos where the image has more pixels than this, bicubic where it has fewer"

_TABLE = (
    "by the caller, column after column: numeric (number - mean) / deviation, 0 where it is "
    "missing or the deviation is 0; text a 1 for its category and 0 for the others"
)


@dataclass(frozen=True)
class ExportSettings:
    """What is wanted of a run; `rule` None: the one that the run is judged by."""

    format: Format = "onnx"
    rule: PredictionRule | None = None
    with_encoder: bool = True
    quantized: bool = False
    check_images: int = 1000
    held_out: Path | None = None
    """Labelled samples to check with, and to take the ranges of int8 from."""


@dataclass(frozen=True)
class ExportedFile:
    """A file that was written, and what is told of it in its metadata."""

    path: Path
    num_bytes: int
    note: dict[str, Any]


def export_run(
    predictor: Predictor,
    wanted: ExportSettings,
    out: Path | None = None,
    folder: Path | None = None,
) -> ExportedFile:
    """Write a run's model as one file [default: into `exported` in `folder`, the run's own]."""
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
    parts = [predictor.client or "averaged", rule]
    parts += [] if wanted.with_encoder else ["head"]
    parts += ["int8"] if wanted.quantized else []
    name = "-".join(parts) + SUFFIXES[wanted.format]
    path = out or (folder or trained.path) / "exported" / name
    if path.is_dir():
        raise InvalidInput(f"out is {str(path)!r}; it must be a file, and this is a folder.")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)
    return ExportedFile(path, len(content), note)


def _choose_rule(predictor: Predictor, wanted: ExportSettings) -> PredictionRule:
    """Return the rule that is asked for, or else the one that the run is judged by."""
    reference = predictor.trained.reference
    if wanted.rule == "prototype" and (reference is None or not len(reference)):
        raise InvalidInput(
            f"reading is 'prototype', but this run of {predictor.trained.experiment.method} has no "
            "prototypes; it must be 'classifier'."
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
    rule: PredictionRule,
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
    client = None if note["model"] == "averaged" else note["model"]
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
    found = compare_with_pytorch(
        trained,
        params,
        rule,
        real,
        answer,
        from_features=takes_features,
        sharpness=sharpness,
    )
    refuse_disagreement(found, real, is_quantized=wanted.quantized)
    note["checked"] = {"images": len(real.samples), "from": real.origin, **asdict(found)}
    return _pack_torch(program, note) if graph is None else onnx_graph.pack_graph(graph, note)


def _takes_features(trained: TrainedRun, wanted: ExportSettings) -> bool:
    """Tell whether features go in: the encoder is left out, or the run was trained on vectors."""
    return not wanted.with_encoder or isinstance(trained.input_format, VectorFormat)


def _run_program(program: torch.export.ExportedProgram) -> ExportedFunction:
    module = program.module()

    @torch.no_grad()
    def answer(images: Any) -> list[Any]:
        return [each.numpy() for each in module(torch.from_numpy(images))]

    return answer


def _pack_torch(program: torch.export.ExportedProgram, note: dict[str, Any]) -> bytes:
    # Examples would be written as a pickle.
    program.example_inputs = None
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={NOTE: json.dumps(note, allow_nan=False)})
    return buffer.getvalue()


def _pack_tensors(
    trained: TrainedRun,
    params: Tensors,
    wanted: ExportSettings,
    rule: PredictionRule,
    note: dict[str, Any],
) -> bytes:
    tensors, encoder = dict(params), trained.encoder
    if wanted.with_encoder and isinstance(encoder, _IN_TORCH):
        # What the run itself has trained comes last and wins.
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


def _describe(predictor: Predictor, wanted: ExportSettings, rule: PredictionRule) -> dict[str, Any]:
    """Return all that a program needs to know to use the file."""
    trained = predictor.trained
    # Beside a classifier distances are measured in its own metric, which is not in the file.
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
        "model": predictor.client or "averaged",
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
            "scaling": "none: numbers as they are",
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
