"""Predictions of a finished run for new samples."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy
import torch
from PIL import Image
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import FORMAT
from mpfedcl.core.tensors import load_tensors
from mpfedcl.data.image_files import convert_image, read_image_file
from mpfedcl.data.samples import Samples, VectorFormat
from mpfedcl.inference.calibration import (
    CALIBRATION_FILE,
    METRIC_FILE,
    Calibration,
    Drift,
    summarize_held_out,
)
from mpfedcl.inference.join_log import has_changed
from mpfedcl.inference.samples import load_held_out
from mpfedcl.inference.trained_run import (
    DistanceSpace,
    PredictionRule,
    TrainedRun,
    find_run,
    load_trained_run,
)
from mpfedcl.rounds.predictions import estimate_prior
from mpfedcl.runs.directory import RunDirectory

_SAMPLES_AT_ONCE = 256
FEWEST_TO_ESTIMATE = 10
"""Samples that an estimate of the label distribution needs."""


@dataclass(frozen=True)
class NearestPrototype:
    """The nearest prototype: its client, its class, and the number of samples it represents.

    Methods that compare with averages over clients (FedProto) have the client `global`.
    """

    client: str
    class_name: str
    count: int


@dataclass(frozen=True)
class ClassProbability:
    """A class and its probability by the classifier."""

    label: str
    probability: float


@dataclass(frozen=True)
class Prediction:
    """The prediction for one sample, as `Predictor.predict` returns it.

    Example:
        >>> nearest = NearestPrototype("client-3", "1", count=40)
        >>> prediction = Prediction("1", 0.31, 0.02, False, nearest, ClassProbability("7", 0.9))
        >>> prediction.to_json()["nearest"]["client"]
        'client-3'
    """

    label: str
    """The class of the nearest prototype or of the classifier, by the run's primary predictor."""
    distance: float | None
    """The distance to the nearest prototype, in the space in which prototypes are compared."""
    margin: float | None
    """How much farther the nearest prototype of another class is."""
    unknown: bool | None
    """Whether the sample is out of distribution: beyond the threshold; None without a threshold."""
    nearest: NearestPrototype | None
    classifier: ClassProbability
    probability: float | None = None
    """The probability of the label; None if the nearest prototype decides."""
    second: ClassProbability | None = None
    """The second most likely class, if the classifier decides."""
    set: tuple[str, ...] | None = None
    """With a `coverage`: the prediction set, most likely class first."""
    probabilities: dict[str, float] | None = None
    """The probabilities of all classes, if asked for."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self) | {"set": None if self.set is None else list(self.set)}


class Measured(NamedTuple):
    """The model outputs for some samples, before a prediction rule is applied."""

    scores: Tensor
    """The classifier's scores [n, C] in float64, without a prior."""
    rows: Tensor
    """The nearest prototypes [n]; empty without a pool."""
    distances: Tensor
    margins: Tensor


