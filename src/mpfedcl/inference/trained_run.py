"""A finished run, opened for use on this machine; its training data are not needed.

    trained = load_trained_run(Path("runs/mine"))
    params = trained.parameters()                          # global model, or parameters("client-2")
    images = trained.input_format.convert(images)          # to the size and color of its inputs
    embeddings, logits = trained.apply(params, images)     # embeddings as prototypes have them
    label, distance = trained.reference.nearest(embeddings)

The method's class is imported and the encoder's weights are found as for a run; the encoder must be
the one that the run was trained with.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mpfedcl.core.errors import InvalidInput, enumerate_names
from mpfedcl.core.files import FORMAT
from mpfedcl.core.json_files import validate_content
from mpfedcl.core.tensors import Tensors, load_tensors
from mpfedcl.data.loading import encoder_input_format, find_experiment_encoder, to_inputs
from mpfedcl.data.samples import ArrayFormat, ImageFormat, SampleFormat, Samples
from mpfedcl.data.tables import TableColumns
from mpfedcl.engines.hardware import cap_threads
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.settings import ModelSettings
from mpfedcl.methods import (
    ClosedForm,
    Method,
    OneShot,
    PredictorKind,
    Test,
    find_method,
    prototype_rule,
)
from mpfedcl.models import Model, ModuleModel
from mpfedcl.models.encoders.encoder import Encoder
from mpfedcl.models.factory import make_model
from mpfedcl.network.client.state import FINAL_FOLDER
from mpfedcl.network.setup.folders import ClientFolder
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.scoring import log_prior
from mpfedcl.runs.directory import RunDirectory, change_files
from mpfedcl.runs.file_schemas import POOLED

LOG = "joins.jsonl"
MOST_NAMES_LISTED = 12
INPUTS_AT_ONCE = 1024
"""Inputs that a model is applied to at once, so that memory stays flat."""
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class TrainedRun:
    """A finished run, ready to be applied to samples."""

    path: Path
    experiment: Experiment
    method: Method
    class_names: tuple[str, ...]
    partition: dict[str, Any]
    """The content of partition.json."""
    input_format: SampleFormat
    """The format of samples that the model, or the encoder before it, takes: images or arrays."""
    encoder: Encoder | None
    """The frozen encoder; with `experiment.encoder.train` it is part of the model instead."""
    input_size: int
    """The number of values that a head takes per sample."""
    model_of: Callable[[str | None], Model]
    """Returns the model of a client, or the global one."""
    pool: PrototypePool | None
    """The prototypes of all clients; None for a method that shares none."""
    client: str | None = None
    """The client whose point of view this is, as `seen_by` returns it."""

    @property
    def model(self) -> Model:
        """The model from this point of view."""
        return self.model_of(self.client)

    @cached_property
    def reference(self) -> PrototypePool | None:
        """The prototypes that the method compares embeddings with."""
        return None if self.pool is None else prototype_rule(self.method).reference(self.pool)

    def seen_by(self, client: str | None) -> "TrainedRun":
        """Return the run with a client's columns, and the prototypes its model is compared with."""
        if client is None:
            return self
        found = replace(self, client=client)
        if self.reference is None:
            return found
        own = prototype_rule(self.method).reference_of(client, self.reference)
        return found if own is self.reference else replace(found, pool=own)

    @cached_property
    def columns(self) -> TableColumns | None:
        """The columns of a run on a table; None for a run on images or arrays."""
        found = self.partition.get("columns")
        if found is None:
            return None
        columns = validate_content(found, TableColumns, str(self.path / "partition.json"))
        samples = self.partition["clients"].get(self.client) or {}
        return columns.with_statistics(samples.get("columns") or {})

    @cached_property
    def clients(self) -> tuple[str, ...]:
        """The clients with a personal model, in the order of names."""
        return tuple(sorted(file.stem for file in self.path.glob(model_file("*"))))

    @property
    def has_global_model(self) -> bool:
        """Whether the run has a global model."""
        return (self.path / "model.safetensors").is_file()

    def parameters(self, client: str | None = None) -> Tensors:
        """Return the parameters of the global model, or of a client's personal model."""
        if client is None and not self.has_global_model:
            raise InvalidInput(
                f"client is not given, and this run of {self.experiment.method} has no global "
                f"model; it must be {self._name_clients()}."
            )
        if client is not None and client not in self.clients:
            raise InvalidInput(f"client is {client!r}; it must be {self._name_clients()}.")
        file = "model.safetensors" if client is None else model_file(client)
        return read_model(self.path / file, self.model_of(client))

    def inputs(self, samples: Samples) -> Tensor:
        """Return the model's inputs for samples in `input_format`."""
        if self.encoder is None:
            return to_inputs(samples, self.experiment).flatten(start_dim=1)
        if self.experiment.encoder.train:
            return torch.from_numpy(self.encoder.preprocessing.to_input_bytes(samples))
        features = torch.from_numpy(self.encoder.encode(samples))
        return features.to(getattr(torch, self.experiment.dtype))

    def apply(self, params: Tensors, samples: Samples) -> tuple[Tensor, Tensor]:
        """Return projected embeddings [B, d], as prototypes are, and logits [B, C]."""
        return apply_to_batches(self.method, self.model, params, [self.inputs(samples)])

    def label_prior(self, client: str) -> Tensor | None:
        """Return the log of a client's label distribution [C]; None if it is not known."""
        if client in self.partition["clients"]:
            return log_prior(torch.tensor(self.partition["clients"][client]["train"]))
        # A client that joined later is in the pool only.
        if self.pool is None or client not in self.pool.names:
            return None
        own, zeros = self.pool.of(client), torch.zeros(len(self.class_names)).double()
        return log_prior(zeros.index_add_(0, own.labels, own.counts.double()))

    def _name_clients(self) -> str:
        if not self.clients:
            return "left out, because no personal model was kept (--no-personal-models)"
        return f"one of {enumerate_names(self.clients, MOST_NAMES_LISTED)}"


