"""UCI HAR: the windows of 30 subjects, an own 1-D CNN on series and FedGauss on features.

The data folder `har` has har.npz (x_train [n, 9, 128], y_train, clients_train; the same for test).
"""

import os
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray
from torch import Tensor, nn

from mpfedcl import Experiment, InvalidInput
from reproduction.runs import Runs
from reproduction.tables import (
    BEST,
    DOCS,
    WITHIN,
    explain_marks,
    fill_page,
    mark_best,
    markdown,
    mean_std,
)

Array = NDArray[Any]
Data = dict[str, tuple[tuple[Array, Array], tuple[Array, Array]]]
"""By subject: training samples and labels, test samples and labels."""
Json = dict[str, Any]

SEEDS, TUNING_SEED = (0, 1, 2), 100
RATES = (0.03, 0.1, 0.3)
ROUNDS, MORE_ROUNDS = 20, 60
TESTS = ("local_test", "global_test")
COLUMNS = ("method", "model", "local test sets", "global test set", "MB per client", "lr")
TRAINED = ("fedavg", "fedprox", "scaffold", "fedper", "mp-fedcl", "fedproto", "local")
INPUTS = {"read_series": "raw series", "read_features": "192 features"}
BASE: dict[str, Any] = {
    "partition__kind": "natural",
    "personal_models": False,
    "workers": 1,
    "train": {"momentum": 0.9, "lr_decay": 0.98},
}
_GRAVITY = 0.8
"""Mean of a channel of the total acceleration, in units of g: a smartphone worn at the waist."""
_BANDS = (1, 2, 3, 4, 6, 9, 14, 24, 65)
"""Limits of the frequency bands in steps of 50 Hz / 128."""


class SeriesCnn(nn.Module):
    """Three convolutions over time, the mean over time, and a hidden layer of 64."""

    def __init__(self, num_classes: int, input_shape: tuple[int, int]) -> None:
        super().__init__()
        channels, _ = input_shape
        self.convolutions = nn.Sequential(
            *(nn.Conv1d(channels, 16, 7, stride=2, padding=3), nn.ReLU()),
            *(nn.Conv1d(16, 32, 5, stride=2, padding=2), nn.ReLU()),
            *(nn.Conv1d(32, 64, 3, stride=2, padding=1), nn.ReLU()),
            nn.AdaptiveAvgPool1d(4),
        )
        self.hidden = nn.Sequential(nn.Flatten(), nn.Linear(256, 64), nn.ReLU())
        self.classify = nn.Linear(64, num_classes)

    def forward(self, series: Tensor) -> Tensor:
        """Return the logits of series [samples, channels, 128]."""
        logits: Tensor = self.classify(self.hidden(self.convolutions(series)))
        return logits


def read_windows(file: Path) -> Data:
    """Return the windows [n, 9, 128] of each subject.

    In one version of the file, windows [128, 9] were reshaped to [9, 128] without a transposition,
    which mixes the channels. The mean of each channel tells: gravity acts on one of them.
    """
    with numpy.load(file) as archive:
        parts = [
            [archive[f"{name}_{part}"] for name in ("x", "y", "clients")]
            for part in ("train", "test")
        ]
    for part in parts:
        windows = part[0].astype(numpy.float32)
        if windows.mean((0, 2)).max() < _GRAVITY / 2:
            windows = windows.reshape(-1, 128, 9).transpose(0, 2, 1)
        part[0] = windows
    (x, y, owner), (x_test, y_test, test_owner) = parts
    data = {}
    for name in numpy.unique(owner).tolist():
        train, test = owner == name, test_owner == name
        data[name] = (x[train], y[train]), (x_test[test], y_test[test])
    return data


def make_features(windows: Array) -> Array:
    """Return 16 numbers of each channel and of the norm of each of the three sensors [n, 192]."""
    sensors = windows.reshape(len(windows), 3, 3, -1)
    channels = numpy.concatenate([windows, numpy.linalg.norm(sensors, axis=2)], axis=1)
    power = numpy.abs(numpy.fft.rfft(channels - channels.mean(2, keepdims=True))) ** 2
    bands = [power[..., a:b].sum(2) for a, b in pairwise(_BANDS)]
    features = [
        channels.mean(2),
        channels.std(2),
        channels.min(2),
        channels.max(2),
        *numpy.quantile(channels, (0.25, 0.5, 0.75), axis=2),
        numpy.abs(numpy.diff(channels)).mean(2),
        *(numpy.log(each + 1e-3) for each in bands),
    ]
    return numpy.concatenate(features, axis=1).astype(numpy.float32)