class Predictor:
    """Predicts with a run's global model or with a client's personal model.

    The run's primary predictor (`summary.json`: `predictor`) gives the label: the nearest prototype
    or the classifier, for a personal classifier possibly with the client's label prior.

    Args:
        trained: The run, as `load_trained_run` opens it; `Predictor.load` takes its folder instead.
        client: The client whose personal model to use; None is the global model.
        false_alarms: The share of in-distribution images that may be flagged as unknown: 0.001,
            0.005, 0.01, 0.02, 0.05, 0.1 or 0.2.
        coverage: With a classifier: give each image a prediction set that contains the true class
            with this probability, such as 0.9.
        probabilities: With a classifier: give each image the probabilities of all classes.

    `threshold` is the distance beyond which an image is unknown (OOD), or None; `remark` then says
    why. `log_prior` [C] is added to the classifier's scores, unless it is None.

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
        calibration = Calibration.read(trained.path)
        self._space = _open_space(trained, wants_metric=calibration.metric is not None)
        self._rule = _find_rule(trained, client, has_prototypes=self._space is not None)
        self.log_prior: Tensor | None = None
        if client is not None and self._rule.with_prior:
            self.log_prior = trained.label_prior(client)
        calibrated = calibration.of(client)
        self.threshold, remark = calibrated.threshold(false_alarms)
        self._is_as_measured = not has_changed(trained.path)
        if self.threshold is not None and not self._is_as_measured:
            remark = (
                "Clients have joined or left since the calibration: the threshold for unknown is "
                "still that of the earlier federation, and drift is not judged."
            )
        if self._space is None:
            remark = "This run has no prototypes: the classifier predicts, and no image is unknown."
        self.sharpness = calibrated.sharpness
        self._set_limit: float | None = None
        if coverage is not None:
            self._refuse_sets_of_prototypes(coverage)
            self._set_limit, missing = calibrated.set_limit(coverage)
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
            path: The run directory, or a client's folder in a federation (its last run).
            client, false_alarms, coverage, probabilities: As for the class.
            weights: The encoder's file, if it has moved since the run.
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
                vectors, float32 or float64 [n, values], or a sequence of vectors.
        """
        return [each for part in self.measure(samples) for each in self.decide(part)]

    def embed(self, samples: Samples | Sequence[Any]) -> Tensor:
        """Return the embeddings of samples [n, d], in the space where prototypes are compared."""
        found = []
        for first in range(0, len(samples), _SAMPLES_AT_ONCE):
            batch = [self.convert(each) for each in samples[first : first + _SAMPLES_AT_ONCE]]
            found.append(self.trained.apply(self.params, numpy.stack(batch))[0])
        return torch.cat(found)

    def estimate_prior(self, samples: Samples | Sequence[Any]) -> dict[str, float]:
        """Estimate the label distribution of unlabeled samples, and use it from now on.

        EM on the global classifier's scores (label shift); the classifier then gives the label.

        Returns:
            The estimated share of each class.
        """
        return self.adopt_prior(self.measure(samples))

    def adopt_prior(self, measured: Sequence[Measured]) -> dict[str, float]:
        """Do as `estimate_prior` with the model outputs for samples."""
        self.refuse_to_estimate()
        count = sum(len(part.scores) for part in measured)
        if count < FEWEST_TO_ESTIMATE:
            raise InvalidInput(
                f"there are {count} samples to estimate the label distribution from; there must be "
                f"at least {FEWEST_TO_ESTIMATE}."
            )
        scores = torch.cat([part.scores for part in measured])
        # Uncalibrated scores would estimate shares near 0 or 1.
        found = estimate_prior(self.sharpness * scores)
        self.log_prior = found / self.sharpness
        self._rule = PredictionRule(by_prototype=False, with_prior=True)
        return dict(zip(self.class_names, found.exp().tolist(), strict=True))

    def refuse_to_estimate(self) -> None:
        """Refuse to estimate a known label distribution, or one that prediction sets do not fit."""
        if self.client is not None:
            raise InvalidInput(
                f"client is {self.client!r}, whose label distribution is known; it must be left "
                "out to estimate one."
            )
        if self.coverage is not None:
            raise InvalidInput(
                f"coverage is {self.coverage:g}; it must be left out when the label distribution "
                "is estimated, because prediction sets are calibrated without it."
            )

    def judge_drift(self, predictions: Sequence[Prediction]) -> Drift | None:
        """Return whether more samples are OOD than chance explains; None without a threshold."""
        if self.threshold is None or not self._is_as_measured:
            return None
        flagged = sum(bool(each.unknown) for each in predictions)
        return Drift.judge(len(predictions), flagged, self.threshold)

    def measure(self, samples: Samples | Sequence[Any]) -> list[Measured]:
        """Apply the model to samples in batches; `decide` turns the outputs into predictions."""
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

    def decide(self, measured: Measured) -> list[Prediction]:
        """Return a prediction per sample."""
        prior = 0 if self.log_prior is None else self.log_prior
        scores = measured.scores + prior
        # Prediction sets are calibrated with the scores as they are.
        plain = torch.softmax(scores, dim=1)
        probabilities = torch.softmax(self.sharpness * scores, dim=1)
        values, classes = probabilities.topk(min(2, probabilities.shape[1]), dim=1)
        found = []
        for place, (shares, labels) in enumerate(
            zip(values.tolist(), classes.tolist(), strict=True)
        ):
            likely = [
                ClassProbability(self.class_names[label], share)
                for label, share in zip(labels, shares, strict=True)
            ]
            distance, margin, nearest = self._describe_nearest(measured, place)
            limit, decides = self.threshold, not self._rule.by_prototype
            prediction = Prediction(
                label=likely[0].label if decides or nearest is None else nearest.class_name,
                distance=distance,
                margin=margin,
                unknown=None if limit is None or distance is None else distance > limit.distance,
                nearest=nearest,
                classifier=likely[0],
                probability=likely[0].probability if decides else None,
                second=likely[1] if decides and len(likely) > 1 else None,
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
            # If all prototypes are of one class, there is no margin.
            margin if margin < float("inf") else None,
            NearestPrototype(owner, name, int(pool.counts[row])),
        )

    def _choose_set(self, probabilities: Tensor) -> tuple[str, ...] | None:
        """Return the prediction set, most likely class first; it has at least one class."""
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
                "decides in this run and gives no probabilities."
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