def find_run(path: Path, client: str | None) -> tuple[Path, str | None]:
    """Return the run directory that a path refers to, and the client whose model to use.

    The folder of a client (`mpfedcl federation init`) refers to the newest finished run that the
    client has kept; the model is then the client's, unless the primary predictor is a global one.
    """
    if not (path / "client.toml").is_file():
        return path, client
    folder = ClientFolder.open(path, None)
    ended = [each.parent for each in folder.memory.glob(f"*/{FINAL_FOLDER}/summary.json")]
    if not ended:
        raise InvalidInput(
            f"RUN is {str(path)!r}, the folder of {folder.name}, which has kept no run; one must "
            "have ended while this client took part."
        )
    run = max(ended, key=lambda each: each.stat().st_mtime_ns)
    summary = RunDirectory(run).read_summary() or {}
    has_own = (run / "models" / f"{folder.name}.safetensors").is_file()
    is_primary = PredictorKind.of(summary["predictor"]).model == "personal"
    return run, client or (folder.name if has_own and is_primary else None)


def load_trained_run(path: Path | str, *, weights: Path | None = None) -> TrainedRun:
    """Open a finished run; `weights` names the encoder's file if it has moved since."""
    cap_threads()
    path = Path(path)
    experiment = RunDirectory(path).read_finished().replace(device="cpu")
    partition = read_partition(path)
    classes = partition["classes"]
    if weights is not None:
        experiment = experiment.replace(encoder__weights=weights)
    encoder = _find_encoder(path, experiment, partition)
    if encoder is None:
        input_format = _read_input_format(path, partition, experiment)
        input_size = torch.Size(input_format.shape).numel()
    else:
        input_format, input_size = encoder_input_format(encoder), encoder.feature_size
    method = find_method(experiment.method)(experiment, len(classes))
    shape = input_format.shape if encoder is None else (input_size,)
    file, pool = path / "pool.safetensors", None
    if file.is_file():
        pool = read_pool(file, len(classes), prototype_rule(method).num_prototypes)

    @cache
    def make(settings: ModelSettings, fingerprint: str | None) -> Model:
        if isinstance(method, ClosedForm):
            model = method.make_model(input_size)
        else:
            model = make_model(
                experiment.replace(model=settings),
                encoder,
                shape,
                len(classes),
                is_image=encoder is None and isinstance(input_format, ImageFormat),
                takes_integers=isinstance(input_format, ArrayFormat) and input_format.holds_tokens,
            )
        if isinstance(model, ModuleModel) and model.fingerprint != fingerprint:
            raise InvalidInput(
                f"model.name is {settings.name!r}, whose code or constants have changed "
                f"since the run in {path}; it must be the model that the run was trained with."
            )
        if pool is not None and pool.dimension != model.embedding_size:
            raise InvalidInput(
                f"{file} has vectors of {pool.dimension} values; the model's have "
                f"{model.embedding_size}, so it must be the file that the run wrote."
            )
        return model

    def model_of(client: str | None) -> Model:
        found = experiment.model.of_clients([client] if client else [])
        if client not in found:
            return make(experiment.model, partition.get("model"))
        return make(found[client], (partition.get("models") or {}).get(client))

    if not experiment.model.clients:
        # Invalid files are rejected at once.
        model_of(None)
    names = tuple(str(name) for name in classes)
    return TrainedRun(
        path,
        experiment,
        method,
        names,
        partition,
        input_format,
        encoder,
        input_size,
        model_of,
        pool,
    )


def model_file(client: str) -> str:
    """Return the path of a client's personal model in a run directory."""
    return f"models/{client}.safetensors"


def read_model(path: Path, model: Model) -> Tensors:
    """Read the parameters of a model; they must fit it and be finite."""
    params = load_tensors(path)
    if not model.fits(params):
        raise InvalidInput(
            f"{path} does not fit the experiment; it must be the file that the run wrote."
        )
    if not all(bool(value.isfinite().all()) for value in params.values()):
        raise InvalidInput(f"{path} holds values that are not finite; its training has failed.")
    return params


