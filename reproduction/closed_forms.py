"""FedGauss next to other closed forms, on images, series and tables: tables of docs/one-shot.md.

All rows have the same inputs, and all predictors on the local test sets have the client's label
prior. Nothing is trained and nothing is tuned. `docs/results/closed-forms.csv` has every seed.
"""

import csv
import os
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy
from numpy.typing import NDArray
from sklearn import datasets

from mpfedcl import Experiment
from reproduction.runs import Runs
from reproduction.tables import DOCS, fill_page, markdown, mean_std, paired_difference

Array = NDArray[Any]
Table = dict[tuple[str, str, str], list[float]]
"""Accuracies by seed, by test set, setting and method."""

SEEDS = (0, 1, 2, 3, 4)
METHODS = {
    "FedGauss": ("fedgauss", "personal_classifier_prior", "global_classifier"),
    "FedLDA": ("fedlda", "global_classifier_prior", "global_classifier"),
    "FedRidge": ("fedridge", "global_classifier_prior", "global_classifier"),
    "own form": ("local-gauss", "personal_classifier_prior", None),
}
"""Each method, and its predictors on the local and on the global test sets."""
SKEWS: dict[str, dict[str, Any]] = {
    "0.05": {"partition__alpha": 0.05},
    "0.5": {"partition__alpha": 0.5},
    "feature": {"partition__kind": "feature"},
}
TABLES = ("iris", "wine", "breast_cancer", "digits")
FIRST = "first version"
"""The row of FedGauss before lambdas below 0.4, random features and sharpness."""
FILE = DOCS / "results" / "closed-forms.csv"


