"""The prototype map: the pool of a run and some test images in two principal components."""

from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.json_files import Json
from mpfedcl.data.client_data import FederatedData
from mpfedcl.data.client_split import is_same_partition
from mpfedcl.data.loading import load_data_and_model
from mpfedcl.experiment import Experiment
from mpfedcl.inference.trained_run import read_model, read_pool
from mpfedcl.methods import (
    ClosedForm,
    Method,
    SharesPrototypes,
    find_method,
    is_built_in,
    prototype_rule,
)
from mpfedcl.models import Model
from mpfedcl.report.wording import choose_evenly

MOST_SAMPLES = 400
MOST_PROTOTYPES = 1500
MOST_SAMPLES_OPENED = 500_000
"""The data of larger runs are not opened: embedding some samples would take too long."""
_MOST_CLIENTS = 40
"""Clients whose personalized models are opened if there is no global model."""


@dataclass(frozen=True)
class EmbeddedImages:
    """Embedded test images."""

    vectors: NDArray[numpy.float64]
    labels: list[int]
    owners: list[str | None]
    """Client of each test image; None if several clients share it."""
    embedded_by: str


def describe_prototype_map(
    path: Path,
    experiment: Experiment,
    partition: Json | None,
    class_names: list[str],
    *,
    with_samples: bool = True,
) -> Json:
    """Return the map of a run, or under `missing` the reason why there is none.

    Without samples neither data nor models are opened.
    """
    if reason := _why_no_pool(path, experiment):
        return {"missing": reason}
    pool = read_pool(path / "pool.safetensors", len(class_names))
    if not len(pool):
        return {"missing": "The pool of this run is empty, so there is no map."}
    samples, note = embed_test_images(path, experiment, partition) if with_samples else (None, None)
    chosen = choose_evenly(len(pool), MOST_PROTOTYPES)
    notes = [note] if note else []
    if len(chosen) < len(pool):
        notes.append(f"{len(chosen):,} of {len(pool):,} prototypes are shown, evenly drawn.")
    vectors = pool.vectors[chosen].double().numpy()
    together = vectors if samples is None else numpy.concatenate([vectors, samples.vectors])
    places, shares = project_to_plane(together)
    (x, y), split = places.T.tolist(), len(chosen)
    drawn: Json = {
        "classes": class_names,
        "shares": shares,
        "prototypes": {
            "x": x[:split],
            "y": y[:split],
            "class": pool.labels[chosen].tolist(),
            "count": pool.counts[chosen].tolist(),
        },
        "samples": None,
        "notes": notes,
    }
    if samples is not None:
        drawn["samples"] = {"x": x[split:], "y": y[split:], "class": samples.labels}
        drawn["embedded_by"] = samples.embedded_by
    return drawn


def project_to_plane(
    vectors: NDArray[numpy.float64],
) -> tuple[NDArray[numpy.float64], list[float]]:
    """Return the first two principal components [n, 2], and the share of variance each holds.

    A direction's sign is free; it is chosen so that its largest weight is positive.
    """
    centered = vectors - vectors.mean(axis=0)
    _, sizes, directions = numpy.linalg.svd(centered, full_matrices=False)
    axes = numpy.zeros((2, vectors.shape[1]))
    axes[: len(directions[:2])] = directions[:2]
    largest = axes[numpy.arange(2), numpy.abs(axes).argmax(axis=1)]
    axes *= numpy.where(largest < 0, -1, 1)[:, None]
    total = float((sizes**2).sum())
    shares = [float(size**2) / total if total else 0.0 for size in (*sizes[:2], 0.0, 0.0)[:2]]
    return centered @ axes.T, shares


def _why_no_pool(path: Path, experiment: Experiment) -> str | None:
    """Return why there is no pool to show; None if there is one."""
    is_there = (path / "pool.safetensors").is_file()
    if not (path / "summary.json").is_file():
        earlier = "; the pool in its folder may be from before it was resumed, and is not shown"
        return (
            "The pool is written at the end of a run, and this run has not ended"
            f"{earlier if is_there else ''}."
        )
    if is_there:
        return None
    try:
        is_shared = not is_built_in(experiment.method) or issubclass(
            find_method(experiment.method), SharesPrototypes
        )
    except InvalidInput:
        is_shared = True
    if is_shared:
        return "The run has no pool.safetensors, so there is no map."
    return f"{experiment.method} shares no prototypes, so there is no map."


