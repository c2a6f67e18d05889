"""`data prepare`: where it looks, IDX and MAT files, and the sentence for each fault."""

import gzip
import zipfile
from pathlib import Path
from typing import Any

import numpy
import pytest
from original_files import idx_bytes, random_pixels, write_file, write_mat, write_mnist, write_svhn
from prepared_sets import load, name_by_fault, prepare, refusal

from image_sets import read_image_set
from mpfedcl.experiment.settings import DatasetSettings


@pytest.mark.parametrize("compressed", [True, False])
def test_mnist_is_prepared_from_idx_files(source: Path, data: Path, compressed: bool) -> None:
    arrays = write_mnist(source, compressed)
    outcome = prepare(source, data, "mnist")
    assert outcome.prepared == {"mnist": "12 training and 11 test images, 28 x 28 gray"}
    assert (outcome.kept, outcome.missing) == ([], {})
    written = load(data, "mnist", "mnist")
    assert all(numpy.array_equal(written[key], arrays[key]) for key in arrays)
    assert [entry.name for entry in (data / "mnist").iterdir()] == ["mnist.npz"]


def test_prepared_set_is_read_back(source: Path, data: Path) -> None:
    arrays = write_mnist(source)
    prepare(source, data, "mnist")
    (domain,) = read_image_set(DatasetSettings(name="mnist", root=data)).domains
    assert numpy.array_equal(domain.train_images, arrays["x_train"])
    assert domain.test_labels is not None
    assert domain.test_labels.tolist() == arrays["y_test"].tolist()


def test_originals_are_found_two_folders_down(source: Path, data: Path) -> None:
    write_mnist(source / "MNIST" / "raw")
    assert list(prepare(source, data, "mnist").prepared) == ["mnist"]


def test_deeper_and_hidden_folders_are_ignored(source: Path, data: Path) -> None:
    write_mnist(source / "a" / "b" / "c")
    write_mnist(source / ".cache")
    assert list(prepare(source, data, "mnist").missing) == ["mnist"]


def test_ambiguous_originals_are_rejected(source: Path, data: Path) -> None:
    write_mnist(source / "mnist")
    write_mnist(source / "fashion")
    sentence = refusal(source, data, "mnist")
    assert "fashion/train-images-idx3-ubyte.gz" in sentence
    assert "mnist/train-images-idx3-ubyte.gz could both be meant" in sentence


def test_missing_files_are_named(source: Path, data: Path) -> None:
    write_mnist(source)
    (source / "t10k-images-idx3-ubyte.gz").unlink()
    (source / "t10k-labels-idx1-ubyte.gz").unlink()
    sentence = refusal(source, data, "mnist")
    assert "has train-images-idx3-ubyte.gz but lacks t10k-images-idx3-ubyte, t10k-l" in sentence


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (gzip.compress(idx_bytes(random_pixels(12, 28, 28)))[:-20], "cannot be read"),
        (gzip.compress(b"\0\0\x08\x01" + bytes(40)), "begins with 00000801"),
        (gzip.compress(b""), "begins with nothing"),
        (b"<html>not found</html>", "cannot be read (Not a gzipped file"),
        (gzip.compress(idx_bytes(random_pixels(12, 28, 28))[:-1]), "holds 9,407 bytes after"),
        (gzip.compress(idx_bytes(random_pixels(12, 28, 28)) + b"!"), "holds more bytes after"),
        (gzip.compress(b"\0\0\x08\x03" + bytes(6)), "declares the sizes (0,)"),
        (gzip.compress(b"\0\0\x08\x03" + bytes(12)), "declares the sizes (0, 0, 0)"),
        (gzip.compress(b"\0\0\x08\x03" + b"\xff" * 12), "declares the sizes (4294967295,"),
        (gzip.compress(idx_bytes(random_pixels(9, 28, 28))), "has 9 images and train-labels"),
    ],
    ids=name_by_fault,
)
def test_invalid_idx_files_are_rejected(
    source: Path, data: Path, content: bytes, told: str
) -> None:
    write_mnist(source)
    path = write_file(source / "train-images-idx3-ubyte.gz", content)
    sentence = refusal(source, data, "mnist")
    assert told in sentence
    assert str(path) in sentence


