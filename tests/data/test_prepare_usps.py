"""`data prepare`: USPS from LIBSVM files, and the sentence for each fault."""

import bz2
from pathlib import Path

import numpy
import pytest
from original_files import libsvm_bytes, write_file, write_usps
from prepared_sets import load, name_by_fault, prepare, refusal


def test_usps_is_prepared_from_libsvm_files(source: Path, data: Path) -> None:
    images = write_usps(source)
    prepare(source, data)
    written = load(data, "usps")
    assert written["y_train"].tolist() == list(range(10))
    assert written["y_test"].tolist() == [9, 0, 1]
    assert numpy.array_equal(written["x_train"], images)


def test_omitted_libsvm_values_are_middle_gray(source: Path, data: Path) -> None:
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
def test_invalid_libsvm_files_are_rejected(
    source: Path, data: Path, content: bytes, told: str
) -> None:
    write_usps(source)
    path = write_file(source / "usps.bz2", content)
    sentence = refusal(source, data)
    assert told in sentence
    assert str(path) in sentence
