"""Predictions of a finished run for new samples."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy
import torch
from PIL import Image
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import load_tensors
from mpfedcl.data.image_files import convert_image, read_image_file
from mpfedcl.data.samples import Samples, VectorFormat
from mpfedcl.inference.calibration import METRIC_FILE
from mpfedcl.inference.client_runs import find_run
from mpfedcl.inference.drift import Drift, judge_drift
from mpfedcl.inference.exchange_changes import has_changed
from mpfedcl.inference.held_out import HeldOutMeasurements
from mpfedcl.inference.prediction import ClassifierReading, NearestPrototype, Prediction
from mpfedcl.inference.prediction_rule import (
    ComparisonSpace,
    ReadingRule,
    find_comparison_space,
    find_label_prior,
)
from mpfedcl.inference.trained_run import TrainedRun, load_trained_run
from mpfedcl.rounds.label_prior import estimate_prior
from mpfedcl.runs.directory import RunDirectory

__all__ = ["ClassifierReading", "NearestPrototype", "Prediction", "Predictor"]

_SAMPLES_AT_ONCE = 256
FEWEST_TO_ESTIMATE = 10
"""Samples from which on label shares are estimated."""


class Measured(NamedTuple):
    """What a model makes of samples, before anything is said of them."""

    scores: Tensor
    """[n, C], float64: of the classifier, without a prior."""
    rows: Tensor
    """[n]: the nearest prototypes; empty without any."""
    distances: Tensor
    margins: Tensor


class Predictor:
    """Predicts with a run's global model, or with a client's personal one.

    Labels are by the rule that the run is judged by: the nearest prototype, or the classifier; a
    client's own classifier may have its label shares added (`summary.json`: `predictor`).

    Args:
        trained: The run, as `load_trained_run` opens it; `Predictor.load` takes its folder instead.
        client: Whose personal model to use; None is the global model.
        false_alarms: The share of known images that may be flagged as unknown by mistake: 0.001,
            0.005, 0.01, 0.02, 0.05, 0.1 or 0.2.
        coverage: With a classifier: give each image a set of classes that contains the true one
            with this probability, such as 0.9.
        probabilities: With a classifier: give each image the probabilities of all classes.

    `threshold` is the distance beyond which an image is unknown, or None; `remark` then says why.
    `log_prior` [C] is added to the classifier's scores, unless it is None.

    Example:
        >>> import mpfedcl
        >>> result = mpfedcl.run(mpfedcl.Experiment(rounds=1, clients=2), out=folder / "run")
        >>> predictor = Predictor.load(result.path)
        >>> (prediction,) = predictor.predict(numpy.zeros((1, 28, 28), dtype=numpy.uint8))
        >>> prediction.label in predictor.class_names, prediction.distance > 0
        (True, True)
    """

    def __init__(
        self,
        trained: TrainedRun,
        client: str | None = None,
        *,
        false_alarms: float = 0.05,
        coverage: float | None = None,
        probabilities: bool = False,
    ) -> None:
        self.client = client
        self.class_names = trained.class_names
        self.params = trained.parameters(client)
        self.trained = trained = trained.seen_by(client)
        self.coverage = coverage
        self._with_probabilities = probabilities
        held_out = HeldOutMeasurements(RunDirectory(trained.path), client)
        self._space = _open_space(trained, wants_metric=held_out.has_metric)
        self._rule = _find_rule(trained, client, has_prototypes=self._space is not None)
        self.log_prior: Tensor | None = None
        if client is not None and self._rule.with_prior:
            self.log_prior = find_label_prior(
                trained.partition, trained.pool, client, len(self.class_names)
            )
        self.threshold, remark = held_out.threshold(false_alarms)
        self._is_as_measured = not has_changed(trained.path)
        if self.threshold is not None and not self._is_as_measured:
            remark = (
                "Clients have joined or left since held-out samples were measured: the threshold "
                "for unknown is still that of the federation as it was, and drift is not judged."
            )
        if self._space is None:
            remark = "This run has no prototypes: the classifier predicts, none is called unknown."
        self.sharpness = held_out.sharpness
        self._set_limit: float | None = None
        if coverage is not None:
            self._refuse_sets_of_prototypes(coverage)
            self._set_limit, missing = held_out.set_limit(coverage)
            remark = " ".join(each for each in (remark, missing) if each) or None
        self.remark = remark

    @classmethod
    def load(
        cls,
        path: Path | str,
        client: str | None = None,
        *,
        false_alarms: float = 0.05,
        coverage: float | None = None,
        probabilities: bool = False,
        weights: Path | None = None,
    ) -> Self:
        """Open a finished run.

        Args:
            path: The run directory, or a client's folder: what it keeps of its last run.
            client, false_alarms, coverage, probabilities: As for the class.
            weights: The encoder's file, if it has moved since.
        """
        run, client = find_run(Path(path), client)
        return cls(
            load_trained_run(run, weights=weights),
            client,
            false_alarms=false_alarms,
            coverage=coverage,
            probabilities=probabilities,
        )

    @property
    def has_prototypes(self) -> bool:
        """Whether labels are those of the nearest prototype."""
        return self._rule.by_prototype

    def predict(self, samples: Samples | Sequence[Any]) -> list[Prediction]:
        """Return a prediction per sample.

        Args:
            samples: Images as bytes [n, height, width] or [n, height, width, 3], or a sequence of
                paths, Pillow images and arrays of bytes; their sizes may differ. For a run on
                vectors, float32 or float64 [n, numbers], or a sequence of vectors.
        """
        return [said for part in self.measure(samples) for said in self.say(part)]

    def embed(self, samples: Samples | Sequence[Any]) -> Tensor:
        """Return the embeddings of samples [n, d], in the space where prototypes are compared."""
        found = []
        for first in range(0, len(samples), _SAMPLES_AT_ONCE):
            batch = [self.convert(each) for each in samples[first : first + _SAMPLES_AT_ONCE]]
            embeddings, _ = self.trained.apply(self.params, numpy.stack(batch))
            found.append(self.trained.method.project(embeddings))
        return torch.cat(found)

    def estimate_prior(self, samples: Samples | Sequence[Any]) -> dict[str, float]:
        """Find how common the classes are among samples without labels; use it from now on.

        By EM on the averaged classifier's scores (label shift). Labels are the classifier's then.

        Returns:
            The estimated share of each class.
        """
        return self.adopt_prior(self.measure(samples))

    def adopt_prior(self, measured: Sequence[Measured]) -> dict[str, float]:
        """As `estimate_prior`, for samples that are measured already."""
        self.refuse_to_estimate()
        count = sum(len(part.scores) for part in measured)
        if count < FEWEST_TO_ESTIMATE:
            raise InvalidInput(
                f"there are {count} samples to estimate label shares from; there must be at least "
                f"{FEWEST_TO_ESTIMATE}."
            )
        scores = torch.cat([part.scores for part in measured])
        # Scores that are too shy, or too bold, would take some classes for all or for none.
        found = estimate_prior(self.sharpness * scores)
        self.log_prior = found / self.sharpness
        self._rule = ReadingRule(by_prototype=False, with_prior=True)
        return dict(zip(self.class_names, found.exp().tolist(), strict=True))

    def refuse_to_estimate(self) -> None:
        """Refuse where label shares are known, or sets of classes were measured without them."""
        if self.client is not None:
            raise InvalidInput(
                f"client is {self.client!r}, whose label shares are known; to estimate them, it "
                "must be left out."
            )
        if self.coverage is not None:
            raise InvalidInput(
                f"coverage is {self.coverage:g}; it must be left out where label shares are "
                "estimated, because sets are measured without them."
            )

    def judge_drift(self, predictions: Sequence[Prediction]) -> Drift | None:
        """Say whether more samples are far from the pool than chance explains; None: unknown."""
        if self.threshold is None or not self._is_as_measured:
            return None
        return judge_drift(predictions, self.threshold)

    def measure(self, samples: Samples | Sequence[Any]) -> list[Measured]:
        """Apply the model to samples, some at a time; `say` makes predictions of it."""
        found = []
        for first in range(0, len(samples), _SAMPLES_AT_ONCE):
            part = samples[first : first + _SAMPLES_AT_ONCE]
            batch = [self.convert(each) for each in part]
            embeddings, logits = self.trained.apply(self.params, numpy.stack(batch))
            found.append(self._measure_batch(embeddings, logits))
        return found

    def convert(self, sample: Any) -> Samples:
        """Return one sample in the model's input format."""
        input_format = self.trained.input_format
        if isinstance(input_format, VectorFormat):
            return _convert_vector(sample, input_format)
        if isinstance(sample, str | Path):
            return read_image_file(Path(sample), input_format.size, input_format.is_color)
        if isinstance(sample, Image.Image):
            return convert_image(sample, input_format.size, input_format.is_color)
        array = numpy.asarray(sample)
        is_image = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3))
        if not is_image or array.dtype != numpy.uint8 or not array.size:
            raise InvalidInput(
                f"an image is an array {array.dtype} {list(array.shape)}; it must be bytes "
                "(uint8) [height, width] or [height, width, 3], a path or a Pillow image."
            )
        converted: Samples = input_format.convert(array[None])[0]
        return converted

    def _measure_batch(self, embeddings: Tensor, logits: Tensor) -> Measured:
        scores = logits.double()
        self._refuse_overflow(torch.softmax(scores, dim=1))
        nothing = scores.new_zeros(0)
        if self._space is None:
            return Measured(scores, nothing.long(), nothing, nothing)
        pool, points = self._space.prototypes, self._space.project(embeddings)
        rows, distances = pool.nearest_rows(points)
        self._refuse_overflow(distances.where(rows >= 0, torch.inf))
        others = pool.distances_by_class(points)
        others.scatter_(1, pool.labels[rows].unsqueeze(1), torch.inf)
        margins = (others.min(dim=1).values - distances).clamp(min=0)
        return Measured(scores, rows, distances, margins)

    def say(self, measured: Measured) -> list[Prediction]:
        """Return a prediction per sample."""
        prior = 0 if self.log_prior is None else self.log_prior
        scores = measured.scores + prior
        # Sets were measured with the scores as they are.
        plain = torch.softmax(scores, dim=1)
        probabilities = torch.softmax(self.sharpness * scores, dim=1)
        values, classes = probabilities.topk(min(2, probabilities.shape[1]), dim=1)
        found = []
        for place, (shares, labels) in enumerate(
            zip(values.tolist(), classes.tolist(), strict=True)
        ):
            said = [
                ClassifierReading(self.class_names[label], share)
                for label, share in zip(labels, shares, strict=True)
            ]
            distance, margin, nearest = self._describe_nearest(measured, place)
            limit, decides = self.threshold, not self._rule.by_prototype
            prediction = Prediction(
                label=said[0].label if decides or nearest is None else nearest.class_name,
                distance=distance,
                margin=margin,
                unknown=None if limit is None or distance is None else distance > limit.distance,
                nearest=nearest,
                classifier=said[0],
                probability=said[0].probability if decides else None,
                second=said[1] if decides and len(said) > 1 else None,
                set=self._choose_set(plain[place]),
                probabilities=self._name_probabilities(probabilities[place]) if decides else None,
            )
            found.append(prediction)
        return found

    def _describe_nearest(
        self, measured: Measured, place: int
    ) -> tuple[float | None, float | None, NearestPrototype | None]:
        if self._space is None:
            return None, None, None
        pool, row = self._space.prototypes, int(measured.rows[place])
        name, owner = self.class_names[int(pool.labels[row])], pool.names[pool.owners[row]]
        margin = float(measured.margins[place])
        return (
            float(measured.distances[place]),
            # Where all prototypes are of one class there is no other.
            margin if margin < float("inf") else None,
            NearestPrototype(owner, name, int(pool.counts[row])),
        )

    def _choose_set(self, probabilities: Tensor) -> tuple[str, ...] | None:
        """Return the classes that are likely enough, the likeliest first; never none."""
        if self._set_limit is None:
            return None
        ordered, classes = probabilities.sort(descending=True, stable=True)
        size = max(1, int((1 - ordered <= self._set_limit).sum()))
        return tuple(self.class_names[each] for each in classes[:size].tolist())

    def _name_probabilities(self, probabilities: Tensor) -> dict[str, float] | None:
        if not self._with_probabilities:
            return None
        return dict(zip(self.class_names, probabilities.tolist(), strict=True))

    def _refuse_sets_of_prototypes(self, coverage: float) -> None:
        if self._rule.by_prototype:
            raise InvalidInput(
                f"coverage is {coverage:g}; it must be left out, because the nearest prototype "
                "decides in this run, which gives no probabilities."
            )

    def _refuse_overflow(self, values: Tensor) -> None:
        if not bool(values.isfinite().all()):
            what = "an image" if self.trained.input_format.noun == "image" else "a vector"
            raise InvalidInput(f"{what} gives an embedding that is not finite; it has no label.")


