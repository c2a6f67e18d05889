"""FLamby's Fed-Heart-Disease: four hospitals, by FLamby's protocol and with tuned learning rates.

The data folder `heart` has the rows of each hospital, scaled by its own training rows
(cleveland.npz), and UCI's original files (processed.cleveland.data). FLamby scales its pooled test
rows by all training rows together, so they are made from the original values.
"""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import mpfedcl
from reproduction.runs import Runs
from reproduction.tables import DOCS, fill_page, markdown, mean_std

Rows = tuple[NDArray[Any], NDArray[Any]]
"""Rows [n, 13] and labels [n]."""

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
SEEDS = (42, 43, 44, 45, 46)
"""FLamby's."""
PUBLISHED = {"fedavg": ("74.8(2.7)", "68.5"), "scaffold": ("74.8(2.7)", "68.4")}
"""Accuracy of FLamby on the pooled test rows and, on average, at the hospitals."""
PROTOCOL: dict[str, Any] = {
    "rounds": 15,
    "evaluate_every": 15,
    "evaluate_predictors": "all",
    "workers": 1,
    "train": {"steps": 100, "batch_size": 4, "lr": 0.001, "lr_decay": 1.0, "momentum": 0.0},
    "partition": {"test": "matched"},
}
COLUMNS = ("method", "pooled test", "hospitals, global model", "hospitals, primary predictor")
TUNED = ("fedavg", "fedprox", "scaffold", "fedper", "mp-fedcl", "local")
_VALUES, _WORDS = (0, 1, 3, 4, 5, 7, 8, 9), {2: (2, 3, 4), 6: (1, 2)}
"""UCI's columns that are numbers, and those that are coded by one column per word."""


class Logistic(nn.Module):
    """Logistic regression with one output, as in FLamby: the score of the first class is 0."""

    def __init__(self, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.linear = nn.Linear(input_shape[0], 1)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the scores of both classes."""
        score = self.linear(rows)
        return torch.cat([torch.zeros_like(score), score], dim=1)


def start_as_flamby(seed: int, input_shape: tuple[int, ...]) -> nn.Module:
    """Return the model with FLamby's initial weights for a seed."""
    torch.manual_seed(seed)
    return Logistic(input_shape)


def read_hospitals(root: Path) -> tuple[dict[str, tuple[Rows, Rows]], Rows]:
    """Return the training and test rows of each hospital, and the pooled test rows."""
    data: dict[str, tuple[Rows, Rows]] = {}
    original: list[tuple[NDArray[Any], NDArray[Any]]] = []
    for name in HOSPITALS:
        with numpy.load(root / f"{name}.npz") as file:
            train, test = ((file[f"x_{p}"], file[f"y_{p}"]) for p in ("train", "test"))
        data[name] = train, test
        scaled = numpy.concatenate([train[0], test[0]]).astype(float)
        values = _unscale(scaled, _read_original(root / f"processed.{name}.data"))
        original.append((values[: len(train[0])], values[len(train[0]) :]))
    trained = numpy.concatenate([train for train, _ in original])
    tested = numpy.concatenate([test for _, test in original])
    pooled = (tested - trained.mean(0)) / trained.std(0, ddof=1)
    return data, (pooled, numpy.concatenate([test[1] for _, test in data.values()]))


def _read_original(path: Path) -> NDArray[Any]:
    """Return the complete rows of a UCI file as FLamby codes them."""
    rows = []
    for line in path.read_text().splitlines():
        values = [value for at, value in enumerate(line.split(",")) if at not in (10, 11, 12)]
        if "?" not in values:
            rows.append([float(value) for value in values])
    table = numpy.array(rows)
    words = [table[:, at] == word for at, known in _WORDS.items() for word in known]
    return numpy.stack([*table[:, _VALUES].T, *words], axis=1).astype(float)


def _unscale(scaled: NDArray[Any], original: NDArray[Any]) -> NDArray[Any]:
    """Return scaled rows in their original units; the same rows in any order give the units."""
    low, high = original.min(0), original.max(0)
    width = numpy.ptp(scaled, axis=0)
    share = (scaled - scaled.min(0)) / numpy.where(width > 0, width, 1)
    values: NDArray[Any] = low + share * (high - low)
    return values


def measure(result: mpfedcl.RunResult, pooled: Rows) -> list[float | None]:
    """Return accuracies: on pooled rows, at the hospitals, and by the primary predictor there."""
    assert result.summary is not None
    at_hospitals = result.summary["predictors"]["local_test"]["global_classifier"]
    if at_hospitals is None:
        return [None, None, result.accuracy]
    rows, labels = (torch.from_numpy(each) for each in pooled)
    with torch.no_grad():
        predicted = result.global_model(rows.float()).argmax(1)
    share = 100 * float((predicted == labels).double().mean())
    return [share, at_hospitals, result.accuracy]


def row(name: str, results: Sequence[mpfedcl.RunResult], pooled: Rows) -> list[str]:
    """Return a method's row of a table, over seeds."""
    measured = [measure(result, pooled) for result in results]
    line = [name, *(mean_std(each) for each in zip(*measured, strict=True))]
    print(*line, flush=True)
    return line


def main(runs: Runs) -> None:
    """Write FLamby's protocol next to its numbers, and all methods with tuned learning rates."""
    data, pooled = read_hospitals(Path(os.environ.get("MPFEDCL_DATA", ".")) / "heart")
    settings = {**PROTOCOL, **({"rounds": 2, "evaluate_every": 2} if runs.quick else {})}
    with TemporaryDirectory() as folder:

        def run(method: str, seed: int, model: Any, **changes: Any) -> mpfedcl.RunResult:
            base = mpfedcl.Experiment(method=method, seed=seed, **settings).replace(**changes)
            return mpfedcl.run(base, mkdtemp(dir=folder), model=model, data=data, progress=False)

        rows = []
        for method, published in PUBLISHED.items():
            runs_of = [run(method, seed, partial(start_as_flamby, seed)) for seed in SEEDS]
            rows.append([*row(method, runs_of, pooled), *published])
        protocol = markdown([*COLUMNS, "FLamby: pooled", "FLamby: hospitals"], rows)
        rows = []
        for method in (*TUNED, "fedgauss"):
            changes: dict[str, Any] = {}
            if method != "fedgauss":
                base = mpfedcl.Experiment(method=method, **settings)
                found = mpfedcl.tune(
                    base, out=mkdtemp(dir=folder), model=Logistic, data=data, budget=5, seeds=(100,)
                )
                assert found is not None
                changes = {"train__lr": found.best.train.lr}
            runs_of = [run(method, seed, Logistic, **changes) for seed in SEEDS]
            rows.append([*row(method, runs_of, pooled), str(changes.get("train__lr", "-"))])
        tuned = markdown([*COLUMNS, "learning rate"], rows)
    if not runs.quick:
        fill_page(DOCS / "natural-clients.md", {"protocol": protocol, "tuned": tuned})
