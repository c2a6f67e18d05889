"""Does an exported file say what PyTorch says? Asked on real samples, before it is written."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from mpfedcl.inference.export.exported_network import PredictionRule
from mpfedcl.inference.given_samples import draw_evenly, load_given_samples
from mpfedcl.inference.trained_run import TrainedRun

ExportedFunction = Callable[[NDArray[Any]], list[NDArray[Any]]]
"""The exported network: images or features of a batch to label, distance (by prototype), scores."""

_TIE = 1e-5
"""Two classes closer than this may change places, in parts of the distance where that is over 1."""
_ROUNDING = 1e-4
_MOST_POINTS_LOST = 1.0
_SAMPLES_TO_RANGE = 200
_SAMPLES_AT_ONCE = 64


@dataclass(frozen=True)
class CheckSamples:
    """Samples to check with: the run's local test set samples, else others of the same format."""

    samples: Samples
    labels: NDArray[numpy.int64] | None
    """None where the samples are not of the run's classes."""
    training: Samples | None
    """Some training samples of the run, from which int8 takes its ranges."""
    origin: str


@dataclass(frozen=True)
class Agreement:
    """What a file answered beside PyTorch."""

    labels_differ: int
    largest_difference: float
    """Between scores."""
    accuracy: float | None
    accuracy_of_pytorch: float | None


def load_check_samples(
    trained: TrainedRun, most: int, client: str | None = None, held_out: Path | None = None
) -> CheckSamples:
    """Return up to so many samples in the model's input format.

    Those that are given, else the run's local test set samples (a client's, if it has some), else others.
    """
    experiment, wanted = trained.experiment, trained.input_format
    if held_out is not None:
        return _divide_given(trained, held_out, most)
    try:
        if trained.partition.get("network"):
            raise InvalidInput("they are with the clients.")
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
        origin = "random vectors, because the run's own are not here"
        return CheckSamples(drawn.astype(wanted.dtype), None, None, origin)
    sample_index = open_data_set(DatasetSettings())
    (domain,) = sample_index.domains
    assert domain.test is not None
    rows = draw_evenly(domain.test, most).rows
    digits = sample_index.store.load(rows, ImageFormat(28, 28, is_color=False))
    origin = f"test images of {sample_index.name}, because the run's own are not here"
    return CheckSamples(wanted.convert(digits), None, None, origin)


def _divide_given(trained: TrainedRun, folder: Path, most: int) -> CheckSamples:
    """Return one half of given samples to check with, and of the other to take ranges from."""
    given = load_given_samples(trained, folder, 2 * most)
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


def compare_with_pytorch(
    trained: TrainedRun,
    params: Tensors,
    rule: PredictionRule,
    real: CheckSamples,
    answer: ExportedFunction,
    *,
    from_features: bool,
    sharpness: float = 1.0,
) -> Agreement:
    """Ask both about each sample."""
    differ, largest, right, right_by_pytorch = 0, 0.0, 0, 0
    with WaitingBar("Checking", len(real.samples)) as bar:
        for first in range(0, len(real.samples), _SAMPLES_AT_ONCE):
            samples = real.samples[first : first + _SAMPLES_AT_ONCE]
            inputs = trained.inputs(samples).float().numpy() if from_features else samples
            label, *_, scores = answer(inputs)
            expected, expected_scores = _predict_with_pytorch(
                trained, params, rule, samples, sharpness
            )
            differ += int(((label != expected) & ~_is_tie(expected_scores)).sum())
            known = numpy.isfinite(expected_scores)
            if not numpy.array_equal(known, numpy.isfinite(scores)):
                largest = numpy.inf
            gaps = numpy.zeros_like(expected_scores)
            numpy.subtract(scores, expected_scores, where=known, out=gaps)
            size = max(1.0, float(numpy.abs(expected_scores[known]).max(initial=0.0)))
            largest = max(largest, float(numpy.abs(gaps).max(initial=0.0)) / size)
            if real.labels is not None:
                truth = real.labels[first : first + _SAMPLES_AT_ONCE]
                right += int((label == truth).sum())
                right_by_pytorch += int((expected == truth).sum())
            bar.advance(len(samples))
    share = None if real.labels is None else 100 / len(real.labels)
    return Agreement(
        differ,
        largest,
        None if share is None else share * right,
        None if share is None else share * right_by_pytorch,
    )


def refuse_disagreement(found: Agreement, real: CheckSamples, *, is_quantized: bool) -> None:
    """Refuse a file that says something else than PyTorch; int8 may lose a point of accuracy."""
    about = f"on {len(real.samples):,} {real.origin}"
    if is_quantized:
        assert found.accuracy is not None
        assert found.accuracy_of_pytorch is not None
        if found.accuracy_of_pytorch - found.accuracy > _MOST_POINTS_LOST:
            raise InvalidInput(
                f"quantize is 'int8', and the file would be right in {found.accuracy:.1f} % "
                f"instead of {found.accuracy_of_pytorch:.1f} % {about}; it must be left out, and "
                "nothing was written."
            )
    elif found.labels_differ or not found.largest_difference <= _ROUNDING:
        raise InvalidInput(
            f"RUN is {'' if found.labels_differ else 'nearly '}another model once exported: "
            f"{found.labels_differ} labels differ from PyTorch's, scores by up to "
            f"{found.largest_difference:.1e}, {about}; it must agree, and nothing was written."
        )


def _predict_with_pytorch(
    trained: TrainedRun, params: Tensors, rule: PredictionRule, samples: Samples, sharpness: float
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
