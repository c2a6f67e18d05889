"""Export of a run's model as one file: traced, checked on real samples, and only then written."""

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
from numpy.typing import NDArray

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import FORMAT, write_atomically
from mpfedcl.core.progress import WaitingBar
from mpfedcl.core.rng import numpy_generator
from mpfedcl.core.tensors import pack_tensors
from mpfedcl.data.client_split import split_among_clients
from mpfedcl.data.sample_index import open_data_set
from mpfedcl.data.samples import ImageFormat, Samples, Subset, VectorFormat
from mpfedcl.data.tables import use_columns
from mpfedcl.experiment.settings import DatasetSettings
from mpfedcl.inference import exported_network as network
from mpfedcl.inference.exported_network import ExportedFunction, ExportedNetwork, ExportRule
from mpfedcl.inference.predictor import Predictor
from mpfedcl.inference.samples import draw_evenly, load_held_out
from mpfedcl.inference.trained_run import TrainedRun
from mpfedcl.models import GaussianClassifier
from mpfedcl.models.encoders.encoder import NOTE
from mpfedcl.models.encoders.onnx_encoder import OnnxEncoder
from mpfedcl.models.encoders.random_filters import RandomFilters
from mpfedcl.models.encoders.torch_encoders import ResNetEncoder

Format = Literal["onnx", "safetensors", "torch-export"]
_SUFFIXES: dict[Format, str] = {
    "onnx": ".onnx",
    "safetensors": ".safetensors",
    "torch-export": ".pt2",
}
_IN_TORCH = ResNetEncoder | RandomFilters
"""Encoders that are traced with the model, and whose tensors can be exported."""
_RESIZE = "Lanczos if the image has more pixels than this, bicubic if it has fewer"
_TABLE = (
    "by the caller, column after column: numeric (value - mean) / deviation, 0 if it is missing "
    "or the deviation is 0; text a 1 for its category and 0 for the others"
)
_TIE = 1e-5
"""Two classes closer than this are tied; relative to scores above 1."""
_ROUNDING = 1e-4
_MOST_POINTS_LOST = 1.0
_SAMPLES_TO_RANGE = 200
_SAMPLES_AT_ONCE = 64


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
    export = _Export(predictor, wanted)
    note = export.describe()
    content = export.pack_tensors(note) if wanted.format == "safetensors" else export.pack(note)
    parts = [predictor.client or "global", export.rule]
    parts += [] if wanted.with_encoder else ["head"]
    parts += ["int8"] if wanted.quantized else []
    name = "-".join(parts) + _SUFFIXES[wanted.format]
    path = out or (folder or predictor.trained.path) / "exported" / name
    if path.is_dir():
        raise InvalidInput(f"out is {str(path)!r}; it must be a file, and this is a folder.")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)
    return ExportedFile(path, len(content), note)


