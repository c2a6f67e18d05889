"""Export of a run's model as one file of ONNX or torch, which is checked before it is written."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import FORMAT, write_atomically
from mpfedcl.core.progress import WaitingBar
from mpfedcl.core.rng import numpy_generator
from mpfedcl.data.client_split import split_among_clients
from mpfedcl.data.sample_index import open_data_set
from mpfedcl.data.samples import ArrayFormat, Samples
from mpfedcl.data.tables import use_columns
from mpfedcl.inference import onnx_graph, torch_program
from mpfedcl.inference.onnx_graph import (
    ExportedFunction,
    ExportedNetwork,
    ExportRule,
)
from mpfedcl.inference.predictor import Predictor
from mpfedcl.inference.samples import draw_evenly
from mpfedcl.inference.trained_run import TrainedRun
from mpfedcl.models import GaussianClassifier

_RESIZE = "Lanczos if the image has more pixels than this, bicubic if it has fewer"
_TABLE = (
    "by the caller, column after column: numeric (value - mean) / deviation, 0 if it is missing "
    "or the deviation is 0; text a 1 for its category and 0 for the others"
)
_TIE = 1e-5
"""Two classes closer than this are tied; relative to scores above 1."""
_ROUNDING = 1e-4
_SUFFIXES = (".onnx", ".pt2")
_SAMPLES_CHECKED = 200
_SAMPLES_AT_ONCE = 50


@dataclass(frozen=True)
class ExportedFile:
    """An exported file and its metadata."""

    path: Path
    num_bytes: int
    note: dict[str, Any]


def export_run(
    predictor: Predictor,
    out: Path | None = None,
    *,
    rule: ExportRule | None = None,
    folder: Path | None = None,
) -> ExportedFile:
    """Write a run's model as one file of ONNX or torch, if the file predicts as the run does.

    Args:
        predictor: The run, with its global model or a client's.
        out: The file, whose name ends in .onnx or in .pt2 for a program of `torch.export`
            [default: an ONNX file in `exported` in `folder`].
        rule: The decision rule [default: that of the run's primary predictor].
        folder: The folder of the default file [default: the run's].
    """
    trained = predictor.trained
    if rule == "prototype" and not (trained.reference and len(trained.reference)):
        raise InvalidInput(
            f"predictor is 'prototype', but this run of {trained.experiment.method} has no "
            "prototypes; it must be 'classifier'."
        )
    rule = rule or ("prototype" if predictor.has_prototypes else "classifier")
    name = f"{predictor.client or 'global'}-{rule}.onnx"
    path = out or (folder or trained.path) / "exported" / name
    if path.is_dir():
        raise InvalidInput(f"out is {str(path)!r}; it must be a file, and this is a folder.")
    if path.suffix not in _SUFFIXES:
        raise InvalidInput(
            f"out is {str(path)!r}; its name must end in .onnx, or in .pt2 for torch.export."
        )
    is_onnx = path.suffix == ".onnx"
    if is_onnx:
        onnx_graph.require_packages()
    exported, prior = _make_network(predictor, rule)
    note = _describe(predictor, exported, prior)
    program = onnx_graph.trace(exported)
    pack: Callable[[dict[str, Any]], bytes]
    if is_onnx:
        graph = onnx_graph.make_graph(program, note["input"]["name"], list(note["outputs"]))
        pack = partial(onnx_graph.pack_graph, graph)
        answer = onnx_graph.open_graph(graph, note["input"]["name"])
    else:
        pack = partial(torch_program.pack_program, program)
        answer = torch_program.open_program(pack(note))
    note["checked"] = _check(trained, exported, answer)
    content = pack(note)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)
    return ExportedFile(path, len(content), note)


def _make_network(
    predictor: Predictor, rule: ExportRule
) -> tuple[ExportedNetwork, list[float] | None]:
    """Return the network of a predictor, and the label prior that its biases include, if any."""
    trained, params, prior = predictor.trained, predictor.params, None
    if rule == "prototype":
        return ExportedNetwork(trained, params, rule, sharpness=1.0), None
    if predictor.log_prior is not None and isinstance(trained.model, GaussianClassifier):
        prior = predictor.log_prior.exp().tolist()
        bias = params["bias"]
        params = {**params, "bias": bias + predictor.log_prior.to(bias).unsqueeze(1)}
    return ExportedNetwork(trained, params, rule, sharpness=predictor.sharpness), prior


def _describe(
    predictor: Predictor, exported: ExportedNetwork, prior: list[float] | None
) -> dict[str, Any]:
    """Return the metadata that a program needs to use the file."""
    trained, rule = predictor.trained, exported.rule
    # With a classifier distances are in its own metric, which is not in the file.
    by_prototype = rule == "prototype"
    limit = predictor.threshold if by_prototype and predictor.has_prototypes else None
    scores = "of each class: the softmax"
    outputs = {"label": "number of the class, from 0", "scores": scores}
    if by_prototype:
        scores = "of each class: minus the distance to its nearest prototype"
        distance = "to the nearest prototype"
        outputs = {"label": outputs["label"], "distance": distance, "scores": scores}
    return {
        "format": FORMAT,
        "version": version("mpfedcl"),
        "method": trained.experiment.method,
        "dataset": trained.experiment.dataset.name,
        "model": predictor.client or "global",
        "predictor": rule,
        "classes": list(trained.class_names),
        "input": _describe_input(trained, exported),
        "outputs": outputs,
        "unknown": None if limit is None else asdict(limit),
        "prior": prior,
        "sharpness": exported.sharpness,
    }


def _describe_input(trained: TrainedRun, exported: ExportedNetwork) -> dict[str, Any]:
    input_format, encoder, columns = trained.input_format, trained.encoder, trained.columns
    kind = str(exported.dtype).removeprefix("torch.")
    features: dict[str, Any] = {"name": "features", "type": kind}
    if isinstance(input_format, ArrayFormat):
        features["shape"] = ["batch", *input_format.shape]
        if columns is None:
            return {**features, "scaling": "none: values as they are"}
        return {**features, "scaling": _TABLE, "columns": columns.to_json()["columns"]}
    image = {
        "height": input_format.height,
        "width": input_format.width,
        "color": "RGB" if input_format.is_color else "gray",
        "resize": _RESIZE,
    }
    if encoder is not None and exported.takes_features:
        features |= {"shape": ["batch", encoder.feature_size], **image}
        features |= {"encoder": encoder.name, "encoder_fingerprint": encoder.fingerprint}
        return {**features, "scaling": asdict(encoder.preprocessing)}
    shape = ["batch", *input_format.shape]
    scaling = "none: bytes 0 to 255, the rest is inside"
    return {"name": "images", "type": "uint8", "shape": shape, **image, "scaling": scaling}


# The check


def load_check_samples(trained: TrainedRun, most: int) -> tuple[Samples, str]:
    """Return up to `most` samples in the model's input format, and where they are from.

    These are test samples of the run if its data are here, otherwise random ones.
    """
    experiment, wanted = trained.experiment, trained.input_format
    try:
        if trained.partition.get("network"):
            raise InvalidInput("the samples are with the clients.")
        sample_index = use_columns(open_data_set(experiment.dataset), trained.columns)
        if not wanted.accepts(sample_index.array_format):
            raise InvalidInput("the samples are different now.")
        rows = draw_evenly(split_among_clients(sample_index, experiment).test, most).rows
        origin = f"test {wanted.noun}s of {sample_index.name}"
        return sample_index.store.load(rows, wanted), origin
    except InvalidInput:
        pass
    generator = numpy_generator(experiment.seed, "export")
    origin = f"random {wanted.noun}s, because the run's data are not available"
    shape = (most, *wanted.shape)
    if isinstance(wanted, ArrayFormat) and not wanted.holds_tokens:
        return generator.standard_normal(shape).astype(wanted.dtype), origin
    # Every vocabulary has the token ids 0 and 1.
    high = 2 if isinstance(wanted, ArrayFormat) else 256
    return generator.integers(0, high, shape, dtype=wanted.dtype), origin


def _check(
    trained: TrainedRun, exported: ExportedNetwork, answer: ExportedFunction
) -> dict[str, Any]:
    """Compare a file with PyTorch; return the differences, or reject a file that differs."""
    samples, origin = load_check_samples(trained, _SAMPLES_CHECKED)
    parts = []
    with WaitingBar("Checking", len(samples)) as bar:
        for first in range(0, len(samples), _SAMPLES_AT_ONCE):
            some = samples[first : first + _SAMPLES_AT_ONCE]
            inputs = some
            if exported.takes_features:
                flat = trained.inputs(some).to(exported.dtype)
                inputs = flat.reshape(-1, *exported.example.shape[1:]).numpy()
            label, *_, scores = answer(inputs)
            parts.append((label, scores, *_predict(trained, exported, some)))
            bar.advance(len(some))
    label, scores, expected, wanted = (numpy.concatenate(each) for each in zip(*parts, strict=True))
    known, largest = numpy.isfinite(wanted), numpy.inf
    if numpy.array_equal(known, numpy.isfinite(scores)):
        size = max(1.0, float(numpy.abs(wanted[known]).max(initial=0.0)))
        largest = float(numpy.abs(scores[known] - wanted[known]).max(initial=0.0)) / size
    differ = int(((label != expected) & ~_is_tie(wanted)).sum())
    if differ or not largest <= _ROUNDING:
        raise InvalidInput(
            f"RUN has a model that differs once exported: {differ} labels differ from PyTorch's, "
            f"scores by up to {largest:.1e}, on {len(samples):,} {origin}; it must agree, and "
            "nothing was written."
        )
    return {
        "images": len(samples),
        "from": origin,
        "labels_differ": differ,
        "largest_difference": largest,
    }


def _predict(
    trained: TrainedRun, exported: ExportedNetwork, samples: Samples
) -> tuple[NDArray[numpy.int64], NDArray[numpy.float64]]:
    """Return the labels and scores of PyTorch."""
    embeddings, logits = trained.apply(exported.params, samples)
    if exported.rule == "classifier":
        scores = torch.softmax(exported.sharpness * logits, dim=1)
        return logits.argmax(dim=1).numpy(), scores.double().numpy()
    pool = trained.reference
    assert pool is not None
    label, _ = pool.nearest(embeddings)
    return label.numpy(), -pool.distances_by_class(embeddings).double().numpy()


def _is_tie(scores: NDArray[numpy.float64]) -> NDArray[numpy.bool_]:
    if scores.shape[1] < 2:
        return numpy.zeros(len(scores), dtype=bool)
    second, best = numpy.sort(scores, axis=1)[:, -2:].T
    tied: NDArray[numpy.bool_] = best - second < _TIE * numpy.maximum(1, numpy.abs(best))
    return tied
