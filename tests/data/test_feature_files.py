"""Pictures encoded into files of features: a run on them is the run on the pictures."""

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from numpy.typing import NDArray

from command_results import Refused
from encoder_experiments import pictured
from mpfedcl import run
from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.sample_index import open_data_set, open_own_samples
from mpfedcl.experiment.settings import DatasetSettings
from mpfedcl.models.resnet import ResNet18
from small_experiments import Say, save_images, save_vectors

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("own_places", "narrow_resnet")]

ENCODE = ("--encoder", "random-resnet18")
NAMES = ("ant", "bee", "cat", "dog")


def read(path: Path) -> dict[str, NDArray[Any]]:
    with numpy.load(path, allow_pickle=False) as content:
        return dict(content)


def test_run_on_encoded_features_equals_run_on_images(
    pictures: Path, tmp_path: Path, said: Say, refused: Refused
) -> None:
    out = tmp_path / "features"
    code, shown, _ = said("data", "encode", pictures, *ENCODE, "--out", out)
    assert code == 0
    assert "ink.npz: 24 vectors" in shown
    assert sorted(path.name for path in out.iterdir()) == ["ink.npz", "paint.npz", "photo.npz"]
    ink = read(out / "ink.npz")
    assert ink["classes"].tolist() == list(NAMES)
    assert ink["x_train"].dtype == numpy.float32
    assert ink["x_train"].shape == (24, ResNet18.feature_size)
    assert "x_test" not in ink
    for changes in ({}, {"partition__kind": "label", "partition__alpha": 1.0, "seed": 3}):
        experiment = pictured(pictures, method="fedavg", rounds=1, **changes)
        name = str(len(changes))
        before = run(experiment, tmp_path / f"pictures-{name}")
        features = experiment.replace(dataset__root=out, encoder__name=None)
        after = run(features, tmp_path / f"features-{name}")
        assert before.summary is not None
        assert after.summary is not None
        for key in ("accuracy", "accuracy_per_client", "predictors", "loss"):
            assert before.summary[key] == after.summary[key]
        held = [json.loads((each.path / "partition.json").read_text()) for each in (before, after)]
        assert all(held[0][key] == held[1][key] for key in ("classes", "clients", "input_means"))
    # What is there stays.
    assert f"out is '{out}'; it must be a new or an empty folder." in refused(
        "data", "encode", pictures, *ENCODE, "--out", out
    )


def test_encoding_keeps_labels_and_test_sets(tmp_path: Path, said: Say) -> None:
    """Labels that are numbers alone get no names."""
    save_images(tmp_path / "images" / "a.npz", num_train=9, num_test=6)
    out = tmp_path / "features"
    assert said("data", "encode", tmp_path / "images", *ENCODE, "--out", out)[0] == 0
    before, after = read(tmp_path / "images" / "a.npz"), read(out / "a.npz")
    assert after.keys() == {"x_train", "y_train", "x_test", "y_test"}
    assert all((before[key] == after[key]).all() for key in ("y_train", "y_test"))
    assert after["x_test"].shape == (6, ResNet18.feature_size)


def test_input_that_cannot_be_encoded_is_rejected(tmp_path: Path, refused: Refused) -> None:
    save_vectors(tmp_path / "vectors" / "a.npz")
    out = ("--out", tmp_path / "features")
    words = ("data", "encode", tmp_path / "vectors")
    assert "holds vectors of 5 numbers; it must hold images" in refused(*words, *ENCODE, *out)
    assert "encoder is 'none'; it must be an encoder" in refused(*words, "--encoder", "none", *out)
    assert "does not exist" in refused("data", "encode", tmp_path / "no", *ENCODE, *out)


def save_named(path: Path, names: object, labels: object = (0, 1)) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    numpy.savez(
        path,
        x_train=numpy.eye(2, 3, dtype=numpy.float32),
        y_train=numpy.array(labels),
        classes=numpy.array(names),
    )
    return path


def test_class_names_are_read_from_npz_files(tmp_path: Path) -> None:
    path = save_named(tmp_path / "set" / "a.npz", ["ox", "cow"])
    folder = DatasetSettings(name="folder", root=tmp_path / "set")
    assert open_data_set(folder).class_names == ("ox", "cow")
    own = open_own_samples(path, ("bull", "cow", "ox"))
    assert own.class_names == ("bull", "cow", "ox")
    assert own.domains[0].train.labels.tolist() == [2, 1]
    with pytest.raises(InvalidInput, match=r"has the class 'ox'; the run's classes are cow, hen"):
        open_own_samples(path, ("cow", "hen"))
    save_named(tmp_path / "set" / "b.npz", ["cow", "ox"])
    with pytest.raises(InvalidInput, match="must name the same classes in the same order"):
        open_data_set(folder)


@pytest.mark.parametrize(
    "names", [[1, 2], ["a", "a"], [["a"], ["b"]], ["a", ""], "a", ["a\n", "b"]]
)
def test_invalid_class_names_are_rejected(tmp_path: Path, names: object) -> None:
    save_named(tmp_path / "a.npz", names)
    with pytest.raises(InvalidInput, match="it must be a list of different names"):
        open_data_set(DatasetSettings(name="folder", root=tmp_path))


def test_labels_without_a_class_name_are_rejected(tmp_path: Path) -> None:
    save_named(tmp_path / "a.npz", ["a"])
    with pytest.raises(InvalidInput, match=r"has the label 1; labels must be 0 to 0\."):
        open_data_set(DatasetSettings(name="folder", root=tmp_path))