def read_pool(path: Path, num_classes: int, num_prototypes: int | None = None) -> PrototypePool:
    """Read the prototype pool of a run."""
    tensors = load_tensors(path)
    try:
        with safe_open(path, "pt") as file:
            names = json.loads((file.metadata() or {})["names"])
        parts = {name: tensors[name] for name in ("vectors", "labels", "counts", "owners")}
        return PrototypePool(
            **parts,
            names=tuple(names),
            num_classes=num_classes,
            num_prototypes=num_prototypes,
        )
    except (KeyError, ValueError, TypeError, RecursionError, SafetensorError) as error:
        raise InvalidInput(f"{path} is not a pool as mpfedcl writes it: {error}.") from None


def read_partition(path: Path) -> dict[str, Any]:
    """Read the partition.json of a run, which `RunDirectory` validates."""
    partition = RunDirectory(path).read_json("partition.json")
    if not partition or not partition["classes"]:
        raise InvalidInput(f"{path / 'partition.json'} must name the classes of the run.")
    return partition


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
            raise _no_shape(path, "image_shape")
        return found.shape

    encoder = find_experiment_encoder(experiment, _CPU, find_image_shape)
    if partition.get("encoder") != encoder.fingerprint:
        raise InvalidInput(
            f"the encoder found is {encoder.name}, but the run was trained with another one; "
            "weights must name the file used then (SHA-256 over weights and preprocessing "
            f"{str(partition.get('encoder'))[:12]})."
        )
    return encoder


def _read_input_format(
    path: Path, partition: dict[str, Any], experiment: Experiment
) -> SampleFormat:
    shape = partition.get("input_shape") or partition.get("image_shape")
    found: SampleFormat | None
    if partition.get("image_shape"):
        found = ImageFormat.from_shape(shape)
    else:
        dtype = "int64" if partition.get("holds_tokens") else experiment.dtype
        found = ArrayFormat.from_shape(shape, dtype)
    if found is not None:
        return found
    raise _no_shape(path, "input_shape")


def _no_shape(path: Path, name: str) -> InvalidInput:
    return InvalidInput(
        f"{path / 'partition.json'} does not give the shape of the samples ({name}); it must be "
        "[height, width] or [height, width, 3] for images."
    )


# Prediction: outputs, the predictor and the space of distances


@torch.no_grad()
def apply_to_batches(
    method: Method, model: Model, params: Tensors, batches: Iterable[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return projected embeddings [n, d] and logits [n, C]; only these are kept of a batch."""
    parts = [model.apply(params, each) for each in batches]
    embeddings, logits = (torch.cat(each) for each in zip(*parts, strict=True))
    return prototype_rule(method).project(embeddings), logits


def primary_predictor(method: Method, test: Test, space: "DistanceSpace | None") -> PredictorKind:
    """Return the primary predictor on a test set; without prototypes the classifier decides."""
    kind = PredictorKind.of(method.predictor_on(test))
    if space is not None or kind.rule == "classifier":
        return kind
    return PredictorKind(kind.model, "classifier")


@dataclass(frozen=True)
class DistanceSpace:
    """The space in which distances from samples to prototypes are measured."""

    prototypes: PrototypePool
    project: Callable[[Tensor], Tensor]
    """Maps projected embeddings into the space."""
    has_metric: bool
    """Whether the method has a metric of its own."""

    @classmethod
    def of(
        cls, method: Method, pool: PrototypePool | None, fitted: Tensors
    ) -> "DistanceSpace | None":
        """Return the space of a method's distances; None without prototypes."""
        if pool is None or not len(pool):
            return None
        metric = method.metric(fitted, pool) if isinstance(method, OneShot) else None
        if metric is not None:
            return cls(metric.prototypes, metric.whiten, has_metric=True)
        reference = prototype_rule(method).reference(pool)
        return cls(reference, lambda z: z, has_metric=False) if len(reference) else None

    def seen_by(self, method: Method, client: str) -> "DistanceSpace":
        """Return the space with the prototypes that a client's personal model is compared with."""
        if self.has_metric:
            return self
        own = prototype_rule(method).reference_of(client, self.prototypes)
        return replace(self, prototypes=own)


# joins.jsonl: the log of clients that joined or left a finished run, one event per line


def commit(
    path: Path, event: Mapping[str, Any], files: Mapping[str, bytes], removed: Collection[str]
) -> None:
    """Change files of a run and log the event, all at once; the caller holds the run's lock."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    line = json.dumps({"format": FORMAT, "time": now, **event}, allow_nan=False)
    log = (path / LOG).read_bytes() if (path / LOG).exists() else b""
    change_files(path, {**files, LOG: log + line.encode() + b"\n"}, removed)


def has_changed(path: Path) -> bool:
    """Return whether clients joined or left a one-shot run after it ended."""
    return (path / POOLED).is_file() and (path / LOG).is_file()


def reject_changed(path: Path) -> None:
    """Reject resuming a one-shot run that clients joined or left: it has no round left."""
    if has_changed(path):
        raise InvalidInput(
            f"resume is {str(path)!r}, which clients have joined or left since; it must be a run "
            "with rounds left, and a one-shot run has none."
        )