def _standardize(data: Data, axes: tuple[int, ...]) -> Data:
    """Scale by mean and standard deviation of all training samples, over axes."""
    trained = numpy.concatenate([train for (train, _), _ in data.values()])
    mean, std = trained.mean(axes, keepdims=True), trained.std(axes, keepdims=True)
    return {
        name: ((((x - mean) / std), y), (((x_test - mean) / std), y_test))
        for name, ((x, y), (x_test, y_test)) in data.items()
    }


def _file() -> Path:
    file = Path(os.environ.get("MPFEDCL_DATA", ".")) / "har" / "har.npz"
    if not file.is_file():
        raise InvalidInput(
            f"{file} is missing; MPFEDCL_DATA must name the data folder with har/har.npz."
        )
    return file


@cache
def read_series() -> Data:
    """Return the series of each subject, each channel standardized."""
    return _standardize(read_windows(_file()), (0, 2))


@cache
def read_features() -> Data:
    """Return the features of each subject, each standardized."""
    data = {
        name: ((make_features(x), y), (make_features(x_test), y_test))
        for name, ((x, y), (x_test, y_test)) in read_windows(_file()).items()
    }
    return _standardize(data, (0,))


def choose_rate(base: Experiment, runs: Runs) -> float:
    """Return the learning rate that is best on validation windows of the training windows."""
    base = base.replace(rounds=ROUNDS, evaluate_every=ROUNDS, seed=TUNING_SEED)
    tried = {rate: base.replace(train__lr=rate, partition__validation=0.2) for rate in RATES}
    runs.complete(tried.values())
    scores = {rate: runs.summary(each)["accuracy"] or 0.0 for rate, each in tried.items()}
    return max(scores, key=lambda rate: (scores[rate], -rate))


def measure(base: Experiment, runs: Runs, rounds: int = ROUNDS) -> Json:
    """Return the results of a method, a value per seed."""
    rate = choose_rate(base, runs) if base.model.name is not None else None
    base = base.replace(rounds=rounds, evaluate_every=rounds)
    if rate is not None:
        base = base.replace(train__lr=rate)
    seeds = SEEDS[:1] if runs.quick else SEEDS
    records = runs.by_seed(base, seeds)
    summaries = [runs.summary(base.replace(seed=seed)) for seed in seeds]
    sent = sum(sum(record["bytes"].values()) for record in records[0])
    return {
        "local_test": [each["accuracy"] for each in summaries],
        "global_test": [each["accuracy_global"] for each in summaries],
        "megabytes": sent / len(records[0][0]["clients"]["answered"]) / 1e6,
        "rate": "-" if rate is None else f"{rate:g}",
    }


def tabulate(found: Mapping[tuple[str, str], Json]) -> str:
    """Return the table, with the best row and those not clearly behind it marked."""
    shown = {key: list(key) for key in found}
    for test in TESTS:
        marks = mark_best({str(key): each[test] for key, each in found.items()})
        for key, each in found.items():
            mark = {"best": BEST, "within": WITHIN, None: ""}[marks[str(key)]]
            shown[key].append(f"{mark}{mean_std(each[test])}")
    for key, each in found.items():
        shown[key] += [f"{each['megabytes']:.2f}", each["rate"]]
    return markdown(COLUMNS, list(shown.values()))


def main(runs: Runs) -> None:
    """Write the table, a row at a time; learning rates are chosen on validation windows."""
    network = f"{__name__}:SeriesCnn"
    rows: list[tuple[str, str, str | None, str, int]] = []
    for data, name in INPUTS.items():
        rows.append(("fedgauss", data, None, f"closed form on {name}", 1))
        rows.append(("fedavg", data, "linear", f"logistic regression on {name}", ROUNDS))
    rows += [(method, "read_series", network, "own 1-D CNN", ROUNDS) for method in TRAINED]
    longer = f"own 1-D CNN, {MORE_ROUNDS} rounds"
    rows.append(("fedavg", "read_series", network, longer, MORE_ROUNDS))
    found: dict[tuple[str, str], Json] = {}
    # FedGauss on features, and FedAvg with the CNN.
    for method, data, model, shown, rounds in [rows[2], rows[4]] if runs.quick else rows:
        base = Experiment(method=method).replace(
            **BASE, dataset__name=f"{__name__}:{data}", model__name=model
        )
        found[method, shown] = measure(base, runs, rounds)
        table = f"{tabulate(found)}\n{explain_marks(1 if runs.quick else len(SEEDS))}\n"
        if not runs.quick:
            fill_page(DOCS / "natural-clients.md", {"har": table})
    print(table)
