"""The prototype map: the pool of a run in two principal components."""

from pathlib import Path

import numpy
from numpy.typing import NDArray

from mpfedcl.core.json_files import Json
from mpfedcl.experiment import Experiment
from mpfedcl.inference.trained_run import read_pool
from mpfedcl.methods import SharesPrototypes, find_method, is_built_in
from mpfedcl.report.wording import choose_evenly

MOST_PROTOTYPES = 1500
_MOST_BYTES = 2**26
"""Of a pool that the live page reads between two requests."""


def describe_prototype_map(path: Path, experiment: Experiment, class_names: list[str]) -> Json:
    """Return the map of a run, or under `missing` the reason why there is none."""
    if reason := _why_no_pool(path, experiment):
        return {"missing": reason}
    file = path / "pool.safetensors"
    if file.stat().st_size > _MOST_BYTES:
        return {"missing": f"The pool has more than {_MOST_BYTES:,} bytes, so there is no map."}
    pool = read_pool(file, len(class_names))
    if not len(pool):
        return {"missing": "The pool of this run is empty, so there is no map."}
    chosen = choose_evenly(len(pool), MOST_PROTOTYPES)
    places, shares = project_to_plane(pool.vectors[chosen].double().numpy())
    x, y = places.T.tolist()
    return {
        "classes": class_names,
        "shares": shares,
        "x": x,
        "y": y,
        "class": pool.labels[chosen].tolist(),
        "count": pool.counts[chosen].tolist(),
        "total": len(pool),
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