def _why_not_embedded(experiment: Experiment) -> str | None:
    """Return why test images may not be embedded; None if they may.

    A report of a foreign run must not execute code that the run names.
    """
    if not is_built_in(experiment.method):
        return (
            f"Only the pool is shown: {experiment.method} is code from outside mpfedcl, which a "
            "report does not execute."
        )
    kind, _, rest = str(experiment.encoder.name).partition(":")
    if kind in ("onnx", "torchvision") and rest:
        return (
            f"Only the pool is shown: the encoder {experiment.encoder.name} is a program from "
            "outside mpfedcl, which a report does not execute."
        )
    return None


def embed_test_images(
    path: Path, experiment: Experiment, partition: Json | None
) -> tuple[EmbeddedImages | None, str | None]:
    """Return embedded test images, or None and the reason."""
    if reason := _why_not_embedded(experiment):
        return None, reason
    if partition is not None and partition.get("network"):
        return None, "Only the pool is shown: test images stayed with the clients."
    if partition is not None and (count := _count_samples(partition)) > MOST_SAMPLES_OPENED:
        return None, f"Only the pool is shown: to open {count:,} samples would take too long."
    try:
        method_class = find_method(experiment.method)
        data, model = load_data_and_model(experiment.replace(device="cpu"), torch.device("cpu"))
        if partition is None or not is_same_partition(partition, data.partition):
            return None, "Only the pool is shown: the data here are not those of the run."
        method = method_class(experiment, data.num_classes)
        if isinstance(method, ClosedForm):
            model = method.make_model(data.input_size)
        samples = _embed_with_global_model(
            path, data, model, method
        ) or _embed_with_personal_models(path, data, model, method)
    except InvalidInput as error:
        return None, f"Only the pool is shown, because test images cannot be embedded: {error}"
    if samples is None:
        return None, "Only the pool is shown: the run has no model to embed test images with."
    return samples, None


def _count_samples(partition: Json) -> int:
    # If all clients share one test set, the samples of one client are all.
    held = partition["clients"].values()
    tested = max((each["test"] for each in held), default=0)
    return tested + sum(sum(each["train"]) for each in held)


def _embed_with_global_model(
    path: Path, data: FederatedData, model: Model, method: Method
) -> EmbeddedImages | None:
    if not (path / "model.safetensors").is_file() or not len(data.test_labels):
        return None
    # Sorted by class, so that an even draw takes about as many of each.
    order = data.test_labels.argsort(stable=True)
    rows = order[choose_evenly(len(order), MOST_SAMPLES)]
    places = data.table.sole_testers(len(data.test_labels))[rows.numpy()].tolist()
    vectors = _embed(path / "model.safetensors", data.test_inputs[rows], model, method)
    owners = [None if place < 0 else data.names[place] for place in places]
    return EmbeddedImages(vectors, data.test_labels[rows].tolist(), owners, "the global model")


def _embed_with_personal_models(
    path: Path, data: FederatedData, model: Model, method: Method
) -> EmbeddedImages | None:
    stored = {file.stem for file in (path / "models").glob("*.safetensors")}
    tested = zip(data.names, data.table.test_sizes.tolist(), strict=True)
    here = [name for name, size in tested if size and name in stored]
    if not here:
        return None
    chosen = [data.client(here[place]) for place in choose_evenly(len(here), _MOST_CLIENTS)]
    vectors, labels, owners = [], [], []
    for client in chosen:
        order = client.test[data.test_labels[client.test].argsort(stable=True)]
        rows = order[choose_evenly(len(order), max(2, MOST_SAMPLES // len(chosen)))]
        file = path / "models" / f"{client.name}.safetensors"
        vectors.append(_embed(file, data.test_inputs[rows], model, method))
        labels += data.test_labels[rows].tolist()
        owners += [client.name] * len(rows)
    by_whom = "the personalized model of their client"
    return EmbeddedImages(numpy.concatenate(vectors), labels, list(owners), by_whom)


@torch.no_grad()
def _embed(file: Path, inputs: Tensor, model: Model, method: Method) -> NDArray[numpy.float64]:
    embeddings, _ = model.apply(read_model(file, model), inputs)
    found: NDArray[numpy.float64] = prototype_rule(method).project(embeddings).double().numpy()
    if not numpy.isfinite(found).all():
        raise InvalidInput(f"{file} gives embeddings that are not finite.")
    return found