class _Export:
    """A model and the options of its export, which must fit together."""

    def __init__(self, predictor: Predictor, wanted: ExportSettings) -> None:
        self.trained = predictor.trained
        self.rule: ExportRule = wanted.rule or (
            "prototype" if predictor.has_prototypes else "classifier"
        )
        self._predictor, self._wanted = predictor, wanted
        self._reject_unsupported()
        self._params, self._prior = predictor.params, None
        self._sharpness = predictor.sharpness if self.rule == "classifier" else 1.0
        prior, is_gaussian = predictor.log_prior, isinstance(self.trained.model, GaussianClassifier)
        if self.rule == "classifier" and prior is not None and is_gaussian:
            self._prior = prior.exp().tolist()
            bias = self._params["bias"]
            self._params = {**self._params, "bias": bias + prior.to(bias).unsqueeze(1)}

    def _reject_unsupported(self) -> None:
        trained, wanted, method = self.trained, self._wanted, self.trained.experiment.method
        encoder, fault = trained.encoder, None
        known = _IN_TORCH | OnnxEncoder if wanted.format == "onnx" else _IN_TORCH
        left_out = "quantize is 'int8'; it must be left out, because"
        if wanted.rule == "prototype" and not (trained.reference and len(trained.reference)):
            fault = f"predictor is 'prototype', but this run of {method} has no prototypes; it "
            fault += "must be 'classifier'"
        elif wanted.quantized and wanted.format != "onnx":
            fault = f"{left_out} format is {wanted.format!r} and only onnx has it"
        elif wanted.quantized and not trained.method.trains:
            fault = f"{left_out} {method} has no trained layers, and its scores need all digits"
        elif not wanted.with_encoder and encoder is None:
            fault = "encoder is 'exclude'; it must be left out: this run has no encoder"
        elif not wanted.with_encoder and trained.experiment.encoder.train:
            fault = "encoder is 'exclude'; it must be 'include', because the run has trained the "
            fault += "encoder"
        elif wanted.with_encoder and encoder is not None and not isinstance(encoder, known):
            fault = f"encoder is 'include', but the encoder {encoder.name} cannot be exported as "
            fault += f"{wanted.format}; it must be 'exclude'"
        if fault is not None:
            raise InvalidInput(f"{fault}.")

    def describe(self) -> dict[str, Any]:
        """Return the metadata that a program needs to use the file."""
        trained, predictor = self.trained, self._predictor
        # With a classifier distances are in its own metric, which is not in the file.
        by_prototype = self.rule == "prototype"
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
            "predictor": self.rule,
            "classes": list(trained.class_names),
            "input": self._input,
            "outputs": outputs,
            "unknown": None if limit is None else asdict(limit),
            "prior": self._prior,
            "sharpness": self._sharpness,
            "quantized": "int8" if self._wanted.quantized else None,
            "checked": None,
        }

    @cached_property
    def _input(self) -> dict[str, Any]:
        """The input of the exported network."""
        input_format, encoder = self.trained.input_format, self.trained.encoder
        shape = ["batch", *input_format.shape]
        described: dict[str, Any] = {"name": "features", "type": "float32", "shape": shape}
        if isinstance(input_format, VectorFormat):
            columns = self.trained.columns
            if columns is None:
                return {**described, "scaling": "none: values as they are"}
            return {**described, "scaling": _TABLE, "columns": columns.to_json()["columns"]}
        image = {
            "height": input_format.height,
            "width": input_format.width,
            "color": "RGB" if input_format.is_color else "gray",
            "resize": _RESIZE,
        }
        if encoder is None or self._wanted.with_encoder:
            described |= {"name": "images", "type": "uint8", **image}
            return {**described, "scaling": "none: bytes 0 to 255, the rest is inside"}
        described |= {"shape": ["batch", encoder.feature_size], **image}
        described |= {"encoder": encoder.name, "encoder_fingerprint": encoder.fingerprint}
        return {**described, "scaling": asdict(encoder.preprocessing)}

    @property
    def _from_features(self) -> bool:
        """Whether the input is features: without an encoder, or in a run on vectors."""
        return bool(self._input["name"] == "features")

    def pack_tensors(self, note: dict[str, Any]) -> bytes:
        """Return the content of a safetensors file."""
        tensors, encoder, pool = dict(self._params), self.trained.encoder, self.trained.reference
        if self._wanted.with_encoder and isinstance(encoder, _IN_TORCH):
            # Weights that the run has trained replace those of the encoder.
            tensors = {f"encoder.{n}": v for n, v in encoder.tensors.items()} | tensors
        if self.rule == "prototype":
            for name in ("vectors", "labels", "counts"):
                tensors[f"prototypes.{name}"] = getattr(pool, name)
        return pack_tensors(tensors, note=(NOTE, json.dumps(note, allow_nan=False)))

    def pack(self, note: dict[str, Any]) -> bytes:
        """Return the content of an ONNX or torch.export file, after the check of its answers."""
        trained, name, wanted = self.trained, self._input["name"], self._wanted
        is_onnx = wanted.format == "onnx"
        if is_onnx:
            network.require_packages()
        exported = ExportedNetwork(
            trained,
            self._params,
            self.rule,
            from_features=self._from_features,
            sharpness=self._sharpness,
        )
        real = load_check_samples(
            trained, wanted.check_images, self._predictor.client, wanted.held_out
        )
        if wanted.quantized and real.training is None:
            raise self._no_ranges()
        encoder = trained.encoder
        joined = encoder if name == "images" and isinstance(encoder, OnnxEncoder) else None
        if joined is not None:
            example = torch.from_numpy(joined.trial_output[:1]).repeat_interleave(2, dim=0)
        elif self._from_features:
            example = torch.zeros(2, trained.input_size)
        else:
            example = torch.zeros(2, *trained.input_format.shape, dtype=torch.uint8)
        program = network.trace(exported, example)
        if not is_onnx:
            note["checked"] = self._check(real, network.open_program(program))
            return network.pack_program(program, note)
        source = name if joined is None else "features"
        graph = network.make_graph(program, source, list(note["outputs"]))
        if joined is not None:
            graph = network.prepend_encoder(graph, joined, name)
        if wanted.quantized and real.training is not None:
            graph = network.quantize(graph, name, self._inputs(real.training))
        note["checked"] = self._check(real, network.open_graph(graph, name))
        return network.pack_graph(graph, note)

    def _no_ranges(self) -> InvalidInput:
        nouns, dataset = f"{self.trained.input_format.noun}s", self.trained.experiment.dataset
        location = f"dataset.name {dataset.name!r} must be here, and it is not"
        if self.trained.partition.get("network"):
            location = (
                f"they are with its clients, so --held-out must name a folder of such {nouns}"
            )
        return InvalidInput(
            "quantize is 'int8', whose ranges and accuracy are measured on the run's own "
            f"{nouns}; {location}."
        )

    def _inputs(self, samples: Samples) -> NDArray[Any]:
        """Return the inputs of the exported network."""
        return self.trained.inputs(samples).float().numpy() if self._from_features else samples

    def _check(self, real: "CheckSamples", answer: ExportedFunction) -> dict[str, Any]:
        """Compare a file with PyTorch on each sample; return the differences for its metadata.

        A file whose labels or scores differ is rejected; int8 may lose a point of accuracy instead.
        """
        parts = []
        with WaitingBar("Checking", len(real.samples)) as bar:
            for first in range(0, len(real.samples), _SAMPLES_AT_ONCE):
                samples = real.samples[first : first + _SAMPLES_AT_ONCE]
                label, *_, scores = answer(self._inputs(samples))
                parts.append((label, scores, *self._predict(samples)))
                bar.advance(len(samples))
        label, scores, expected, wanted = (
            numpy.concatenate(each) for each in zip(*parts, strict=True)
        )
        known, largest = numpy.isfinite(wanted), numpy.inf
        if numpy.array_equal(known, numpy.isfinite(scores)):
            size = max(1.0, float(numpy.abs(wanted[known]).max(initial=0.0)))
            largest = float(numpy.abs(scores[known] - wanted[known]).max(initial=0.0)) / size
        found = {
            "images": len(real.samples),
            "from": real.origin,
            "labels_differ": int(((label != expected) & ~_is_tie(wanted)).sum()),
            "largest_difference": largest,
            "accuracy": None,
            "accuracy_of_pytorch": None,
        }
        if real.labels is not None:
            found["accuracy"] = 100 * float((label == real.labels).mean())
            found["accuracy_of_pytorch"] = 100 * float((expected == real.labels).mean())
        self._reject_difference(found)
        return found

    def _predict(self, samples: Samples) -> tuple[NDArray[numpy.int64], NDArray[numpy.float64]]:
        """Return the labels and scores of PyTorch."""
        embeddings, logits = self.trained.apply(self._params, samples)
        if self.rule == "classifier":
            scores = torch.softmax(self._sharpness * logits, dim=1)
            return logits.argmax(dim=1).numpy(), scores.double().numpy()
        pool = self.trained.reference
        assert pool is not None
        label, _ = pool.nearest(embeddings)
        return label.numpy(), -pool.distances_by_class(embeddings).double().numpy()

    def _reject_difference(self, found: dict[str, Any]) -> None:
        about = f"on {found['images']:,} {found['from']}"
        if self._wanted.quantized:
            if found["accuracy_of_pytorch"] - found["accuracy"] > _MOST_POINTS_LOST:
                raise InvalidInput(
                    f"quantize is 'int8', and the file's accuracy would be "
                    f"{found['accuracy']:.1f} % instead of {found['accuracy_of_pytorch']:.1f} % "
                    f"{about}; it must be left out, and nothing was written."
                )
        elif found["labels_differ"] or not found["largest_difference"] <= _ROUNDING:
            raise InvalidInput(
                f"RUN has a model that differs once exported: {found['labels_differ']} labels "
                f"differ from PyTorch's, scores by up to {found['largest_difference']:.1e}, "
                f"{about}; it must agree, and nothing was written."
            )


