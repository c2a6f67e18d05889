"""`data prepare`: digits in every published format, and the sentence for each fault."""

import bz2
import gzip
import importlib.util
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy
import pytest
from numpy.typing import NDArray
from original_files import (
    idx_bytes,
    libsvm_bytes,
    random_pixels,
    save_picture,
    write_file,
    write_mat,
    write_mnist,
    write_mnist_m,
    write_svhn,
    write_usps,
)

from mpfedcl.data.prepare import Preparation, prepare_set
from mpfedcl.data.reader import read_image_set
from mpfedcl.errors import InvalidInput
from mpfedcl.settings import DatasetSettings


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "downloads"
    folder.mkdir()
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


def name_by_fault(value: bytes | str) -> str:
    """Name a case by what is told; compressed bytes hold the time and differ between processes."""
    return "" if isinstance(value, bytes) else value


def prepare(source: Path, data: Path, name: str = "digit5", **options: Any) -> Preparation:
    return prepare_set(name, source, data / name, **options)


def load(data: Path, domain: str, name: str = "digit5") -> dict[str, NDArray[Any]]:
    with numpy.load(data / name / f"{domain}.npz", allow_pickle=False) as archive:
        arrays = {key: archive[key] for key in archive.files}
    assert set(arrays) == {"x_train", "y_train", "x_test", "y_test"}
    assert all(array.dtype == numpy.uint8 for array in arrays.values())
    return arrays


def refusal(source: Path, data: Path, name: str = "digit5", **options: Any) -> str:
    with pytest.raises(InvalidInput) as caught:
        prepare(source, data, name, **options)
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    # Nothing is left of an attempt that failed, not even an empty set.
    assert not (data / name).exists()
    return sentence


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("names", ["-idx", ".idx"])
def test_mnist_from_idx(source: Path, data: Path, compressed: bool, names: str) -> None:
    arrays = write_mnist(source, compressed, names)
    outcome = prepare(source, data, "mnist")
    assert outcome.prepared == {"mnist": "12 training and 11 test images, 28 x 28 grey"}
    assert (outcome.kept, outcome.missing) == ([], {})
    written = load(data, "mnist", "mnist")
    assert all(numpy.array_equal(written[key], arrays[key]) for key in arrays)
    assert [entry.name for entry in (data / "mnist").iterdir()] == ["mnist.npz"]


def test_the_reader_reads_what_was_prepared(source: Path, data: Path) -> None:
    arrays = write_mnist(source)
    prepare(source, data, "mnist")
    (domain,) = read_image_set(DatasetSettings(name="mnist", root=data)).domains
    assert numpy.array_equal(domain.train_images, arrays["x_train"])
    assert domain.test_labels is not None
    assert domain.test_labels.tolist() == arrays["y_test"].tolist()


def test_looks_two_folders_down(source: Path, data: Path) -> None:
    write_mnist(source / "MNIST" / "raw")
    assert list(prepare(source, data, "mnist").prepared) == ["mnist"]


def test_looks_no_deeper_and_into_no_hidden_folder(source: Path, data: Path) -> None:
    write_mnist(source / "a" / "b" / "c")
    write_mnist(source / ".cache")
    assert list(prepare(source, data, "mnist").missing) == ["mnist"]


def test_refuses_to_choose_between_two(source: Path, data: Path) -> None:
    write_mnist(source / "mnist")
    write_mnist(source / "fashion")
    sentence = refusal(source, data, "mnist")
    assert "fashion/train-images-idx3-ubyte.gz" in sentence
    assert "mnist/train-images-idx3-ubyte.gz could both be meant" in sentence


def test_names_the_files_that_are_lacking(source: Path, data: Path) -> None:
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
def test_idx_faults(source: Path, data: Path, content: bytes, told: str) -> None:
    write_mnist(source)
    path = write_file(source / "train-images-idx3-ubyte.gz", content)
    sentence = refusal(source, data, "mnist")
    assert told in sentence
    assert str(path) in sentence


def test_idx_labels_out_of_range(source: Path, data: Path) -> None:
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


