"""How often images are flagged as unknown: known ones by mistake, foreign ones rightly.

    python scripts/measure_unknown.py [FOLDER]

Needs MPFEDCL_DATA with mnist, office10 and sixdomain.

Trains three runs into FOLDER (runs/unknown), then asks them about images that were used neither for
training nor for the thresholds. Prints Markdown.
"""

import os
import sys
from pathlib import Path

import numpy

from mpfedcl import Experiment, Predictor, run
from mpfedcl.core.images import Images
from mpfedcl.data.client_split import split_among_clients
from mpfedcl.data.reader import open_data_set
from mpfedcl.data.sample_format import ImageFormat
from mpfedcl.experiment.data_folder import find_data_folder
from mpfedcl.experiment.settings import DatasetSettings
from mpfedcl.report.tables import TextTable

COMMON = {"train__lr": 0.1, "evaluate_every": 60}
FALSE_ALARM_RATES = (0.01, 0.05, 0.1)


def main() -> None:
    """Train what is not there yet, and measure."""
    if "MPFEDCL_DATA" not in os.environ:
        sys.exit(__doc__)
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/unknown")
    rows = [*digits_rows(folder), *left_out_rows(folder), *office_rows(folder)]
    columns = ["run", "images", "number", *(f"{100 * rate:g} %" for rate in FALSE_ALARM_RATES)]
    print(TextTable("", columns, rows).markdown())


def digits_rows(folder: Path) -> list[list[str]]:
    """The digits inside the package; MNIST's other test digits are new to them."""
    path = trained(folder / "digits", Experiment())
    data = numpy.load(find_data_folder(DatasetSettings())[0] / "mnist" / "mnist.npz")
    inside = open_data_set(DatasetSettings())
    small = ImageFormat(28, 28, is_color=False)
    known = inside.store.load(numpy.arange(len(inside.store)), small)
    seen = {image.tobytes() for image in known}
    new = numpy.stack([image for image in data["x_test"] if image.tobytes() not in seen])
    sample_index = open_data_set(DatasetSettings(name="office10"))
    photos = sample_index.store.load(numpy.arange(len(sample_index.store)), small)
    return [
        flagged("digits 0 to 9", "other digits of MNIST (known)", path, new),
        flagged("digits 0 to 9", "photos of Office-10", path, photos),
    ]


def left_out_rows(folder: Path) -> list[list[str]]:
    """Digits without the classes 8 and 9, which are then unknown."""
    data = numpy.load(find_data_folder(DatasetSettings())[0] / "mnist" / "mnist.npz")
    train, test = data["y_train"] < 8, data["y_test"] < 8
    half = numpy.arange(len(test)) % 2 == 0
    root = folder / "without-8-and-9-data"
    root.mkdir(parents=True, exist_ok=True)
    parts = {"x_train": data["x_train"][train], "y_train": data["y_train"][train]}
    parts |= {"x_test": data["x_test"][test & half], "y_test": data["y_test"][test & half]}
    numpy.savez(root / "digits.npz", **parts)
    experiment = Experiment().replace(
        dataset__name="folder",
        dataset__root=root,
        dataset__train_size=2000,
        encoder__name="none",
        prototypes__per_class=2,
        partition__test="shared",
        partition__alpha=1.0,
    )
    path = trained(folder / "without-8-and-9", experiment)
    return [
        flagged("digits 0 to 7", "other digits 0 to 7 (known)", path, data["x_test"][test & ~half]),
        flagged("digits 0 to 7", "digits 8 and 9", path, data["x_test"][~test]),
    ]


def office_rows(folder: Path) -> list[list[str]]:
    """Office-10 behind the frozen encoder; animals, guitars and houses are foreign to it."""
    # A quarter of the usual test images, so that others are left over.
    experiment = Experiment().replace(
        dataset__name="office10", partition__kind="feature", dataset__test_per_class=25
    )
    path = trained(folder / "office10", experiment)
    sample_index = open_data_set(DatasetSettings(name="office10"))
    split = split_among_clients(sample_index, experiment.resolved())
    left = numpy.setdiff1d(numpy.arange(len(sample_index.store)), split.all_rows)
    foreign = open_data_set(DatasetSettings(name="sixdomain", domains=("photo",)))
    every = numpy.arange(len(foreign.store))
    wanted = ImageFormat(64, 64, is_color=True)
    known = sample_index.store.load(left, wanted)
    animals = foreign.store.load(every, wanted)
    return [
        flagged("Office-10", "other photos of it (known)", path, known),
        flagged("Office-10", "photos of sixdomain", path, animals),
    ]


def trained(path: Path, experiment: Experiment) -> Path:
    """Return a finished run of 60 rounds, run now if need be."""
    if not (path / "summary.json").is_file():
        run(experiment.replace(rounds=60, **COMMON), path)
    return path


def flagged(name: str, what: str, path: Path, images: Images) -> list[str]:
    """Return the share of images that are flagged, at each false-alarm rate."""
    shares = []
    for rate in FALSE_ALARM_RATES:
        predictions = Predictor.load(path, false_alarms=rate).predict(images)
        shares.append(100 * sum(bool(each.unknown) for each in predictions) / len(images))
    return [name, what, f"{len(images):,}", *(f"{share:.1f}" for share in shares)]


if __name__ == "__main__":
    main()
