"""How often images are flagged as out of distribution: the table of docs/deployment.md.

Three runs are asked about images that were used neither for training nor for the thresholds. Needs
mnist, office10 and sixdomain in the data folder (MPFEDCL_DATA).
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy

from mpfedcl import Experiment, Predictor
from reproduction.items import DOMAINS, data_file
from reproduction.runs import Runs
from reproduction.tables import markdown

FALSE_ALARM_RATES = (0.01, 0.05, 0.1)
BASE = Experiment(rounds=60, evaluate_every=60).replace(dataset__name="folder", train__lr=0.1)


def digits(folder: Path, below: int) -> tuple[Experiment, Any, Any]:
    """Return a run on some classes of MNIST, other images of these, and images of the rest.

    Every other test image is kept from the run.
    """
    with numpy.load(data_file("mnist", "mnist")) as data:
        train, test = data["y_train"] < below, data["y_test"] < below
        half = numpy.arange(len(test)) % 2 == 0
        folder.mkdir(parents=True, exist_ok=True)
        numpy.savez(
            folder / "digits.npz",
            x_train=data["x_train"][train],
            y_train=data["y_train"][train],
            x_test=data["x_test"][test & half],
            y_test=data["y_test"][test & half],
        )
        known, foreign = data["x_test"][test & ~half], data["x_test"][~test]
    experiment = BASE.replace(
        dataset__root=folder,
        dataset__train_size=2000,
        encoder__name="none",
        prototypes__per_class=2,
        partition__test="shared",
        partition__alpha=1.0,
    )
    return experiment, known, foreign


def photos(folder: Path) -> tuple[Experiment, list[Path]]:
    """Return a run on two thirds of Office-10, a domain per client, and the other photos."""
    left = []
    for domain in DOMAINS["office10"]:
        for number, image in enumerate(sorted(data_file("office10", domain).glob("*/*"))):
            if number % 3 == 0:
                left.append(image)
                continue
            place = folder / domain / image.parent.name / image.name
            place.parent.mkdir(parents=True, exist_ok=True)
            if not place.exists():
                os.link(image, place)
    return BASE.replace(dataset__root=folder, partition__kind="feature"), left


def main(runs: Runs) -> None:
    """Print the share of images that are flagged, at three rates of false alarms."""
    data = runs.folder / "data"
    all_digits, other_digits, _ = digits(data / "digits", 10)
    some_digits, other_some, missing_digits = digits(data / "without-8-and-9", 8)
    office, other_photos = photos(data / "office10")
    every_photo = [p for d in DOMAINS["office10"] for p in data_file("office10", d).glob("*/*")]
    animals = sorted(data_file("sixdomain", "photo").glob("*/*"))
    asked: list[tuple[str, str, Experiment, Sequence[Any]]] = [
        ("digits 0 to 9", "other digits of MNIST (known)", all_digits, other_digits),
        ("digits 0 to 9", "photos of Office-10", all_digits, every_photo),
        ("digits 0 to 7", "other digits 0 to 7 (known)", some_digits, other_some),
        ("digits 0 to 7", "digits 8 and 9", some_digits, missing_digits),
        ("Office-10", "other photos of it (known)", office, other_photos),
        ("Office-10", "photos of sixdomain", office, animals),
    ]
    runs.complete(experiment for _, _, experiment, _ in asked)
    rows = []
    for name, what, experiment, images in asked:
        path, shares = runs.path(runs.prepare(experiment)), []
        for rate in FALSE_ALARM_RATES:
            predictions = Predictor.load(path, false_alarms=rate).predict(images)
            shares.append(100 * sum(bool(each.unknown) for each in predictions) / len(images))
        rows.append([name, what, f"{len(images):,}", *(f"{share:.1f}" for share in shares)])
    rates = (f"{100 * rate:g} %" for rate in FALSE_ALARM_RATES)
    print(markdown(["run", "images", "number", *rates], rows))
