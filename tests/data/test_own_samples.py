"""One client's own images: every layout, by the classes that a run knows."""

from pathlib import Path

import numpy
import pytest
from PIL import Image

from mpfedcl import InvalidInput
from mpfedcl.data.sample_index import open_own_samples
from mpfedcl.data.samples import ImageFormat, SampleIndex

CLASSES = ("ant", "bee", "cat")


def write_class(folder: Path, count: int) -> None:
    folder.mkdir(parents=True)
    for number in range(count):
        Image.new("L", (4, 4), number).save(folder / f"{number}.png")


def write_archive(path: Path, labels: list[int], test_labels: list[int] | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {"x_train": numpy.zeros((len(labels), 4, 4), numpy.uint8), "y_train": labels}
    if test_labels is not None:
        arrays["x_test"] = numpy.zeros((len(test_labels), 4, 4), numpy.uint8)
        arrays["y_test"] = test_labels
    numpy.savez(path, **arrays)  # type: ignore[arg-type]


def labels_of(sample_index: SampleIndex) -> dict[str, tuple[list[int], list[int] | None]]:
    return {
        each.name: (
            each.train.labels.tolist(),
            None if each.test is None else each.test.labels.tolist(),
        )
        for each in sample_index.domains
    }


def test_class_folders_are_read_with_the_classes_of_the_run(tmp_path: Path) -> None:
    write_class(tmp_path / "mine" / "cat", 2)
    write_class(tmp_path / "mine" / "ant", 1)
    # What lies beside it is nobody's business.
    write_class(tmp_path / "other" / "zebra", 1)
    sample_index = open_own_samples(tmp_path / "mine", CLASSES)
    assert sample_index.class_names == CLASSES
    assert labels_of(sample_index) == {"mine": ([0, 2, 2], None)}
    first = sample_index.store.load(numpy.array([2]), ImageFormat(4, 4, is_color=False))
    assert first[0, 0, 0] == 1


def test_class_folders_within_domains_are_read(tmp_path: Path) -> None:
    write_class(tmp_path / "day" / "bee", 2)
    write_class(tmp_path / "night" / "cat", 1)
    assert labels_of(open_own_samples(tmp_path, CLASSES)) == {
        "day": ([1, 1], None),
        "night": ([2], None),
    }


def test_npz_files_are_read_with_the_classes_of_the_run(tmp_path: Path) -> None:
    write_archive(tmp_path / "set" / "day.npz", [0, 2, 1], [2])
    write_archive(tmp_path / "set" / "night.npz", [1])
    file = open_own_samples(tmp_path / "set" / "day.npz", CLASSES)
    assert labels_of(file) == {"day": ([0, 2, 1], [2])}
    assert file.class_names == CLASSES
    folder = open_own_samples(tmp_path / "set", CLASSES)
    assert labels_of(folder) == {"day": ([0, 2, 1], [2]), "night": ([1], None)}


def test_class_unknown_to_the_run_is_rejected(tmp_path: Path) -> None:
    write_class(tmp_path / "ant", 1)
    write_class(tmp_path / "yak", 1)
    with pytest.raises(InvalidInput, match="the class 'yak'; the run's classes are ant, bee, cat"):
        open_own_samples(tmp_path, CLASSES)


def test_label_unknown_to_the_run_is_rejected(tmp_path: Path) -> None:
    write_archive(tmp_path / "set" / "day.npz", [0, 3])
    with pytest.raises(InvalidInput, match="the label 3; the run has 3 classes"):
        open_own_samples(tmp_path / "set", CLASSES)
    with pytest.raises(InvalidInput, match="y_train"):
        open_own_samples(tmp_path / "set" / "day.npz", CLASSES)


def test_paths_without_samples_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("no images")
    write_class(tmp_path / "flat", 2)
    write_class(tmp_path / "hollow" / "ant", 1)
    (tmp_path / "hollow" / "bee").mkdir()
    for name, expected in {
        "missing": "does not exist",
        "text.txt": "a file; it must be",
        "empty": "neither class folders nor npz files",
        "flat": "neither class folders nor npz files",
        "hollow": "bee has no images",
    }.items():
        with pytest.raises(InvalidInput, match=expected):
            open_own_samples(tmp_path / name, CLASSES)