def settings(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the settings of each experiment; `{seed}` in a root is the seed."""
    for name in ("office10", "sixdomain", "digit5"):
        for skew, changes in SKEWS.items():
            yield f"{name} {skew}", {"dataset__name": name, "encoder__name": "resnet18", **changes}
    mnist = {"dataset__name": "mnist", "encoder__name": "random-filters"}
    for clients, alpha in ((5, 0.05), (5, 0.5), (20, 0.05)):
        changes = {"clients": clients, "partition__alpha": alpha, "dataset__train_size": 2000}
        yield f"mnist {alpha}, {clients} clients", {**mnist, **changes}
    data = Path(os.environ.get("MPFEDCL_DATA", "."))
    yield "HAR, 30 subjects", _own(describe_series(data / "har" / "har.npz", folder), "natural")
    yield "heart, 4 hospitals", _own(copy_archives(data / "heart", folder), "feature")
    for name in TABLES:
        root = str(folder / "tables" / name / "{seed}")
        yield f"{name} 0.5", {**_own(root, "label"), "partition__alpha": 0.5, "clients": 5}


def _own(root: str, kind: str) -> dict[str, Any]:
    return {
        "dataset__name": "folder",
        "dataset__root": root,
        "encoder__name": "none",
        "partition__kind": kind,
    }


def copy_archives(source: Path, folder: Path) -> str:
    """Copy the npz files of a data set, without its other files."""
    target = folder / source.name
    target.mkdir(parents=True, exist_ok=True)
    for file in source.glob("*.npz"):
        (target / file.name).write_bytes(file.read_bytes())
    return str(target)


def describe_series(source: Path, folder: Path) -> str:
    """Write 14 numbers per channel of each window: moments, extremes, and energies by frequency."""
    target = folder / source.stem / source.name
    if not target.is_file():
        with numpy.load(source) as file:
            arrays = {name: file[name] for name in file.files}
        train, test = (_describe(arrays[f"x_{part}"]) for part in ("train", "test"))
        mean, deviation = train.mean(0), train.std(0)
        arrays["x_train"] = ((train - mean) / deviation).astype("f4")
        arrays["x_test"] = ((test - mean) / deviation).astype("f4")
        target.parent.mkdir(parents=True, exist_ok=True)
        numpy.savez(target, **arrays)
    return str(target.parent)


def _describe(windows: Array) -> Array:
    windows = windows.astype("f8")
    energies = numpy.abs(numpy.fft.rfft(windows, axis=2)[:, :, 1:]) ** 2
    bands = [numpy.log(1e-3 + part.mean(2)) for part in numpy.array_split(energies, 10, axis=2)]
    moments = [windows.mean(2), windows.std(2), windows.min(2), windows.max(2)]
    return numpy.stack([*moments, *bands], axis=2).reshape(len(windows), -1)


def write_table(name: str, root: Path, seed: int) -> None:
    """Write a table of scikit-learn, 70 % of the rows to train on, scaled by these rows."""
    if root.is_dir():
        return
    values, labels = getattr(datasets, f"load_{name}")(return_X_y=True)
    order = numpy.random.default_rng(1000 + seed).permutation(len(labels))
    values, labels, count = values[order], labels[order], int(0.7 * len(labels))
    mean, deviation = values[:count].mean(0), values[:count].std(0)
    scaled = ((values - mean) / numpy.where(deviation > 0, deviation, 1)).astype("f4")
    root.mkdir(parents=True)
    arrays = {"x_train": scaled[:count], "y_train": labels[:count]}
    numpy.savez(root / "all.npz", **arrays, x_test=scaled[count:], y_test=labels[count:])


def measure(runs: Runs, changes: dict[str, Any], method: str) -> Iterator[dict[str, Any]]:
    """Yield the accuracies of a method by seed, predictors by test set; one for a fixed split."""
    is_fixed = "{seed}" not in changes.get("dataset__root", "{seed}")
    for seed in SEEDS[:1] if runs.quick or is_fixed else SEEDS:
        given = dict(changes)
        if "dataset__root" in given:
            root = Path(given["dataset__root"].format(seed=seed))
            if root.parent.name in TABLES:
                write_table(root.parent.name, root, seed)
            given["dataset__root"] = root
        experiment = Experiment(method=method, seed=seed, rounds=1).replace(
            **given,
            partition__test="matched",
            evaluate_predictors="all",
            personal_models=False,
            statistics__keep="pooled",
        )
        yield runs.summary(experiment)["predictors"]


def main(runs: Runs) -> None:
    """Measure what is missing, keep every seed's result, and fill the tables of the page."""
    found: Table = {}
    for name, changes in settings(runs.folder):
        for title, (method, *predictors) in METHODS.items():
            tables = list(measure(runs, changes, method))
            for test, predictor in zip(("local_test", "global_test"), predictors, strict=True):
                if predictor:
                    row = title + ("+prior" if predictor == "global_classifier_prior" else "")
                    found[test, name, row] = [table[test][predictor] for table in tables]
    if runs.quick:
        print(found)
        return
    # Measured once, with the same study and the code of the first version.
    kept = {key: values for key, values in read(FILE).items() if key[2] == FIRST}
    write(FILE, kept | found)
    fill(kept | found)


def read(file: Path) -> Table:
    """Read the accuracy of every seed."""
    found: Table = {}
    with file.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            key = row["test"], row["setting"], row["method"]
            found.setdefault(key, []).append(float(row["accuracy"]))
    return found


def write(file: Path, found: Table) -> None:
    """Write the accuracy of every seed."""
    with file.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(("test", "setting", "method", "seed", "accuracy"))
        for key, values in found.items():
            writer.writerows((*key, seed, f"{each:.6f}") for seed, each in enumerate(values))


def fill(found: Table) -> None:
    """Fill the tables of the page: each method, and the change and the best rival by seed."""
    parts = {}
    for test in ("local_test", "global_test"):
        rows: dict[str, dict[str, list[float]]] = {}
        for (on, name, method), values in found.items():
            if on == test:
                rows.setdefault(name, {})[method] = values
        lines = [_compare(name, values) for name, values in rows.items()]
        columns = ["setting", *next(iter(rows.values())), "change", "against the best rival"]
        parts[f"closed-forms {test}"] = markdown(columns, lines)
    fill_page(DOCS / "one-shot.md", parts)


def _compare(name: str, values: dict[str, list[float]]) -> list[str]:
    ours = values["FedGauss"]
    means = {
        title: fmean(each) for title, each in values.items() if title not in (FIRST, "FedGauss")
    }
    best = max(means, key=means.__getitem__)
    change, lead = (paired_difference(ours, values[title]) for title in (FIRST, best))
    return [name, *map(mean_std, values.values()), f"{change}", f"{lead} ({best})"]
