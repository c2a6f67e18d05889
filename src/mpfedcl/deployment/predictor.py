"""Predictions of a finished run for new samples."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy
import torch
from PIL import Image
from torch import Tensor

from mpfedcl.data.image_files import convert_image, read_image_file
from mpfedcl.data.sample_format import Samples, VectorFormat
from mpfedcl.deployment.calibration import FALSE_ALARM_RATES
from mpfedcl.deployment.trained_run import TrainedRun, load_trained_run
from mpfedcl.errors import InvalidInput
from mpfedcl.runs.directory import RunDirectory

_SAMPLES_AT_ONCE = 256


@dataclass(frozen=True)
class NearestPrototype:
    """The prototype that decides: whose it is, of which class, and how many images it stands for.

    Methods that compare with averages over clients (FedProto) have the client `global`.
    """

    client: str
    class_name: str
    count: int


@dataclass(frozen=True)
class ClassifierReading:
    """What the classifier says beside the prototypes: its class, and the softmax's share of it."""

    label: str
    probability: float


@dataclass(frozen=True)
class Prediction:
    """What a run predicts for one image, as `Predictor.predict` returns it.

    Example:
        >>> said = ClassifierReading("7", 0.9)
        >>> nearest = NearestPrototype("client-3", "1", count=40)
        >>> prediction = Prediction("1", 0.31, 0.02, False, nearest, said)
        >>> prediction.to_json()["nearest"]["client"]
        'client-3'
    """

    label: str
    """The class of the nearest prototype; the classifier's where there are no prototypes."""
    distance: float | None
    """To the nearest prototype, in the space where prototypes are compared."""
    margin: float | None
    """How much farther the nearest prototype of another class is."""
    unknown: bool | None
    """Whether the distance is above the threshold; None where there is none to compare with."""
    nearest: NearestPrototype | None
    classifier: ClassifierReading

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Threshold:
    """The distance beyond which an image is unknown, and where the number comes from."""

    distance: float
    false_alarms: float
    """The share of held-out images that are flagged by mistake."""
    images: int
    """The held-out images it was measured on."""