def test_synth_labels_stay(source: Path, data: Path) -> None:
    images = write_svhn(source, "synth_", labels=range(10))
    outcome = prepare(source, data)
    # Its names end like SVHN's, which must not be taken for found.
    assert list(outcome.prepared) == ["synth"]
    written = load(data, "synth")
    assert written["y_train"].tolist() == list(range(10))
    assert numpy.array_equal(written["x_test"][3], images[..., 3])


def test_synth_from_its_zip(source: Path, data: Path, tmp_path: Path) -> None:
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
def test_mat_faults(source: Path, data: Path, images: Any, labels: Any, told: str) -> None:
    write_svhn(source)
    path = write_mat(source / "train_32x32.mat", images, numpy.array(labels)[:, None])
    sentence = refusal(source, data)
    assert told in sentence
    assert str(path) in sentence


def test_mat_without_its_variables(source: Path, data: Path) -> None:
    from scipy.io import savemat

    write_svhn(source)
    savemat(source / "train_32x32.mat", {"other": numpy.zeros(3)})
    assert "lacks X: it has other, and must have X and y and be whole" in refusal(source, data)


def test_mat_that_is_broken_or_of_another_version(source: Path, data: Path) -> None:
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
    assert f"{path} is a MATLAB 7.3 file, which is HDF5 inside" in refusal(source, data)


def test_one_file_of_two_is_not_enough(source: Path, data: Path) -> None:
    write_svhn(source)
    (source / "test_32x32.mat").unlink()
    assert "has train_32x32.mat but lacks test_32x32.mat; both must" in refusal(source, data)


def test_usps_from_libsvm(source: Path, data: Path) -> None:
    images = write_usps(source)
    prepare(source, data)
    written = load(data, "usps")
    assert written["y_train"].tolist() == list(range(10))
    assert written["y_test"].tolist() == [9, 0, 1]
    assert numpy.array_equal(written["x_train"], images)


def test_usps_leaves_out_zeros(source: Path, data: Path) -> None:
    """LIBSVM lists what is not zero, and zero is the middle grey."""
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


def test_mnist_m_labels_follow_the_list(source: Path, data: Path) -> None:
    images = write_mnist_m(source / "mnist_m")
    prepare(source, data)
    written = load(data, "mnist_m")
    assert written["y_train"].tolist() == list(reversed(range(10)))
    assert numpy.array_equal(written["x_train"], images[::-1])
    assert len(written["y_test"]) == 4


@pytest.mark.parametrize("name", ["mnist_m.tar.gz", "mnist_m.zip"])
def test_mnist_m_from_its_archive(source: Path, data: Path, tmp_path: Path, name: str) -> None:
    write_mnist_m(tmp_path / "mnist_m")
    if name.endswith("zip"):
        with zipfile.ZipFile(source / name, "w") as archive:
            for path in sorted((tmp_path / "mnist_m").rglob("*.*")):
                archive.write(path, path.relative_to(tmp_path))
    else:
        with tarfile.open(source / name, "w:gz") as tar:
            tar.add(tmp_path / "mnist_m", "mnist_m")
    prepare(source, data)
    assert load(data, "mnist_m")["y_test"].tolist() == [3, 2, 1, 0]


def test_mnist_m_in_grey_is_written_in_colour(source: Path, data: Path) -> None:
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
        ("00000000.png 1\n00000000.png 2", "names 00000000.png twice"),
        ("99999999.png 1", "names 1 images that are not there"),
        ("\n", "is empty"),
    ],
)
def test_label_file_faults(source: Path, data: Path, lines: str, told: str) -> None:
    write_mnist_m(source)
    path = write_file(source / "mnist_m_train_labels.txt", lines.encode())
    sentence = refusal(source, data)
    assert told in sentence
    assert str(path) in sentence


def test_a_broken_picture_is_named(source: Path, data: Path) -> None:
    write_mnist_m(source)
    path = write_file(source / "mnist_m_train" / "00000003.png", b"no picture")
    assert f"{path} (" in refusal(source, data)
