"""A finished run, opened for use on this machine: the data it was trained on need not be here.

    trained = load_trained_run(Path("runs/mine"))
    params = trained.parameters()            # the global model, or parameters("client-2")
    images = trained.input_format.convert(images)   # bytes in the size and color of its inputs;
                                                    # of a run on vectors, vectors of its width
    embeddings, logits = trained.apply(params, images)     # embeddings where prototypes live
    label, distance = trained.reference.nearest(embeddings)

What a run's files leave open is found as a run finds it: a method of one's own is imported, an
encoder's weights are looked for, and must be those that the run was trained behind.
"""

import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.json_files import validate_content
from mpfedcl.core.tensors import Tensors, load_tensors
from mpfedcl.data.loading import encoder_input_format, find_experiment_encoder, to_inputs
from mpfedcl.data.samples import ImageFormat, SampleFormat, Samples, VectorFormat
from mpfedcl.data.tables import TableColumns
from mpfedcl.engines.hardware import cap_threads
from mpfedcl.experiment import Experiment
from mpfedcl.inference.joined_clients import find_joined_models
from mpfedcl.methods import ClosedForm, Method, find_method, prototype_rule
from mpfedcl.models import Model
from mpfedcl.models.encoders.encoder import Encoder
from mpfedcl.models.encoders.trainable_encoder import make_model
from mpfedcl.prototypes import PrototypePool
from mpfedcl.runs.directory import RunDirectory

_MOST_NAMES_LISTED = 12
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class TrainedRun:
    """What a finished run has left, ready to be applied to samples."""

    path: Path
    experiment: Experiment
    method: Method
    class_names: tuple[str, ...]
    partition: dict[str, Any]
    """Who held what, as partition.json has it."""
    input_format: SampleFormat
    """In which the model, or the encoder before it, takes samples: images, or vectors."""
    encoder: Encoder | None
    """What images pass first; where `experiment.encoder.train`, it is inside the model instead."""
    input_size: int
    """How many numbers a head takes of an image."""
    model: Model
    pool: PrototypePool | None
    """All clients' prototypes; None for a method that shares none."""

    @cached_property
    def reference(self) -> PrototypePool | None:
        """The prototypes that embeddings are compared with: the pool as the method reads it."""
        return None if self.pool is None else prototype_rule(self.method).reference(self.pool)

    def seen_by(self, client: str | None) -> "TrainedRun":
        """Return the run with the prototypes that a client's own model is compared with."""
        if client is None or self.reference is None:
            return self
        own = prototype_rule(self.method).reference_of(client, self.reference)
        return self if own is self.reference else replace(self, pool=own)

    @cached_property
    def columns(self) -> TableColumns | None:
        """What turns the rows of a table into inputs; None for a run on images or vectors."""
        found = self.partition.get("columns")
        where = str(self.path / "partition.json")
        return None if found is None else validate_content(found, TableColumns, where)

    @property
    def clients(self) -> tuple[str, ...]:
        """The clients that have left a personal model, in order of name."""
        return tuple(sorted(self._personal_models))

    @cached_property
    def _personal_models(self) -> dict[str, Path]:
        files = (self.path / "models").glob("*.safetensors")
        own = {file.name.removesuffix(".safetensors"): file for file in files}
        return own | find_joined_models(self.path, self.pool)

    @property
    def has_global_model(self) -> bool:
        """Whether there is an global model."""
        return (self.path / "model.safetensors").is_file()

    def parameters(self, client: str | None = None) -> Tensors:
        """Return the global model's parameters, or those of a client's personal model."""
        if client is None and not self.has_global_model:
            raise InvalidInput(
                f"client is not given, and this run of {self.experiment.method} has no global "
                f"model; it must be {self._name_clients()}."
            )
        if client is not None and client not in self.clients:
            raise InvalidInput(f"client is {client!r}; it must be {self._name_clients()}.")
        averaged = self.path / "model.safetensors"
        file = averaged if client is None else self._personal_models[client]
        return read_model(file, self.model)

    def inputs(self, samples: Samples) -> Tensor:
        """Return the model's inputs for samples in this run's `input_format`."""
        dtype = getattr(torch, self.experiment.dtype)
        if self.encoder is None:
            return to_inputs(samples, self.experiment).flatten(start_dim=1)
        if self.experiment.encoder.train:
            return torch.from_numpy(self.encoder.preprocessing.to_input_bytes(samples))
        # The caller shows how far it is.
        features = self.encoder.encode(samples, on_progress=lambda _: None)
        return torch.from_numpy(features).to(dtype)

    @torch.no_grad()
    def apply(self, params: Tensors, samples: Samples) -> tuple[Tensor, Tensor]:
        """Return projected embeddings [B, d], as prototypes are, and logits [B, C]."""
        embeddings, logits = self.model.apply(params, self.inputs(samples))
        return prototype_rule(self.method).project(embeddings), logits

    def _name_clients(self) -> str:
        if not self.clients:
            return "left out, because no personal model was kept (--no-personal-models)"
        names = ", ".join(self.clients[:_MOST_NAMES_LISTED])
        more = len(self.clients) - _MOST_NAMES_LISTED
        return f"one of {names} and {more} more" if more > 0 else f"one of {names}"