class Predictor:
    """Predicts with a run's averaged model, or with a client's personal one.

    Args:
        trained: The run, as `load_trained_run` opens it; `Predictor.load` takes its folder instead.
        client: Whose personal model to use; None is the averaged model.
        false_alarms: The share of known images that may be flagged as unknown by mistake: 0.001,
            0.005, 0.01, 0.02, 0.05, 0.1 or 0.2.

    `threshold` is the distance beyond which an image is unknown, or None; `remark` then says why.

    Example:
        >>> import mpfedcl
        >>> result = mpfedcl.run(mpfedcl.Experiment(rounds=1, clients=2), out=folder / "run")
        >>> predictor = Predictor.load(result.path)
        >>> (prediction,) = predictor.predict(numpy.zeros((1, 28, 28), dtype=numpy.uint8))
        >>> prediction.label in predictor.class_names, prediction.distance > 0
        (True, True)
    """

    def __init__(
        self, trained: TrainedRun, client: str | None = None, *, false_alarms: float = 0.05
    ) -> None:
        self.trained = trained
        self.client = client
        self.class_names = trained.class_names
        self.params = trained.parameters(client)
        reference = trained.reference
        self._reference = reference if reference is not None and len(reference) else None
        self.threshold, self.remark = _find_threshold(trained, client, false_alarms)

    @classmethod
    def load(
        cls,
        path: Path | str,
        client: str | None = None,
        *,
        false_alarms: float = 0.05,
        weights: Path | None = None,
    ) -> Self:
        """Open a finished run.

        Args:
            path: The run directory.
            client, false_alarms: As for the class.
            weights: The encoder's file, where it has moved since.
        """
        return cls(load_trained_run(path, weights=weights), client, false_alarms=false_alarms)

    @property
    def has_prototypes(self) -> bool:
        """Whether labels are those of the nearest prototype."""
        return self._reference is not None

    def predict(self, samples: Samples | Sequence[Any]) -> list[Prediction]:
        """Return a prediction per sample.

        Args:
            samples: Images as bytes [n, height, width] or [n, height, width, 3], or a sequence of
                paths, Pillow images and arrays of bytes; their sizes may differ. For a run on
                vectors, float32 or float64 [n, numbers], or a sequence of vectors.
        """
        found: list[Prediction] = []
        for first in range(0, len(samples), _SAMPLES_AT_ONCE):
            part = samples[first : first + _SAMPLES_AT_ONCE]
            batch = [self.convert(each) for each in part]
            embeddings, logits = self.trained.apply(self.params, numpy.stack(batch))
            found += self._predict_batch(embeddings, logits)
        return found

    def convert(self, sample: Any) -> Samples:
        """Return one sample in the model's input format."""
        input_format = self.trained.input_format
        if isinstance(input_format, VectorFormat):
            return _convert_vector(sample, input_format)
        if isinstance(sample, str | Path):
            return read_image_file(Path(sample), input_format.size, input_format.is_colour)
        if isinstance(sample, Image.Image):
            return convert_image(sample, input_format.size, input_format.is_colour)
        array = numpy.asarray(sample)
        is_image = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3))
        if not is_image or array.dtype != numpy.uint8 or not array.size:
            raise InvalidInput(
                f"an image is an array {array.dtype} {list(array.shape)}; it must be bytes "
                "(uint8) [height, width] or [height, width, 3], a path or a Pillow image."
            )
        converted: Samples = input_format.convert(array[None])[0]
        return converted

    def _predict_batch(self, embeddings: Tensor, logits: Tensor) -> list[Prediction]:
        probability, labels = torch.softmax(logits, dim=1).max(dim=1)
        self._refuse_overflow(probability)
        classifier = [
            ClassifierReading(self.class_names[label], share)
            for label, share in zip(labels.tolist(), probability.tolist(), strict=True)
        ]
        if self._reference is None:
            return [Prediction(each.label, None, None, None, None, each) for each in classifier]
        pool = self._reference
        rows, distances = pool.nearest_rows(embeddings)
        self._refuse_overflow(distances.where(rows >= 0, torch.inf))
        others = pool.distances_by_class(embeddings)
        others.scatter_(1, pool.labels[rows].unsqueeze(1), torch.inf)
        margins = (others.min(dim=1).values - distances).clamp(min=0)
        found = []
        measured = zip(rows.tolist(), distances.tolist(), margins.tolist(), strict=True)
        for (row, distance, margin), said in zip(measured, classifier, strict=True):
            label, owner = self.class_names[int(pool.labels[row])], pool.names[pool.owners[row]]
            prediction = Prediction(
                label=label,
                distance=distance,
                # Where all prototypes are of one class there is no other.
                margin=margin if margin < float("inf") else None,
                unknown=None if self.threshold is None else distance > self.threshold.distance,
                nearest=NearestPrototype(owner, label, int(pool.counts[row])),
                classifier=said,
            )
            found.append(prediction)
        return found

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
        raise InvalidInput(f"a sample is no array; this run takes {wanted}.") from None
    converted: Samples = wanted.convert(array[None])[0]
    return converted


def _find_threshold(
    trained: TrainedRun, client: str | None, rate: float
) -> tuple[Threshold | None, str | None]:
    """Return the threshold that the end of the run has left, or why there is none."""
    if rate not in FALSE_ALARM_RATES:
        allowed = ", ".join(f"{each:g}" for each in FALSE_ALARM_RATES)
        raise InvalidInput(f"false_alarms is {rate:g}; it must be one of {allowed}.")
    if trained.pool is None or not len(trained.pool):
        return None, "This run has no prototypes: labels are the classifier's, none is unknown."
    content = RunDirectory(trained.path).read_json("calibration.json") or {}
    found = content.get("averaged") if client is None else content.get("clients", {}).get(client)
    if not found:
        return None, (
            "No image is flagged as unknown: the run has left no distances of held-out images "
            "for this model (calibration.json)."
        )
    try:
        distance, images = found["thresholds"].get(f"{rate:g}"), int(found["images"])
        if distance is not None:
            return Threshold(float(distance), rate, images), None
    except (KeyError, TypeError, ValueError, AttributeError):
        file = trained.path / "calibration.json"
        raise InvalidInput(f"{file} must be the file that the run wrote.") from None
    return None, (
        f"No image is flagged as unknown: {images} held-out images are too few for a false-alarm "
        f"rate of {rate:g}."
    )
