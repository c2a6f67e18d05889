"""`data prepare`: CIFAR-10 and CIFAR-100 from their binary versions, and each fault's sentence."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
from original_files import cifar_bytes, random_pixels, write_cifar10, write_cifar100, write_file
from prepared_sets import load, name_by_fault, prepare, refusal

from mpfedcl.data.sample_index import open_data_set
from mpfedcl.experiment.settings import DatasetSettings


def test_cifar10_is_prepared_from_its_six_files(source: Path, data: Path) -> None:
    images = write_cifar10(source / "cifar-10-batches-bin")
    outcome = prepare(source, data, "cifar10")
    assert outcome.prepared == {"cifar10": "10 training and 3 test images, 32 x 32 RGB"}
    written = load(data, "cifar10", "cifar10")
    assert written["y_train"].tolist() == list(range(10))
    assert written["y_test"].tolist() == [9, 0, 4]
    assert numpy.array_equal(written["x_train"], images[:10])
    assert numpy.array_equal(written["x_test"], images[10:])
    names = open_data_set(DatasetSettings(name="cifar10", root=data)).class_names
    assert (len(names), names[0], names[9]) == (10, "airplane", "truck")


def test_cifar100_uses_the_fine_labels(source: Path, data: Path) -> None:
    images = write_cifar100(source)
    prepare(source, data, "cifar100")
    written = load(data, "cifar100", "cifar100")
    assert written["y_train"].tolist() == [0, 1, 99, 2]
    assert written["y_test"].tolist() == [98]
    assert numpy.array_equal(written["x_train"], images[:4])
    names = open_data_set(DatasetSettings(name="cifar100", root=data)).class_names
    assert (len(names), names[0], names[98], names[99]) == (100, "apple", "woman", "worm")


@pytest.mark.parametrize(
    ("name", "write", "archive"),
    [
        ("cifar10", write_cifar10, "cifar-10-binary.tar.gz"),
        ("cifar100", write_cifar100, "cifar-100-binary.tar.gz"),
    ],
)
def test_cifar_is_prepared_from_its_archive(
    source: Path,
    data: Path,
    tmp_path: Path,
    name: str,
    write: Callable[[Path], object],
    archive: str,
) -> None:
    write(tmp_path / "inside")
    source.mkdir(exist_ok=True)
    with tarfile.open(source / archive, "w:gz") as tar:
        tar.add(tmp_path / "inside", "cifar-batches-bin")
        readme = tarfile.TarInfo("cifar-batches-bin/readme.html")
        tar.addfile(readme, io.BytesIO())
    assert list(prepare(source, data, name).prepared) == [name]


def test_archive_with_other_files_is_rejected(source: Path, data: Path) -> None:
    source.mkdir(exist_ok=True)
    with tarfile.open(source / "cifar-10-binary.tar.gz", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("data_batch_1"), io.BytesIO())
    assert "cifar-10-binary.tar.gz must hold data_batch_1.bin, data_" in refusal(
        source, data, "cifar10"
    )


def test_missing_files_are_named(source: Path, data: Path) -> None:
    write_cifar10(source)
    (source / "data_batch_3.bin").unlink()
    (source / "test_batch.bin").unlink()
    sentence = refusal(source, data, "cifar10")
    assert "has data_batch_1.bin but lacks data_batch_3.bin, test_batch.bin" in sentence


IMAGE = random_pixels(1, 32, 32, 3)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "has 0 bytes; it must be whole records of 3,074 bytes"),
        (cifar_bytes([(0, 1)], IMAGE)[:-1], "has 3,073 bytes"),
        (cifar_bytes([(0, 1)], IMAGE) + b"!", "has 3,075 bytes"),
        (cifar_bytes([(20, 1)], IMAGE), "has the label 20; labels in it must be 0 to 19"),
        (cifar_bytes([(0, 100)], IMAGE), "has the label 100; labels in it must be 0 to 99"),
    ],
    ids=name_by_fault,
)
def test_faults(source: Path, data: Path, content: bytes, told: str) -> None:
    write_cifar100(source)
    path = write_file(source / "train.bin", content)
    sentence = refusal(source, data, "cifar100")
    assert told in sentence
    assert str(path) in sentence
