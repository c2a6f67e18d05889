"""`data prepare`: MNIST-M from its images and lists, and the sentence for each fault."""

import tarfile
from pathlib import Path

import numpy
import pytest
from original_files import random_pixels, save_picture, write_file, write_mnist_m
from prepared_sets import load, prepare, refusal


def test_mnist_m_labels_follow_the_list(source: Path, data: Path) -> None:
    images = write_mnist_m(source / "mnist_m")
    prepare(source, data)
    written = load(data, "mnist_m")
    assert written["y_train"].tolist() == list(reversed(range(10)))
    assert numpy.array_equal(written["x_train"], images[::-1])
    assert len(written["y_test"]) == 4


def test_mnist_m_is_prepared_from_its_archive(source: Path, data: Path, tmp_path: Path) -> None:
    write_mnist_m(tmp_path / "mnist_m")
    with tarfile.open(source / "mnist_m.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "mnist_m", "mnist_m")
    prepare(source, data)
    assert load(data, "mnist_m")["y_test"].tolist() == [3, 2, 1, 0]


def test_gray_mnist_m_images_are_written_in_color(source: Path, data: Path) -> None:
    write_mnist_m(source)
    for path in source.rglob("*.png"):
        save_picture(path, random_pixels(32, 32))
    prepare(source, data)
    assert load(data, "mnist_m")["x_train"].shape == (10, 32, 32, 3)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("00000000.png 10", "has the label 10"),
        ("00000000.png", "has '00000000.png' in line 1"),
        ("00000001.png 1\n00000000.png one", "in line 2"),
        ("../../secret.png 1", "in line 1; each line must be an image's name and its label"),
        ("00000000.png 1\n00000000.png 2", "has '00000000.png 2' in line 2"),
        ("99999999.png 1", "names 1 images that are not there"),
        ("\n", "has '' in line 1"),
    ],
)
def test_invalid_label_files_are_rejected(source: Path, data: Path, lines: str, told: str) -> None:
    write_mnist_m(source)
    path = write_file(source / "mnist_m_train_labels.txt", lines.encode())
    sentence = refusal(source, data)
    assert told in sentence
    assert str(path) in sentence


def test_broken_image_is_named(source: Path, data: Path) -> None:
    write_mnist_m(source)
    path = write_file(source / "mnist_m_train" / "00000003.png", b"no picture")
    assert f"{path} (" in refusal(source, data)
