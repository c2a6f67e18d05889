"""Held-out samples that the user gives, for a run whose local test set samples are with its clients."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import FORMAT
from mpfedcl.data.reader import open_own_samples
from mpfedcl.data.samples import ImageFormat, Indices, SampleIndex, Samples, Subset, choose_format
from mpfedcl.inference.calibration import FILE, METRIC_FILE, describe_held_out
from mpfedcl.inference.client_runs import find_run
from mpfedcl.inference.predictor import Predictor
from mpfedcl.inference.trained_run import TrainedRun, load_trained_run
from mpfedcl.runs.directory import RunDirectory

_MOST = 1000


@dataclass(frozen=True)
class GivenSamples:
    """Labelled samples in a run's input format."""

    samples: Samples
    labels: NDArray[numpy.int64]


def load_predictor(
    path: Path,
    client: str | None,
    *,
    held_out: Path | None = None,
    weights: Path | None = None,
    **settings: Any,
) -> Predictor:
    """Open a run, or a client's folder; calibrate its model first if samples are given for it."""
    run, client = find_run(path, client)
    trained = load_trained_run(run, weights=weights)
    if held_out is not None:
        calibrate_by(Predictor(trained, client), held_out)
    return Predictor(trained, client, **settings)


def calibrate_by(predictor: Predictor, folder: Path) -> None:
    """Measure a model on samples that nobody has trained with; keep that in calibration.json."""
    given = load_given_samples(predictor.trained, folder)
    measured = predictor.measure(given.samples)
    distances = [part.distances for part in measured if len(part.distances)]
    scores = None
    if not predictor.has_prototypes:
        prior = 0 if predictor.log_prior is None else predictor.log_prior
        scores = torch.cat([part.scores for part in measured]) + prior
    truth = torch.from_numpy(given.labels)
    found = describe_held_out(torch.cat(distances) if distances else None, scores, truth)
    directory = RunDirectory(predictor.trained.path)
    has_metric = (directory.path / METRIC_FILE).is_file()
    content = directory.read_json(FILE) or {
        "format": FORMAT,
        "measured": "of given samples: distance to the nearest prototype; 1 - probability of truth",
        "metric": "covariance" if has_metric else None,
        "averaged": None,
        "clients": {},
    }
    if predictor.client is None:
        content["averaged"] = found
    else:
        content["clients"] = {**content.get("clients", {}), predictor.client: found}
    directory.write_json(FILE, content)


def load_given_samples(trained: TrainedRun, folder: Path, most: int = _MOST) -> GivenSamples:
    """Load labeled samples evenly, so about as many of each class."""
    try:
        sample_index = open_own_samples(folder, trained.class_names, trained.columns)
    except InvalidInput as error:
        raise InvalidInput(f"held_out{str(error).removeprefix('data')}") from None
    if sample_index.vector_width != trained.input_format.vector_width:
        raise InvalidInput(
            f"held_out is {str(folder)!r}, which holds {sample_index}; the run takes "
            f"{trained.input_format}."
        )
    parts = [part for each in sample_index.domains for part in (each.train, each.test) if part]
    drawn = draw_evenly(Subset.join(parts), most)
    return GivenSamples(load_converted(trained, sample_index, drawn.rows), drawn.labels)


def load_converted(trained: TrainedRun, sample_index: SampleIndex, rows: Indices) -> Samples:
    """Load samples in a run's input format, as a prediction converts them."""
    input_format = trained.input_format
    own = choose_format(sample_index.store.inspect(), None, input_format.dtype)
    if isinstance(own, ImageFormat) and isinstance(input_format, ImageFormat):
        # In their own color mode: `convert` takes color out as it does for a prediction.
        own = replace(input_format, is_color=own.is_color)
    return input_format.convert(sample_index.store.load(rows, own))


def draw_evenly(part: Subset, most: int) -> Subset:
    """Draw evenly, and so about as many of each class."""
    if len(part.labels) <= most:
        return part
    return part.select(numpy.linspace(0, len(part.labels) - 1, most).round().astype(numpy.int64))
