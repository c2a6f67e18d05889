"""Calibration on held-out samples: out-of-distribution (OOD) thresholds, prediction sets, drift.

A sample is flagged as unknown (OOD) if it is farther from every prototype than nearly all held-out
samples: at a false-alarm rate of 5 %, at most one in twenty samples of the same distribution is
flagged by mistake. A prediction set is large enough if it contained the true class of nearly all
held-out samples (split conformal prediction).

Drift is a batch with more flagged samples than chance explains. Of n new samples that are
exchangeable with the m held-out ones, the number beyond the k-th smallest held-out distance is
beta-binomial with (n, m + 1 - k, k), for any distribution of distances. A binomial distribution
would ignore that the threshold is an estimate, and raise false alarms for small m.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import FORMAT, write_atomically
from mpfedcl.core.json_files import FileContent, validate_content
from mpfedcl.core.tensors import Tensors, pack_tensors
from mpfedcl.inference.trained_run import (
    INPUTS_AT_ONCE,
    DistanceSpace,
    apply_to_batches,
    primary_predictor,
)
from mpfedcl.methods import PredictorKind
from mpfedcl.rounds.scoring import log_prior
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.runs.observer import FinalModels

CALIBRATION_FILE = "calibration.json"
METRIC_FILE = "metric.safetensors"
FALSE_ALARM_RATES = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
"""The false-alarm rates with a threshold."""
COVERAGES = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.975, 0.98, 0.99, 0.995)
"""The coverages of prediction sets."""
_MOST_IMAGES = 2000
_MOST_IMAGES_OF_A_CLIENT = 1000
_FEWEST_IMAGES_OF_A_CLIENT = 200
_IMAGES_OF_ALL_CLIENTS = 20_000
"""Few enough that calibration takes a fraction of the time of one evaluation."""
_FEWEST_TO_SHARPEN = 50
"""With fewer samples the temperature would be a guess."""
_WIDEST = 4.0
"""The largest absolute value of the log of the sharpness."""
_DRIFT_FALSE_ALARMS = 0.01
"""The false-alarm rate of drift, per batch."""


def calibrate(models: FinalModels) -> Iterator[tuple[str, Tensors]]:
    """Pass on the personal models of a finished run, and write calibration.json.

    A method's own metric is written to metric.safetensors. Used as an observer's `on_models`.
    """
    space = DistanceSpace.of(models.method, models.pool, models.fitted)
    if space is not None and space.has_metric:
        kept = {name: models.fitted[name] for name in ("covariance", "fit")}
        write_atomically(models.directory.path / METRIC_FILE, pack_tensors(kept))
    content, clients = {**_start(models.directory), "round": models.round}, {}
    if models.averaged is not None:
        rows = torch.arange(len(models.test_inputs), device=models.test_inputs.device)
        rows = _choose(rows, _MOST_IMAGES)
        kind = primary_predictor(models.method, "global_test", space)
        content["global"] = _measure(models, space, kind, None, models.averaged, rows, None)
    fair = _IMAGES_OF_ALL_CLIENTS // max(1, len(models.local_tests))
    most = min(_MOST_IMAGES_OF_A_CLIENT, max(_FEWEST_IMAGES_OF_A_CLIENT, fair))
    kind = primary_predictor(models.method, "local_test", space)
    for name, params in models.personal:
        rows, prior = _choose(models.local_tests[name], most), None
        if kind.prior == "labels":
            prior = log_prior(torch.tensor(models.label_counts[name]))
        seen = None if space is None else space.seen_by(models.method, name)
        if (found := _measure(models, seen, kind, name, params, rows, prior)) is not None:
            clients[name] = found
        yield name, params
    content["clients"] = dict(sorted(clients.items()))
    models.directory.write_json(CALIBRATION_FILE, content)


def _start(directory: RunDirectory) -> dict[str, Any]:
    """Return the content of calibration.json before a model is measured."""
    has_metric = (directory.path / METRIC_FILE).is_file()
    return {
        "format": FORMAT,
        "measured": "on held-out images: distance to the nearest prototype; 1 - p(truth)",
        "metric": "covariance" if has_metric else None,
        "global": None,
        "clients": {},
    }


def write_calibration(
    path: Path, client: str | None, distances: Tensor | None, scores: Tensor | None, truth: Tensor
) -> None:
    """Replace the entry of one model in calibration.json."""
    found, directory = summarize_held_out(distances, scores, truth), RunDirectory(path)
    content = directory.read_json(CALIBRATION_FILE) or _start(directory)
    if client is None:
        content["global"] = found
    else:
        content["clients"] = {**content.get("clients", {}), client: found}
    directory.write_json(CALIBRATION_FILE, content)


def _choose(rows: Tensor, most: int) -> Tensor:
    """Return up to `most` test samples, evenly spaced over clients and classes."""
    if len(rows) <= most:
        return rows
    places = torch.linspace(0, len(rows) - 1, most, dtype=torch.float64).round().long()
    return rows[places.to(rows.device)]


def _measure(
    models: FinalModels,
    space: DistanceSpace | None,
    kind: PredictorKind,
    client: str | None,
    params: Tensors,
    rows: Tensor,
    prior: Tensor | None,
) -> dict[str, Any] | None:
    """Measure the distances and scores of test samples with the model of a client or of all."""
    if not len(rows):
        return None
    batches = (models.test_inputs[part] for part in torch.split(rows, INPUTS_AT_ONCE))
    points, logits = apply_to_batches(models.method, models.model_of(client), params, batches)
    distances = scores = None
    if space is not None:
        _, distances = space.prototypes.nearest(space.project(points))
    if kind.rule == "classifier":
        scores = logits.double() + (0 if prior is None else prior.to(logits.device))
    return summarize_held_out(distances, scores, models.test_labels[rows])


def summarize_held_out(
    distances: Tensor | None, scores: Tensor | None, truth: Tensor
) -> dict[str, Any] | None:
    """Return a model's entry in calibration.json, from distances [n] and scores [n, C]."""
    found: dict[str, Any] = {"images": len(truth)}
    if distances is not None and bool((joined := distances.double()).isfinite().all()):
        found["thresholds"] = find_thresholds(joined)
    if scores is not None and bool(scores.isfinite().all()):
        likely = torch.softmax(scores, dim=1).gather(1, truth.unsqueeze(1)).squeeze(1)
        found["sets"] = find_set_limits(1 - likely)
        if len(truth) >= _FEWEST_TO_SHARPEN:
            found["sharpness"] = find_sharpness(scores, truth)
    return found if len(found) > 1 else None