def _is_tie(scores: NDArray[numpy.float64]) -> NDArray[numpy.bool_]:
    if scores.shape[1] < 2:
        return numpy.zeros(len(scores), dtype=bool)
    second, best = numpy.sort(scores, axis=1)[:, -2:].T
    tied: NDArray[numpy.bool_] = best - second < _TIE * numpy.maximum(1, numpy.abs(best))
    return tied


# Real samples for the check


@dataclass(frozen=True)
class CheckSamples:
    """Samples for the check: the run's test samples, or others of the same format."""

    samples: Samples
    labels: NDArray[numpy.int64] | None
    """None if the samples are not of the run's classes."""
    training: Samples | None
    """Training samples of the run, for the ranges of int8."""
    origin: str


def load_check_samples(
    trained: TrainedRun, most: int, client: str | None = None, held_out: Path | None = None
) -> CheckSamples:
    """Return up to `most` samples in the model's input format.

    These are the given ones, or the run's test samples (a client's, if it has some), or others.
    """
    experiment, wanted = trained.experiment, trained.input_format
    if held_out is not None:
        return _divide_given(trained, held_out, most)
    try:
        if trained.partition.get("network"):
            raise InvalidInput("the samples are with the clients.")
        sample_index = use_columns(open_data_set(experiment.dataset), trained.columns)
        split = split_among_clients(sample_index, experiment)
        if sample_index.class_names != trained.class_names:
            raise InvalidInput("the classes are different now.")
        if sample_index.vector_width != wanted.vector_width:
            raise InvalidInput("the samples are different now.")
        own = split.local_test.get(client) if client is not None else None
        owner = "" if own is None or not len(own) else f"{client}'s own "
        tested = split.test.select(own) if own is not None and owner else split.test
        test = draw_evenly(tested, most)
        samples = sample_index.store.load(test.rows, wanted)
        seen = draw_evenly(split.training.everything, _SAMPLES_TO_RANGE)
        training = sample_index.store.load(seen.rows, wanted)
        origin = f"{owner}test {wanted.noun}s of {sample_index.name}"
        return CheckSamples(samples, test.labels, training, origin)
    except InvalidInput:
        pass
    if isinstance(wanted, VectorFormat):
        drawn = numpy_generator(experiment.seed, "export").standard_normal((most, *wanted.shape))
        origin = "random vectors, because the run's data are not available"
        return CheckSamples(drawn.astype(wanted.dtype), None, None, origin)
    sample_index = open_data_set(DatasetSettings())
    (domain,) = sample_index.domains
    assert domain.test is not None
    rows = draw_evenly(domain.test, most).rows
    digits = sample_index.store.load(rows, ImageFormat(28, 28, is_color=False))
    origin = f"test images of {sample_index.name}, because the run's data are not available"
    return CheckSamples(wanted.convert(digits), None, None, origin)


def _divide_given(trained: TrainedRun, folder: Path, most: int) -> CheckSamples:
    """Use one half of the given samples for the check, and the other for the ranges of int8."""
    samples, labels = load_held_out(trained, folder, 2 * most)
    noun = trained.input_format.noun
    if len(labels) < 2:
        raise InvalidInput(
            f"held_out is {str(folder)!r}, which holds {len(labels)} {noun}; there must be at "
            "least 2."
        )
    seen = draw_evenly(Subset(numpy.arange(0, len(labels), 2), labels[::2]), _SAMPLES_TO_RANGE)
    origin = f"{noun}s of {folder.name}"
    return CheckSamples(samples[1::2], labels[1::2], samples[seen.rows], origin)
