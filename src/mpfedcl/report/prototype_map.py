"""The prototype map: the pool of a run and some test images in two principal components."""

from collections.abc import Sequence
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
    return {
        "classes": class_names,
        "shares": shares,
        "prototypes": {
            "x": x[:split],
            "y": y[:split],
            "class": pool.labels[chosen].tolist(),
            "count": pool.counts[chosen].tolist(),
        },
        "samples": samples and {"x": x[split:], "y": y[split:], "class": samples.labels},
        "embedded_by": samples and samples.embedded_by,
        "notes": notes,
    }


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
    if is_built_in(experiment.method) and not issubclass(
        find_method(experiment.method), SharesPrototypes
    ):
        return f"{experiment.method} shares no prototypes, so there is no map."
    return "The run has no pool.safetensors, so there is no map."


def _why_not_embedded(experiment: Experiment, partition: Json | None) -> str | None:
    """Return why test images may not be embedded; None if they may.

    A report of a foreign run must not execute code that the run names.
    """
    kind, _, rest = str(experiment.encoder.name).partition(":")
    if not is_built_in(experiment.method):
        return f"{experiment.method} is code from outside mpfedcl, which a report does not execute."
    if kind in ("onnx", "torchvision") and rest:
        return (
            f"the encoder {experiment.encoder.name} is a program from outside mpfedcl, which a "
            "report does not execute."
        )
    if partition is None:
        return "the data here are not those of the run."
    if partition.get("network"):
        return "test images stayed with the clients."
    held = partition["clients"].values()
    # If all clients share one test set, the test samples of one client are all.
    count = max((each["test"] for each in held), default=0) + sum(
        sum(each["train"]) for each in held
    )
    if count > MOST_SAMPLES_OPENED:
        return f"to open {count:,} samples would take too long."
    return None


def embed_test_images(
    path: Path, experiment: Experiment, partition: Json | None
) -> tuple[EmbeddedImages | None, str | None]:
    """Return embedded test images, or None and the reason."""
    reason = _why_not_embedded(experiment, partition)
    if reason is not None or partition is None:
        return None, f"Only the pool is shown: {reason}"
    try:
        data, model = load_data_and_model(experiment.replace(device="cpu"), torch.device("cpu"))
        if not is_same_partition(partition, data.partition):
            return None, "Only the pool is shown: the data here are not those of the run."
        method = find_method(experiment.method)(experiment, data.num_classes)
        if isinstance(method, ClosedForm):
            model = method.make_model(data.input_size)
        samples = _embed_samples(path, data, model, method)
    except InvalidInput as error:
        return None, f"Only the pool is shown, because test images cannot be embedded: {error}"
    if samples is None:
        return None, "Only the pool is shown: the run has no model to embed test images with."
    return samples, None


def _embed_samples(
    path: Path, data: FederatedData, model: Model, method: Method
) -> EmbeddedImages | None:
    """Embed test images by the global model, or those of some clients by their personal models."""
    chosen: list[tuple[Path, Tensor, Sequence[str | None]]] = []
    by_whom = "the global model"
    if (path / "model.safetensors").is_file() and len(data.test_labels):
        rows = _draw_rows(data, torch.arange(len(data.test_labels)), MOST_SAMPLES)
        places = data.table.sole_testers(len(data.test_labels))[rows.numpy()].tolist()
        owners = [None if place < 0 else data.names[place] for place in places]
        chosen.append((path / "model.safetensors", rows, owners))
    else:
        by_whom = "the personalized model of their client"
        stored = {file.stem for file in (path / "models").glob("*.safetensors")}
        tested = zip(data.names, data.table.test_sizes.tolist(), strict=True)
        here = [name for name, size in tested if size and name in stored]
        places = choose_evenly(len(here), _MOST_CLIENTS)
        for client in (data.client(here[place]) for place in places):
            rows = _draw_rows(data, client.test, max(2, MOST_SAMPLES // len(places)))
            file = path / "models" / f"{client.name}.safetensors"
            chosen.append((file, rows, [client.name] * len(rows)))
    if not chosen:
        return None
    rule, vectors = prototype_rule(method), []
    with torch.no_grad():
        for file, rows, _ in chosen:
            embeddings, _ = model.apply(read_model(file, model), data.test_inputs[rows])
            vectors.append(rule.project(embeddings).double().numpy())
            if not numpy.isfinite(vectors[-1]).all():
                raise InvalidInput(f"{file} gives embeddings that are not finite.")
    labels = [label for _, rows, _ in chosen for label in data.test_labels[rows].tolist()]
    owners = [owner for _, _, several in chosen for owner in several]
    return EmbeddedImages(numpy.concatenate(vectors), labels, owners, by_whom)


def _draw_rows(data: FederatedData, rows: Tensor, most: int) -> Tensor:
    """Return at most `most` of the rows, of each class about as many."""
    ordered = rows[data.test_labels[rows].argsort(stable=True)]
    return ordered[choose_evenly(len(ordered), most)]
