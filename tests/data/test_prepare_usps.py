"""`data prepare`: USPS from LIBSVM and HDF5 files, and the sentence for each fault."""

import bz2
import importlib.util
from pathlib import Path
from typing import Any

import numpy
import pytest
from original_files import libsvm_bytes, random_pixels, write_file, write_usps
from prepared_sets import load, name_by_fault, prepare, refusal


def test_usps_from_libsvm(source: Path, data: Path) -> None:
    images = write_usps(source)
    prepare(source, data)
    written = load(data, "usps")
    assert written["y_train"].tolist() == list(range(10))
    assert written["y_test"].tolist() == [9, 0, 1]
    assert numpy.array_equal(written["x_train"], images)


def test_usps_leaves_out_zeros(source: Path, data: Path) -> None:
    """LIBSVM lists what is not zero, and zero is the middle gray."""
    write_usps(source)
    write_file(source / "usps.bz2", bz2.compress(b"3 1:-1 256:1\n"))
    prepare(source, data)
    image = load(data, "usps")["x_train"][0]
    assert (image[0, 0], image[15, 15], image[0, 1]) == (0, 255, 128)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (libsvm_bytes(numpy.zeros((1, 256)), [11]), "has the label 11; labels in it must be 1 to"),
        (libsvm_bytes(numpy.zeros((1, 256)), [0]), "has the label 0"),
        (libsvm_bytes(numpy.full((1, 256), 1.5), [1]), "has pixels from 1.5 to 1.5; they must be"),
        (libsvm_bytes(numpy.zeros((1, 257)) + 0.5, [1]), "cannot be read"),
        (libsvm_bytes(numpy.full((3, 256), 0.123), [1, 2, 3])[:-9], "cannot be read"),
        (bz2.compress(b"1 1:nan 2:0.5\n"), "has pixels from nan to nan"),
        (bz2.compress(b"1 one:two\n"), "cannot be read"),
        (bz2.compress(b""), "has no images"),
        (b"1 1:0.5\n", "cannot be read"),
    ],
    ids=name_by_fault,
)
def test_libsvm_faults(source: Path, data: Path, content: bytes, told: str) -> None:
    write_usps(source)
    path = write_file(source / "usps.bz2", content)
    sentence = refusal(source, data)
    assert told in sentence
    assert str(path) in sentence


def write_usps_hdf5(path: Path, pixels: Any, labels: Any) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        for part in ("train", "test"):
            group = file.create_group(part)
            group["data"], group["target"] = pixels, labels


def test_usps_from_hdf5(source: Path, data: Path) -> None:
    images = random_pixels(10, 256)
    write_usps_hdf5(source / "usps.h5", (images / 255).astype(numpy.float32), range(10))
    prepare(source, data)
    written = load(data, "usps")
    assert numpy.array_equal(written["x_train"], images.reshape(10, 16, 16))
    assert written["y_test"].tolist() == list(range(10))


@pytest.mark.parametrize(
    ("pixels", "labels", "told"),
    [
        (numpy.zeros((2, 255)), [0, 1], "train/data has shape (2, 255)"),
        (numpy.full((2, 256), 3.0), [0, 1], "has pixels from 3 to 3"),
        (numpy.zeros((2, 256)), [0, 10], "has the label 10"),
        (numpy.zeros((2, 256)), [0], "has 2 images and usps.h5 1 labels"),
    ],
)
def test_hdf5_faults(source: Path, data: Path, pixels: Any, labels: Any, told: str) -> None:
    write_usps_hdf5(source / "usps.h5", pixels, labels)
    assert told in refusal(source, data)


def test_hdf5_that_is_broken(source: Path, data: Path) -> None:
    write_file(source / "usps.h5", b"no HDF5")
    sentence = refusal(source, data)
    if importlib.util.find_spec("h5py") is None:
        assert "pip install h5py" in sentence
    else:
        assert "usps.h5 cannot be read" in sentence