def test_idx_labels_out_of_range_are_rejected(source: Path, data: Path) -> None:
    write_mnist(source)
    labels = numpy.full(12, 10, dtype=numpy.uint8)
    path = write_file(source / "train-labels-idx1-ubyte.gz", gzip.compress(idx_bytes(labels)))
    assert f"{path} has the label 10; labels in it must be 0 to 9" in refusal(source, data, "mnist")


def test_svhn_label_ten_is_zero(source: Path, data: Path) -> None:
    images = write_svhn(source)
    prepare(source, data)
    written = load(data, "svhn")
    assert written["y_train"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    assert written["y_test"].tolist() == [1, 2, 3, 4]
    assert written["x_train"].shape == (10, 32, 32, 3)
    for number in range(10):
        assert numpy.array_equal(written["x_train"][number], images[..., number])


def test_synth_labels_are_kept(source: Path, data: Path) -> None:
    images = write_svhn(source, "synth_", labels=range(10))
    outcome = prepare(source, data)
    # Its names end like SVHN's, which must not be taken for found.
    assert list(outcome.prepared) == ["synth"]
    written = load(data, "synth")
    assert written["y_train"].tolist() == list(range(10))
    assert numpy.array_equal(written["x_test"][3], images[..., 3])


def test_synth_is_prepared_from_its_zip(source: Path, data: Path, tmp_path: Path) -> None:
    write_svhn(tmp_path / "made", "synth_", labels=range(10))
    with zipfile.ZipFile(source / "SynthDigits.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in (tmp_path / "made").iterdir():
            archive.write(path, path.name)
        archive.writestr("readme.txt", "not wanted")
    prepare(source, data)
    assert load(data, "synth")["y_train"].tolist() == list(range(10))
    assert [entry.name for entry in (data / "digit5").iterdir()] == ["synth.npz"]


@pytest.mark.parametrize(
    ("images", "labels", "told"),
    [
        (
            random_pixels(32, 32, 3, 4),
            [1, 2, 3, 0],
            "has the label 0; labels in it must be 1 to 10",
        ),
        (random_pixels(32, 32, 3, 4), [1, 2, 3, 11], "has the label 11"),
        (random_pixels(32, 32, 3, 4), [1, 2, 3], "has 4 images and train_32x32.mat 3 labels"),
        (random_pixels(32, 32, 3, 4), [1, 2, 3, 2.5], "they must be whole numbers"),
        (random_pixels(28, 28, 3, 4), [1, 2, 3, 4], "X has shape (28, 28, 3, 4) and type uint8"),
        (random_pixels(32, 32, 4), [1, 2, 3, 4], "X has shape (32, 32, 4)"),
        (random_pixels(32, 32, 3, 4) / 255, [1, 2, 3, 4], "type double; it must be [32, 32, 3, im"),
    ],
)
def test_invalid_mat_files_are_rejected(
    source: Path, data: Path, images: Any, labels: Any, told: str
) -> None:
    write_svhn(source)
    path = write_mat(source / "train_32x32.mat", images, numpy.array(labels)[:, None])
    sentence = refusal(source, data)
    assert told in sentence
    assert str(path) in sentence


def test_mat_file_without_its_variables_is_rejected(source: Path, data: Path) -> None:
    from scipy.io import savemat

    write_svhn(source)
    savemat(source / "train_32x32.mat", {"other": numpy.zeros(3)})
    assert "lacks X: it has other, and must have X and y and be whole" in refusal(source, data)


def test_mat_file_broken_or_of_another_version_is_rejected(source: Path, data: Path) -> None:
    write_svhn(source)
    path = source / "train_32x32.mat"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert f"{path} lacks y: it has X, and must have X and y and be whole" in refusal(source, data)
    for content in (whole[:-20], b"", b"<html>"):
        path.write_bytes(content)
        assert f"{path} cannot be read" in refusal(source, data)
    # The head of a version 7.3 file, as MATLAB writes it before the HDF5 part.
    head = b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(124) + b"\x00\x02IM"
    path.write_bytes(head + bytes(384) + b"\x89HDF\r\n\x1a\n" + bytes(100))
    assert f"{path} cannot be read (Please use HDF reader for matlab v7.3" in refusal(source, data)


def test_missing_mat_file_is_named(source: Path, data: Path) -> None:
    write_svhn(source)
    (source / "test_32x32.mat").unlink()
    assert "has train_32x32.mat but lacks test_32x32.mat" in refusal(source, data)
