"""Data that cannot be used: one clear sentence with exit code 2."""

from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

from command_results import Refused

pytestmark = pytest.mark.usefixtures("elsewhere")

PIXELS = ("--dataset.name", "folder", "--encoder.name", "none")


def image_arrays(**changes: Any) -> dict[str, Any]:
    arrays: dict[str, Any] = {
        "x_train": numpy.zeros((12, 4, 4), numpy.uint8),
        "y_train": numpy.arange(12) % 3,
        "x_test": numpy.zeros((6, 4, 4), numpy.uint8),
        "y_test": numpy.arange(6) % 3,
    }
    return {name: value for name, value in (arrays | changes).items() if value is not None}


BAD_ARCHIVES: dict[str, tuple[dict[str, Any], str]] = {
    "a missing key": (image_arrays(y_train=None), "lacks y_train"),
    "a missing test label": (image_arrays(y_test=None), "lacks y_test"),
    "other keys": ({"images": numpy.zeros(3)}, "lacks x_train, y_train"),
    "floats": (
        image_arrays(x_train=numpy.zeros((12, 4, 4))),
        "x_train has arrays of 4 x 4 numbers; a set must have only images",
    ),
    "labels as floats": (image_arrays(y_train=numpy.zeros(12)), "y_train has dtype float64"),
    "a negative label": (image_arrays(y_train=numpy.arange(12) - 1), "has the label -1"),
    "a label beyond reason": (image_arrays(y_train=numpy.arange(12) * 10**6), "has the label"),
    "pickled objects": (
        image_arrays(y_train=numpy.array([{}] * 12, dtype=object)),
        "pickle",
    ),
    "too few labels": (image_arrays(y_train=numpy.arange(11) % 3), "12 images and y_train 11"),
    "no images": (
        image_arrays(x_train=numpy.zeros((0, 4, 4), numpy.uint8), y_train=numpy.zeros(0, int)),
        "0 images",
    ),
    "flat images": (image_arrays(x_train=numpy.zeros((12, 16), numpy.uint8)), "shape (12, 16)"),
}


@pytest.mark.parametrize("kind", BAD_ARCHIVES)
def test_invalid_archives_are_rejected(tmp_path: Path, refused: Refused, kind: str) -> None:
    arrays, expected = BAD_ARCHIVES[kind]
    (tmp_path / "data").mkdir()
    numpy.savez(tmp_path / "data" / "bad.npz", **arrays)
    sentence = refused("run", *PIXELS, "--dataset.root", tmp_path / "data")
    assert expected in sentence
    assert "bad.npz" in sentence


def test_labels_out_of_the_range_of_a_known_set_are_rejected(
    tmp_path: Path, refused: Refused
) -> None:
    (tmp_path / "data" / "mnist").mkdir(parents=True)
    labels = numpy.arange(12)
    numpy.savez(tmp_path / "data" / "mnist" / "mnist.npz", **image_arrays(y_train=labels))
    sentence = refused("run", "--dataset.name", "mnist", "--dataset.root", tmp_path / "data")
    assert "has the label 11; labels must be 0 to 9" in sentence


def save_pictures(root: Path) -> Path:
    for name in ("cat", "dog"):
        (root / "photo" / name).mkdir(parents=True)
        for number in range(4):
            Image.new("L", (4, 4), 20 * number).save(root / "photo" / name / f"{number}.png")
    return root


def test_image_folder_with_an_empty_class_is_rejected(tmp_path: Path, refused: Refused) -> None:
    root = save_pictures(tmp_path / "data")
    (root / "photo" / "emu").mkdir()
    sentence = refused("run", *PIXELS, "--dataset.root", root)
    assert "photo/emu has no images" in sentence


@pytest.mark.parametrize("content", [b"", b"no picture", b"\x89PNG\r\n\x1a\n half"])
def test_image_folder_with_a_broken_file_is_rejected(
    tmp_path: Path, refused: Refused, content: bytes
) -> None:
    root = save_pictures(tmp_path / "data")
    (root / "photo" / "cat" / "2.png").write_bytes(content)
    sentence = refused("run", *PIXELS, "--dataset.root", root)
    assert "cat/2.png" in sentence


def test_file_as_data_folder_is_rejected(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "data").write_text("nothing")
    sentence = refused("run", *PIXELS, "--dataset.root", tmp_path / "data")
    assert "is a file" in sentence