def _convert_vector(sample: Any, wanted: VectorFormat) -> Samples:
    if isinstance(sample, str | Path | Image.Image):
        raise InvalidInput(
            f"a sample is {sample if isinstance(sample, str | Path) else 'an image'}; this run "
            f"takes {wanted}, as arrays of floats."
        )
    try:
        array = numpy.asarray(sample)
    except ValueError:
        raise InvalidInput(f"a sample is not an array; this run takes {wanted}.") from None
    converted: Samples = wanted.convert(array[None])[0]
    return converted


def _find_rule(trained: TrainedRun, client: str | None, *, has_prototypes: bool) -> ReadingRule:
    """Return the rule that the run was judged by with this model."""
    summary = RunDirectory(trained.path).read_summary() or {}
    own = summary.get("predictor") or trained.method.predictor_on("local_test")
    union = summary.get("predictor_global") or trained.method.predictor_on("global_test")
    return ReadingRule.of(str(union if client is None else own), has_prototypes=has_prototypes)


def _open_space(trained: TrainedRun, *, wants_metric: bool) -> ComparisonSpace | None:
    """Return where distances are measured: as at the end of the run."""
    file = trained.path / METRIC_FILE
    fitted = load_tensors(file) if wants_metric or file.is_file() else {}
    try:
        return find_comparison_space(trained.method, trained.pool, fitted)
    except (RuntimeError, ValueError, IndexError, TypeError):
        raise InvalidInput(f"{file} must be the file that the run wrote.") from None
