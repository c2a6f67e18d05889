"""Predictions of a finished run for new samples."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy
import torch
from PIL import Image
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import load_tensors
from mpfedcl.data.image_files import convert_image, read_image_file
from mpfedcl.data.samples import ArrayFormat, Samples
from mpfedcl.data.table_files import import_table
from mpfedcl.data.tables import read_rows
from mpfedcl.inference.calibration import METRIC_FILE, Calibration, Drift, write_calibration
from mpfedcl.inference.samples import load_held_out
from mpfedcl.inference.trained_run import (
    DistanceSpace,
    TrainedRun,
    find_run,
    has_changed,
    load_trained_run,
    primary_predictor,
)
from mpfedcl.methods import Test
from mpfedcl.models import ModuleModel
from mpfedcl.models.factory import given_again
from mpfedcl.runs.directory import RunDirectory

_SAMPLES_AT_ONCE = 256


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
    """The probabilities of all classes, if the classifier decides."""

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

    `threshold` is the distance beyond which an image is unknown (OOD), or None; `remark` then
    gives the reason. `log_prior` [C] is added to the classifier's scores, unless it is None.

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
    ) -> None:
        self.client = client
        self.class_names = trained.class_names
        self.params = trained.parameters(client)
        self.trained = trained = trained.seen_by(client)
        self.coverage = coverage
        calibration = Calibration.read(trained.path)
        self._space = _open_space(trained, wants_metric=calibration.metric is not None)
        test: Test = "global_test" if client is None else "local_test"
        self._kind = primary_predictor(trained.method, test, self._space)
        self.log_prior: Tensor | None = None
        if client is not None and self._kind.rule == "classifier" and self._kind.prior == "labels":
            self.log_prior = trained.label_prior(client)
        calibrated = calibration.of(client)
        self.threshold, remark = calibrated.threshold(false_alarms)
        self._is_as_measured = not has_changed(trained.path)
        if self.threshold is not None and not self._is_as_measured:
            remark = (
                "Clients have joined or left since the calibration: the threshold for unknown is "
                "still that of the earlier federation, and drift is not evaluated."
            )
        if self._space is None:
            remark = "This run has no prototypes: the classifier predicts, and no image is unknown."
        by_client = any(each.get("columns") for each in trained.partition["clients"].values())
        if client is None and by_client:
            scaled = (
                "Rows are standardized by the training rows of all clients, because "
                "dataset.standardize is client and no client is named."
            )
            remark = " ".join(each for each in (remark, scaled) if each)
        self.sharpness = calibrated.sharpness
        self._set_limit: float | None = None
        if coverage is not None:
            if self.has_prototypes:
                raise InvalidInput(
                    f"coverage is {coverage:g}; it must be left out, because the nearest prototype "
                    "decides in this run and gives no probabilities."
                )
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
        held_out: Path | None = None,
        weights: Path | None = None,
        model: Any = None,
    ) -> Self:
        """Open a finished run.

        Args:
            path: The run directory, or a client's folder in a federation (its last run).
            client, false_alarms, coverage: As for the class.
            held_out: Labeled samples to calibrate the model on; calibration.json keeps the result.
            weights: The encoder's file, if it has moved since the run.
            model: As for `run`, if the run used objects that have no importable name.
        """
        run, client = find_run(Path(path), client)
        with given_again(model, RunDirectory(run).read_experiment):
            trained = load_trained_run(run, weights=weights)
            if held_out is not None:
                cls(trained, client)._calibrate(held_out)
            return cls(trained, client, false_alarms=false_alarms, coverage=coverage)

    @property
    def has_prototypes(self) -> bool:
        """Whether labels are those of the nearest prototype."""
        return self._kind.rule == "prototype"

    def predict(self, samples: Any) -> list[Prediction]:
        """Return a prediction per sample.

        Args:
            samples: Images as bytes [n, height, width] or [n, height, width, 3], or a sequence of
                paths, Pillow images and arrays of bytes; their sizes may differ. For a run on
                arrays, what it was trained on: floats or token ids [n, ...], or a sequence of
                arrays or tensors. For a run on a table, a polars or pandas frame, a list of dicts,
                or the path of a file.
        """
        return [each for part in self.measure(samples) for each in self.decide(part)]

    def probabilities(self, samples: Any) -> Tensor:
        """Return the probability of each class [n, C]; the label has the largest.

        If the nearest prototype decides, they are the softmax of -d²/(2 `contrast.temperature`)
        with the distance d to the nearest prototype of each class.
        """
        found = []
        for embeddings, logits in self._apply(samples):
            if self._space is not None and self.has_prototypes:
                points = self._space.project(embeddings)
                scores = self._space.prototypes.closeness_by_class(points).double()
                scores = scores / self.trained.experiment.contrast.temperature
            else:
                scores = logits.double() + (0 if self.log_prior is None else self.log_prior)
                scores = self.sharpness * scores
            found.append(torch.softmax(scores, dim=1))
            self._reject_overflow(found[-1])
        return torch.cat(found)

    def embed(self, samples: Any) -> Tensor:
        """Return the embeddings of samples [n, d], in the space where prototypes are compared."""
        return torch.cat([embeddings for embeddings, _ in self._apply(samples)])

    def inputs(self, samples: Samples | Sequence[Any]) -> Tensor:
        """Return the model's inputs for samples: pixels, or the features of the encoder.

        A user's own module gets them in the shape that it takes.
        """
        inputs = self.trained.inputs(numpy.stack([self.convert(each) for each in samples]))
        model = self.trained.model
        return model.shape_inputs(inputs) if isinstance(model, ModuleModel) else inputs

    def detect_drift(self, predictions: Sequence[Prediction]) -> Drift | None:
        """Return whether more samples are OOD than chance explains; None without a threshold."""
        if self.threshold is None or not self._is_as_measured:
            return None
        flagged = sum(bool(each.unknown) for each in predictions)
        return Drift.of(len(predictions), flagged, self.threshold)

    def measure(self, samples: Any) -> list[Measured]:
        """Apply the model to samples in batches; `decide` turns the outputs into predictions."""
        return [self._measure_batch(*outputs) for outputs in self._apply(samples)]

    def _apply(self, samples: Any) -> Iterator[tuple[Tensor, Tensor]]:
        samples = self._read(samples)
        for first in range(0, len(samples), _SAMPLES_AT_ONCE):
            batch = [self.convert(each) for each in samples[first : first + _SAMPLES_AT_ONCE]]
            yield self.trained.apply(self.params, numpy.stack(batch))

    def _read(self, samples: Any) -> Any:
        """Return the rows of a table as vectors; other samples as they are."""
        columns, is_path = self.trained.columns, isinstance(samples, str | Path)
        if is_path and columns is None:
            return [samples]
        table = Path(str(samples)) if is_path else import_table(samples)
        if table is None:
            return samples
        if columns is None:
            raise InvalidInput(
                "samples is a table; only a run on a table takes one, and this run takes "
                f"{self.trained.input_format}."
            )
        return read_rows(table, columns)[0]

    def convert(self, sample: Any) -> Samples:
        """Return one sample in the model's input format."""
        input_format = self.trained.input_format
        if isinstance(input_format, ArrayFormat):
            return _convert_array(sample, input_format)
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
        self._reject_overflow(torch.softmax(scores, dim=1))
        nothing = scores.new_zeros(0)
        if self._space is None:
            return Measured(scores, nothing.long(), nothing, nothing)
        pool, points = self._space.prototypes, self._space.project(embeddings)
        rows, distances = pool.nearest_rows(points)
        self._reject_overflow(distances.where(rows >= 0, torch.inf))
        others = pool.distances_by_class(points)
        others.scatter_(1, pool.labels[rows].unsqueeze(1), torch.inf)
        margins = (others.min(dim=1).values - distances).clamp(min=0)
        return Measured(scores, rows, distances, margins)

    def decide(self, measured: Measured) -> list[Prediction]:
        """Return a prediction per sample."""
        scores = measured.scores + (0 if self.log_prior is None else self.log_prior)
        # Prediction sets are calibrated with the scores as they are.
        plain = torch.softmax(scores, dim=1)
        probabilities = torch.softmax(self.sharpness * scores, dim=1)
        values, classes = probabilities.topk(min(2, probabilities.shape[1]), dim=1)
        found = []
        for place, pairs in enumerate(zip(classes.tolist(), values.tolist(), strict=True)):
            first, *second = (
                ClassProbability(self.class_names[label], share)
                for label, share in zip(*pairs, strict=True)
            )
            chosen = self._choose_set(plain[place])
            nearest = self._describe_nearest(measured, place)
            prediction = Prediction(first.label, **nearest, classifier=first, set=chosen)
            if self.has_prototypes:
                prediction = replace(prediction, label=nearest["nearest"].class_name)
            else:
                named = dict(zip(self.class_names, probabilities[place].tolist(), strict=True))
                likely = second[0] if second else None
                prediction = replace(
                    prediction, probability=first.probability, second=likely, probabilities=named
                )
            found.append(prediction)
        return found

    def _describe_nearest(self, measured: Measured, place: int) -> dict[str, Any]:
        """Return the fields of a prediction that are about the nearest prototype."""
        if self._space is None:
            return dict.fromkeys(("distance", "margin", "unknown", "nearest"))
        pool, row = self._space.prototypes, int(measured.rows[place])
        name, owner = self.class_names[int(pool.labels[row])], pool.names[pool.owners[row]]
        distance, margin = float(measured.distances[place]), float(measured.margins[place])
        return {
            "distance": distance,
            # If all prototypes are of one class, there is no margin.
            "margin": margin if margin < float("inf") else None,
            "unknown": None if self.threshold is None else distance > self.threshold.distance,
            "nearest": NearestPrototype(owner, name, int(pool.counts[row])),
        }

    def _choose_set(self, probabilities: Tensor) -> tuple[str, ...] | None:
        """Return the prediction set, most likely class first; it has at least one class."""
        if self._set_limit is None:
            return None
        ordered, classes = probabilities.sort(descending=True, stable=True)
        size = max(1, int((1 - ordered <= self._set_limit).sum()))
        return tuple(self.class_names[each] for each in classes[:size].tolist())

    def _calibrate(self, folder: Path) -> None:
        """Calibrate the model on held-out samples."""
        samples, labels = load_held_out(self.trained, folder)
        measured = self.measure(samples)
        distances, scores = None, None
        if self._space is not None:
            distances = torch.cat([part.distances for part in measured])
        if not self.has_prototypes:
            prior = 0 if self.log_prior is None else self.log_prior
            scores = torch.cat([part.scores for part in measured]) + prior
        truth = torch.from_numpy(labels)
        write_calibration(self.trained.path, self.client, distances, scores, truth)

    def _reject_overflow(self, values: Tensor) -> None:
        if not bool(values.isfinite().all()):
            raise InvalidInput(
                f"{self.trained.input_format.one} gives an embedding that is not finite; it has no "
                "label."
            )


def _convert_array(sample: Any, wanted: ArrayFormat) -> Samples:
    if isinstance(sample, str | Path | Image.Image):
        raise InvalidInput(
            f"a sample is {sample if isinstance(sample, str | Path) else 'an image'}; this run "
            f"takes {wanted}, as arrays."
        )
    try:
        array = numpy.asarray(sample)
    except ValueError:
        raise InvalidInput(f"a sample is not an array; this run takes {wanted}.") from None
    converted: Samples = wanted.convert(array[None])[0]
    return converted


def _open_space(trained: TrainedRun, *, wants_metric: bool) -> DistanceSpace | None:
    """Return the space of distances, as at the end of the run."""
    file = trained.path / METRIC_FILE
    fitted = load_tensors(file) if wants_metric or file.is_file() else {}
    try:
        return DistanceSpace.of(trained.method, trained.pool, fitted)
    except (RuntimeError, ValueError, IndexError, TypeError):
        raise InvalidInput(f"{file} must be the file that the run wrote.") from None