def load_trained_run(path: Path | str, *, weights: Path | None = None) -> TrainedRun:
    """Open a finished run; `weights` names the encoder's file where it has moved since."""
    cap_threads()
    path = Path(path)
    directory = RunDirectory(path)
    experiment = directory.read_finished().replace(device="cpu")
    partition = directory.read_json("partition.json") or {}
    classes = partition.get("classes")
    if not isinstance(classes, list) or not classes:
        raise InvalidInput(f"{path / 'partition.json'} must name the classes of the run.")
    if weights is not None:
        experiment = experiment.replace(encoder__weights=weights)
    encoder = _find_encoder(path, experiment, partition)
    if encoder is None:
        input_format = _plain_input_format(path, partition, experiment)
        input_size = torch.Size(input_format.shape).numel()
    else:
        input_format, input_size = encoder_input_format(encoder), encoder.feature_size
    method = find_method(experiment.method)(experiment, len(classes))
    if isinstance(method, ClosedForm):
        model = method.make_model(input_size)
    else:
        model = make_model(
            encoder,
            input_size,
            len(classes),
            experiment.model,
            trains_encoder=bool(experiment.encoder.train),
            takes_features=isinstance(input_format, VectorFormat),
            image_shape=input_format.shape,
        )
    file = path / "pool.safetensors"
    number = prototype_rule(method).num_prototypes
    pool = read_pool(file, len(classes), number) if file.is_file() else None
    if pool is not None and pool.dimension != model.embedding_size:
        raise InvalidInput(
            f"{file} has vectors of {pool.dimension} numbers; the model's have "
            f"{model.embedding_size}, so it must be the file that the run wrote."
        )
    names = tuple(str(name) for name in classes)
    return TrainedRun(
        path, experiment, method, names, partition, input_format, encoder, input_size, model, pool
    )


def read_model(path: Path, model: Model) -> Tensors:
    """Read parameters that a run has left; they must be this model's, and numbers."""
    params = load_tensors(path)
    if not model.fits(params):
        raise InvalidInput(
            f"{path} does not fit the experiment; it must be the file that the run wrote."
        )
    if not all(bool(value.isfinite().all()) for value in params.values()):
        raise InvalidInput(f"{path} holds numbers that are not finite; its training has failed.")
    return params


def read_pool(path: Path, num_classes: int, num_prototypes: int | None = None) -> PrototypePool:
    """Read the pool that a run has left."""
    tensors = load_tensors(path)
    try:
        with safe_open(path, "pt") as file:
            names = json.loads((file.metadata() or {})["names"])
        return PrototypePool(
            vectors=tensors["vectors"],
            labels=tensors["labels"],
            counts=tensors["counts"],
            owners=tensors["owners"],
            names=tuple(names),
            num_classes=num_classes,
            num_prototypes=num_prototypes,
        )
    except (KeyError, ValueError, TypeError, RecursionError, SafetensorError) as error:
        raise InvalidInput(f"{path} is not a pool as mpfedcl writes it: {error}.") from None


def _find_encoder(path: Path, experiment: Experiment, partition: dict[str, Any]) -> Encoder | None:
    settings = experiment.encoder
    if settings.name in (None, "none"):
        if settings.weights is not None:
            raise InvalidInput(
                f"weights is {str(settings.weights)!r}; it must be left out, because this run has "
                "no encoder."
            )
        return None

    def find_image_shape() -> tuple[int, ...]:
        found = ImageFormat.from_shape(partition.get("image_shape"))
        if found is None:
            raise InvalidInput(
                f"{path / 'partition.json'} does not give the size of the images (image_shape); it "
                "must say [height, width] or [height, width, 3]."
            )
        return found.shape

    encoder = find_experiment_encoder(experiment, _CPU, find_image_shape)
    if partition.get("encoder") != encoder.fingerprint:
        raise InvalidInput(
            f"the encoder found is {encoder.name}, but the run was trained with another one; "
            "weights must name the file used then (SHA-256 over weights and preprocessing "
            f"{str(partition.get('encoder'))[:12]})."
        )
    return encoder


def _plain_input_format(
    path: Path, partition: dict[str, Any], experiment: Experiment
) -> SampleFormat:
    """Return the format on record; a run from before there was one has square images."""
    shape = partition.get("input_shape") or partition.get("image_shape")
    if vector_format := VectorFormat.from_shape(shape, experiment.dtype):
        return vector_format
    if image_format := ImageFormat.from_shape(shape):
        return image_format
    files = [path / "model.safetensors", *sorted((path / "models").glob("*.safetensors"))]
    for file in files:
        if file.is_file() and "hidden.0.weight" in (tensors := load_tensors(file)):
            if image_format := ImageFormat.guess(tensors["hidden.0.weight"].shape[-1]):
                return image_format
            break
    raise InvalidInput(
        f"{path / 'partition.json'} does not give the size of the images (input_shape), and it "
        "cannot be guessed; it must say [height, width] or [height, width, 3]."
    )