def find_sharpness(scores: Tensor, truth: Tensor) -> float:
    """Return the factor of all scores that maximizes the likelihood of held-out labels.

    This is the inverse temperature of temperature scaling (Guo et al., 2017): labels stay the same.
    The likelihood is concave in the factor, so bisection finds the root of its slope.
    """
    low, high = -_WIDEST, _WIDEST
    for _ in range(40):
        middle = (low + high) / 2
        shares = torch.softmax(math.exp(middle) * scores, dim=1)
        expected = (shares * scores).sum(1)
        slope = float((scores.gather(1, truth.unsqueeze(1)).squeeze(1) - expected).mean())
        low, high = (middle, high) if slope > 0 else (low, middle)
    return float(f"{math.exp(middle):.5g}")


def find_thresholds(distances: Tensor) -> dict[str, float]:
    """Return for each false-alarm rate α the ⌈(n + 1)(1 - α)⌉-th smallest of n distances.

    A new sample that is exchangeable with these is farther with probability at most α, for any
    distribution. Rates that need more samples are left out.
    """
    return _find_quantiles(distances, {rate: 1 - rate for rate in FALSE_ALARM_RATES})


def find_set_limits(surprises: Tensor) -> dict[str, float]:
    """Return for each coverage the ⌈(n + 1) coverage⌉-th smallest of n values 1 - p(truth).

    A new sample that is exchangeable with these has its true class among the classes of at most
    this value with at least this probability. Coverages that need more samples are left out.
    """
    return _find_quantiles(surprises, {coverage: coverage for coverage in COVERAGES})


def _find_quantiles(values: Tensor, shares: Mapping[float, float]) -> dict[str, float]:
    ordered = values.sort().values.tolist()
    places = {name: math.ceil((len(ordered) + 1) * s - 1e-9) for name, s in shares.items()}
    return {f"{name:g}": ordered[k - 1] for name, k in places.items() if k <= len(ordered)}


@dataclass(frozen=True)
class Threshold:
    """The distance beyond which a sample is flagged as unknown."""

    distance: float
    false_alarms: float
    """The share of held-out samples that are flagged by mistake."""
    images: int
    """The number of held-out samples."""


