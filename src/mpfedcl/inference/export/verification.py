"""The check of an exported file against PyTorch on real samples, before it is written."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
from numpy.typing import NDArray

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.progress import WaitingBar
from mpfedcl.core.rng import numpy_generator
from mpfedcl.core.tensors import Tensors
from mpfedcl.data.client_split import split_among_clients
from mpfedcl.data.reader import open_data_set
from mpfedcl.data.samples import ImageFormat, Samples, Subset, VectorFormat
from mpfedcl.data.tables import use_columns
from mpfedcl.experiment.settings import DatasetSettings
from mpfedcl.inference.samples import draw_evenly, load_held_out
from mpfedcl.inference.trained_run import TrainedRun

ExportRule = Literal["prototype", "classifier"]
ExportedFunction = Callable[[NDArray[Any]], list[NDArray[Any]]]
"""Runs the exported network: a batch to label, distance (by prototype) and scores."""

_TIE = 1e-5
"""Two classes closer than this are tied; relative to scores above 1."""
_ROUNDING = 1e-4
_MOST_POINTS_LOST = 1.0
_SAMPLES_TO_RANGE = 200
_SAMPLES_AT_ONCE = 64


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
        whose = "" if own is None or not len(own) else f"{client}'s own "
        tested = split.test.select(own) if own is not None and whose else split.test
        test = draw_evenly(tested, most)
        samples = sample_index.store.load(test.rows, wanted)
        seen = draw_evenly(split.training.everything, _SAMPLES_TO_RANGE)
        training = sample_index.store.load(seen.rows, wanted)
        origin = f"{whose}test {wanted.noun}s of {sample_index.name}"
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
    given = load_held_out(trained, folder, 2 * most)
    if len(given.labels) < 2:
        raise InvalidInput(
            f"held_out is {str(folder)!r}, which holds {len(given.labels)} "
            f"{trained.input_format.noun}; there must be at least 2."
        )
    seen = draw_evenly(
        Subset(numpy.arange(0, len(given.labels), 2), given.labels[::2]), _SAMPLES_TO_RANGE
    )
    return CheckSamples(
        given.samples[1::2],
        given.labels[1::2],
        given.samples[seen.rows],
        f"{trained.input_format.noun}s of {folder.name}",
    )


def check_against_pytorch(
    trained: TrainedRun,
    params: Tensors,
    rule: ExportRule,
    real: CheckSamples,
    answer: ExportedFunction,
    *,
    from_features: bool,
    is_quantized: bool,
    sharpness: float = 1.0,
) -> dict[str, Any]:
    """Compare a file with PyTorch on each sample; return the differences for its metadata.

    A file whose labels or scores differ is refused; int8 may lose a point of accuracy instead.
    """
    parts = []
    with WaitingBar("Checking", len(real.samples)) as bar:
        for first in range(0, len(real.samples), _SAMPLES_AT_ONCE):
            samples = real.samples[first : first + _SAMPLES_AT_ONCE]
            inputs = trained.inputs(samples).float().numpy() if from_features else samples
            label, *_, scores = answer(inputs)
            parts.append((label, scores, *_predict(trained, params, rule, samples, sharpness)))
            bar.advance(len(samples))
    label, scores, expected, wanted = (numpy.concatenate(each) for each in zip(*parts, strict=True))
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
    _refuse_difference(found, is_quantized=is_quantized)
    return found


def _refuse_difference(found: dict[str, Any], *, is_quantized: bool) -> None:
    about = f"on {found['images']:,} {found['from']}"
    if is_quantized:
        if found["accuracy_of_pytorch"] - found["accuracy"] > _MOST_POINTS_LOST:
            raise InvalidInput(
                f"quantize is 'int8', and the file's accuracy would be {found['accuracy']:.1f} % "
                f"instead of {found['accuracy_of_pytorch']:.1f} % {about}; it must be left out, "
                "and nothing was written."
            )
    elif found["labels_differ"] or not found["largest_difference"] <= _ROUNDING:
        raise InvalidInput(
            f"RUN has a model that differs once exported: {found['labels_differ']} labels differ "
            f"from PyTorch's, scores by up to {found['largest_difference']:.1e}, {about}; it must "
            "agree, and nothing was written."
        )


def _predict(
    trained: TrainedRun, params: Tensors, rule: ExportRule, samples: Samples, sharpness: float
) -> tuple[NDArray[numpy.int64], NDArray[numpy.float64]]:
    embeddings, logits = trained.apply(params, samples)
    if rule == "classifier":
        return logits.argmax(dim=1).numpy(), torch.softmax(
            sharpness * logits, dim=1
        ).double().numpy()
    assert trained.reference is not None
    label, _ = trained.reference.nearest(embeddings)
    return label.numpy(), -trained.reference.distances_by_class(embeddings).double().numpy()


def _is_tie(scores: NDArray[numpy.float64]) -> NDArray[numpy.bool_]:
    if scores.shape[1] < 2:
        return numpy.zeros(len(scores), dtype=bool)
    second, best = numpy.sort(scores, axis=1)[:, -2:].T
    tied: NDArray[numpy.bool_] = best - second < _TIE * numpy.maximum(1, numpy.abs(best))
    return tied
