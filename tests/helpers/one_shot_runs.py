"""Small one-shot runs on vectors, one client per file."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file

from mpfedcl import Experiment

VALUES, RANDOM = 7, 4
WIDTH = VALUES + 1 + RANDOM
"""The number of features of a sample: its values, a constant and random features."""


def save_client(
    path: Path, seed: int, classes: tuple[int, ...] = (0, 1, 2), *, per_class: int = 6
) -> Path:
    """Write one client's vectors, some of each class to learn from and some to test."""
    random = numpy.random.default_rng(seed)
    labels = numpy.array(classes)[numpy.arange(2 * per_class * len(classes)) % len(classes)]
    vectors = random.normal(0, 0.4, (len(labels), VALUES)) + 0.3 * random.normal(size=VALUES)
    vectors[numpy.arange(len(labels)), labels] += 1
    half = len(labels) // 2
    path.parent.mkdir(parents=True, exist_ok=True)
    numpy.savez(
        path,
        x_train=vectors[:half],
        y_train=labels[:half],
        x_test=vectors[half:],
        y_test=labels[half:],
    )
    return path


def federation(root: Path, method: str = "fedgauss", **changes: Any) -> Experiment:
    """Return an experiment in which each file below `root` is a client."""
    settings = {
        "dataset__name": "folder",
        "dataset__root": root,
        "partition__kind": "feature",
        "statistics__random_features": RANDOM,
    }
    return Experiment(method=method, dtype="float64").replace(**settings | changes)


def choose(source: Path, target: Path, names: str) -> Path:
    """Copy the files of some clients into a folder of their own."""
    target.mkdir(parents=True)
    for name in names:
        shutil.copy(source / f"{name}.npz", target)
    return target


def tensors_of(path: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors of a federation, by file."""
    files = [*path.glob("*.safetensors"), *path.glob("statistics/*"), *path.glob("models/*")]
    return {str(file.relative_to(path)): load_file(file) for file in files}


def assert_same_federation(left: Path, right: Path, tolerance: float = 1e-10) -> None:
    """Hold two federations to the same statistics, class means and classifiers."""
    ours, theirs = tensors_of(left), tensors_of(right)
    assert ours.keys() == theirs.keys()
    for file, tensors in ours.items():
        assert tensors.keys() == theirs[file].keys(), file
        # The metric is kept in single precision.
        reach = 1e-6 if file == "metric.safetensors" else tolerance
        for name, value in tensors.items():
            other = theirs[file][name]
            assert value.dtype == other.dtype, (file, name)
            torch.testing.assert_close(value, other, rtol=0, atol=reach, msg=f"{file} {name}")


def events_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines of the log."""
    log = path / "joins.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def story_of(path: Path) -> list[tuple[str, str]]:
    """Return the events and clients of the log."""
    return [(each["event"], each["client"]) for each in events_of(path)]


def contents(path: Path) -> dict[str, bytes]:
    """Return the content of all files of a federation, and the events of its log."""
    found = {
        str(file.relative_to(path)): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file() and file.name not in (".lock", "joins.jsonl")
    }
    # Times differ.
    return found | {"events": json.dumps(story_of(path)).encode()}