class ModelCalibration(FileContent):
    """The entry of one model in calibration.json."""

    images: int = Field(default=0, ge=0)
    thresholds: dict[str, float] | None = None
    """Distances by false-alarm rate."""
    sets: dict[str, float] | None = None
    """The largest 1 - p of a class in a prediction set, by coverage."""
    sharpness: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """The factor of the scores that calibrates probabilities."""

    def threshold(self, rate: float) -> tuple[Threshold | None, str | None]:
        """Return the threshold of a false-alarm rate, or the reason why there is none."""
        names = ("false_alarms", "false-alarm rate", "distances")
        found, reason = self._find(rate, FALSE_ALARM_RATES, self.thresholds, *names)
        if found is None:
            return None, f"No image is flagged as unknown: {reason}"
        return Threshold(found, rate, self.images), None

    def set_limit(self, coverage: float) -> tuple[float | None, str | None]:
        """Return the limit of prediction sets, or the reason why there is none."""
        names = ("coverage", "coverage", "probabilities")
        found, reason = self._find(coverage, COVERAGES, self.sets, *names)
        return found, reason and f"There are no prediction sets: {reason}"

    def _find(
        self, wanted: float, allowed: tuple[float, ...], known: dict[str, float] | None, *names: str
    ) -> tuple[float | None, str | None]:
        field, title, noun = names
        if wanted not in allowed:
            listed = ", ".join(f"{each:g}" for each in allowed)
            raise InvalidInput(f"{field} is {wanted:g}; it must be one of {listed}.")
        if known is None:
            return None, (
                f"the run has recorded no {noun} of held-out images for this model "
                f"({CALIBRATION_FILE}); --held-out FOLDER measures them."
            )
        if (found := known.get(f"{wanted:g}")) is not None:
            return found, None
        return None, f"{self.images} held-out images are too few for a {title} of {wanted:g}."


class Calibration(FileContent):
    """calibration.json: the calibration of the global model and of personal models."""

    metric: str | None = None
    """The metric of distances, if the method has one of its own."""
    global_model: ModelCalibration | None = Field(default=None, alias="global")
    clients: dict[str, ModelCalibration | None] = Field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Calibration":
        """Read the calibration of a run; it is empty if the run has none."""
        content = RunDirectory(path).read_json(CALIBRATION_FILE) or {}
        return validate_content(content, cls, str(path / CALIBRATION_FILE))

    def of(self, client: str | None) -> ModelCalibration:
        """Return the entry of a client's model (None: the global model), or an empty one."""
        found = self.global_model if client is None else self.clients.get(client)
        return found or ModelCalibration()


# Drift


@dataclass(frozen=True)
class Drift:
    """The number of flagged samples of a batch, and the number that chance explains."""

    images: int
    flagged: int
    at_most: int
    """Without drift at most 1 of 100 batches has more flagged samples."""
    false_alarms: float
    """The share of held-out samples beyond the threshold."""

    @classmethod
    def of(cls, images: int, flagged: int, threshold: Threshold) -> "Drift":
        """Compare the number of flagged samples with chance."""
        limit = most_by_chance(images, threshold.images, threshold.false_alarms)
        return cls(images, flagged, limit, threshold.false_alarms)

    @property
    def is_drift(self) -> bool:
        """Whether more samples are flagged than chance explains."""
        return self.flagged > self.at_most

    def describe(self, noun: str) -> str:
        """Return one sentence."""
        return (
            f"{self.flagged:,} of {self.images:,} {noun}s are farther from the pool than all but "
            f"{100 * self.false_alarms:g} % of held-out {noun}s were; by chance at most "
            f"{self.at_most:,} would be."
        )


def most_by_chance(num_new: int, num_held_out: int, rate: float) -> int:
    """Return the smallest count that at most 1 of 100 batches without drift exceeds.

    Example:
        >>> most_by_chance(100, 2000, 0.05), most_by_chance(100, 19, 0.05)
        (11, 23)
    """
    if not num_new:
        return 0
    # Imported here because most commands do not need it; scipy.stats would take a second.
    import numpy
    from scipy.special import betaln, gammaln

    place = math.ceil((num_held_out + 1) * (1 - rate) - 1e-9)
    beyond, within = num_held_out + 1 - place, place
    counts = numpy.arange(num_new + 1)
    ways = gammaln(num_new + 1) - gammaln(counts + 1) - gammaln(num_new - counts + 1)
    chances = numpy.exp(
        ways + betaln(counts + beyond, num_new - counts + within) - betaln(beyond, within)
    )
    # P(more than j), summed from the small end.
    more = numpy.append(numpy.cumsum(chances[::-1])[::-1][1:], 0.0)
    return int(numpy.argmax(more <= _DRIFT_FALSE_ALARMS))