def _find_rule(trained: TrainedRun, client: str | None, *, has_prototypes: bool) -> PredictionRule:
    """Return the rule of the run's primary predictor for this model."""
    summary = RunDirectory(trained.path).read_summary() or {}
    predictor = summary.get("predictor_global" if client is None else "predictor")
    return PredictionRule.of(str(predictor), has_prototypes=has_prototypes)


def _open_space(trained: TrainedRun, *, wants_metric: bool) -> DistanceSpace | None:
    """Return the space of distances, as at the end of the run."""
    file = trained.path / METRIC_FILE
    fitted = load_tensors(file) if wants_metric or file.is_file() else {}
    try:
        return DistanceSpace.of(trained.method, trained.pool, fitted)
    except (RuntimeError, ValueError, IndexError, TypeError):
        raise InvalidInput(f"{file} must be the file that the run wrote.") from None


def load_predictor(
    path: Path,
    client: str | None,
    *,
    held_out: Path | None = None,
    weights: Path | None = None,
    **settings: Any,
) -> Predictor:
    """Open a run or a client's folder; with `held_out` samples, calibrate its model first."""
    run, client = find_run(path, client)
    trained = load_trained_run(run, weights=weights)
    if held_out is not None:
        recalibrate(Predictor(trained, client), held_out)
    return Predictor(trained, client, **settings)


def recalibrate(predictor: Predictor, folder: Path) -> None:
    """Calibrate a model on held-out samples, and write the result to calibration.json."""
    given = load_held_out(predictor.trained, folder)
    measured = predictor.measure(given.samples)
    distances = [part.distances for part in measured if len(part.distances)]
    scores = None
    if not predictor.has_prototypes:
        prior = 0 if predictor.log_prior is None else predictor.log_prior
        scores = torch.cat([part.scores for part in measured]) + prior
    truth = torch.from_numpy(given.labels)
    found = summarize_held_out(torch.cat(distances) if distances else None, scores, truth)
    directory = RunDirectory(predictor.trained.path)
    has_metric = (directory.path / METRIC_FILE).is_file()
    content = directory.read_json(CALIBRATION_FILE) or {
        "format": FORMAT,
        "measured": "on given samples: distance to the nearest prototype; 1 - probability of truth",
        "metric": "covariance" if has_metric else None,
        "global": None,
        "clients": {},
    }
    if predictor.client is None:
        content["global"] = found
    else:
        content["clients"] = {**content.get("clients", {}), predictor.client: found}
    directory.write_json(CALIBRATION_FILE, content)
