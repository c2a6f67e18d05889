"""Domains as npz files: what is read, and the sentence for each fault."""

import io
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy
import pytest
from numpy.typing import NDArray

from image_sets import ImageSet, read_image_set
from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.sample_index import open_data_set
from mpfedcl.experiment.settings import DatasetSettings


def make_arrays(
    num_train: int = 6, num_test: int = 4, shape: tuple[int, ...] = (5, 4), num_classes: int = 3
) -> dict[str, NDArray[Any]]:
    generator = numpy.random.default_rng(0)
    return {
        "x_train": generator.integers(0, 256, (num_train, *shape), dtype=numpy.uint8),
        "y_train": numpy.arange(num_train) % num_classes,
        "x_test": generator.integers(0, 256, (num_test, *shape), dtype=numpy.uint8),
        "y_test": numpy.arange(num_test) % num_classes,
    }


def save(path: Path, arrays: dict[str, NDArray[Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    contents: dict[str, Any] = dict(arrays)
    numpy.savez(path, **contents)
    return path


def read_folder(root: Path, **settings: Any) -> ImageSet:
    return read_image_set(DatasetSettings(name="folder", root=root, **settings))


def refusal(root: Path, **settings: Any) -> str:
    with pytest.raises(InvalidInput) as caught:
        read_folder(root, **settings)
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    return sentence


def test_arrays_are_read_unchanged(tmp_path: Path) -> None:
    arrays = make_arrays()
    save(tmp_path / "ink.npz", arrays)
    image_set = read_folder(tmp_path)
    (domain,) = image_set.domains
    assert (domain.name, image_set.class_names) == ("ink", ("0", "1", "2"))
    assert domain.test_images is not None
    assert domain.test_labels is not None
    assert numpy.array_equal(domain.train_images, arrays["x_train"])
    assert numpy.array_equal(domain.train_labels, arrays["y_train"])
    assert numpy.array_equal(domain.test_images, arrays["x_test"])
    assert numpy.array_equal(domain.test_labels, arrays["y_test"])
    assert domain.train_labels.dtype == numpy.int64


@pytest.mark.parametrize(
    ("shape", "read"), [((5, 4), (5, 4)), ((5, 4, 1), (5, 4)), ((5, 4, 3), (5, 4, 3))]
)
def test_gray_and_color_images_are_read(
    tmp_path: Path, shape: tuple[int, ...], read: tuple[int, ...]
) -> None:
    save(tmp_path / "ink.npz", make_arrays(shape=shape))
    assert read_folder(tmp_path).domains[0].train_images.shape == (6, *read)


def test_domains_are_sorted_and_share_size_and_mode(tmp_path: Path) -> None:
    save(tmp_path / "small.npz", make_arrays(shape=(16, 16)))
    save(tmp_path / "large.npz", make_arrays(shape=(32, 32, 3)))
    image_set = read_folder(tmp_path)
    assert [domain.name for domain in image_set.domains] == ["large", "small"]
    for domain in image_set.domains:
        assert domain.train_images.shape == (6, 28, 28, 3)
        assert domain.test_images is not None
        assert domain.test_images.shape == (4, 28, 28, 3)
    gray = image_set.domains[1].train_images
    assert numpy.array_equal(gray[..., 0], gray[..., 2])


def test_image_size_resizes_and_keeps_the_mean(tmp_path: Path) -> None:
    arrays = make_arrays(shape=(8, 8))
    arrays["x_train"][:] = 77
    save(tmp_path / "ink.npz", arrays)
    resized = read_folder(tmp_path, image_size=11).domains[0].train_images
    assert resized.shape == (6, 11, 11)
    assert (resized == 77).all()


def test_class_names_are_zero_padded(tmp_path: Path) -> None:
    arrays = make_arrays()
    arrays["y_test"][0] = 11
    save(tmp_path / "a.npz", arrays)
    names = read_folder(tmp_path).class_names
    assert names == tuple(f"{label:02}" for label in range(12))
    assert list(names) == sorted(names)


@pytest.mark.parametrize("how", ["absent", "empty"])
def test_missing_or_empty_test_part_is_none(tmp_path: Path, how: str) -> None:
    arrays = make_arrays(num_test=0)
    if how == "absent":
        del arrays["x_test"], arrays["y_test"]
    else:
        arrays["x_test"] = numpy.empty(0)  # as numpy.array([]) is written: float, one axis
    save(tmp_path / "a.npz", arrays)
    assert read_folder(tmp_path).domains[0].test_images is None


def test_only_selected_domains_are_read(tmp_path: Path) -> None:
    save(tmp_path / "a.npz", make_arrays())
    save(tmp_path / "b.npz", make_arrays())
    (tmp_path / "c.npz").write_bytes(b"broken, but nobody asks for it")
    chosen = read_folder(tmp_path, domains=("b", "a", "b"))
    assert [domain.name for domain in chosen.domains] == ["a", "b"]


def test_unknown_domain_is_rejected(tmp_path: Path) -> None:
    save(tmp_path / "a.npz", make_arrays())
    save(tmp_path / "b.npz", make_arrays())
    sentence = refusal(tmp_path, domains=("a", "sea"))
    assert "dataset.domains has 'sea'" in sentence
    assert "a, b" in sentence


def test_file_that_is_not_a_zip_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"hello, I am a text")
    sentence = refusal(tmp_path)
    assert str(tmp_path / "a.npz") in sentence
    assert "must be an npz archive" in sentence


def test_empty_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.npz").touch()
    assert "a.npz cannot be read" in refusal(tmp_path)


def test_single_array_is_rejected(tmp_path: Path) -> None:
    with (tmp_path / "a.npz").open("wb") as file:
        numpy.save(file, numpy.zeros(3))
    assert "a.npz is a single array; it must be an npz archive" in refusal(tmp_path)


@pytest.mark.parametrize("share", [0.3, 0.7, 0.99])
def test_truncated_archive_is_rejected(tmp_path: Path, share: float) -> None:
    path = save(tmp_path / "a.npz", make_arrays())
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    assert "a.npz cannot be read" in refusal(tmp_path)


def test_damaged_array_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    arrays: dict[str, Any] = dict(make_arrays())
    numpy.savez_compressed(path, **arrays)
    damaged = bytearray(path.read_bytes())
    for position in range(150, 180):
        damaged[position] ^= 0xFF
    path.write_bytes(damaged)
    sentence = refusal(tmp_path)
    assert "a.npz: x_train cannot be read" in sentence


def test_pickled_objects_are_rejected_and_never_run(tmp_path: Path) -> None:
    arrays = make_arrays()
    arrays["y_train"] = numpy.array([{"a": 1}] * 6, dtype=object)
    save(tmp_path / "a.npz", arrays)
    sentence = refusal(tmp_path)
    assert "a.npz: y_train" in sentence
    assert "pickle" in sentence


def test_bare_pickle_is_rejected(tmp_path: Path) -> None:
    import pickle

    (tmp_path / "a.npz").write_bytes(pickle.dumps({"x_train": [1]}))
    assert "a.npz cannot be read" in refusal(tmp_path)


def test_entry_that_is_not_an_array_is_rejected(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", make_arrays())
    rewritten = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(rewritten, "w") as new:
        for name in old.namelist():
            content = b"no array" if name == "x_train.npy" else old.read(name)
            new.writestr(name, content)
    path.write_bytes(rewritten.getvalue())
    assert "a.npz: x_train" in refusal(tmp_path)


def test_missing_keys_are_rejected_and_listed(tmp_path: Path) -> None:
    arrays = make_arrays()
    save(tmp_path / "a.npz", {"images": arrays["x_train"], "y_train": arrays["y_train"]})
    sentence = refusal(tmp_path)
    assert "lacks x_train" in sentence
    assert "it has images, y_train" in sentence
    assert "needs x_train, y_train" in sentence


def test_test_images_without_labels_are_rejected(tmp_path: Path) -> None:
    arrays = make_arrays()
    del arrays["y_test"]
    save(tmp_path / "a.npz", arrays)
    assert "lacks y_test" in refusal(tmp_path)


def test_images_of_other_dtypes_are_rejected(tmp_path: Path) -> None:
    arrays = make_arrays()
    arrays["x_train"] = arrays["x_train"].astype("int64")
    save(tmp_path / "a.npz", arrays)
    assert "x_train has dtype int64 and shape " in refusal(tmp_path)


@pytest.mark.parametrize("shape", [(20,), (5, 4, 2), (3, 5, 4), (5, 4, 3, 1), (0, 4)])
def test_images_of_other_shapes_are_rejected(tmp_path: Path, shape: tuple[int, ...]) -> None:
    save(tmp_path / "a.npz", make_arrays(shape=shape))
    sentence = refusal(tmp_path)
    assert f"x_train has shape {(6, *shape)}" in sentence
    assert "[images, height, width]" in sentence
    assert "1 or 3 channels" in sentence


@pytest.mark.parametrize(
    ("labels", "complaint"),
    [
        (numpy.zeros(6), "y_train has dtype float64; labels must be integers from 0"),
        (numpy.array(["0"] * 6), "labels must be integers from 0"),
        (numpy.zeros(6, dtype=bool), "y_train has dtype bool; labels must be integers"),
        (numpy.zeros((6, 1), dtype=int), "y_train has shape (6, 1); labels must be one list"),
        (numpy.array([0, 1, 2, 0, -1, 2]), "y_train has the label -1; labels must be 0 to"),
        (numpy.full(6, 2**63, dtype=numpy.uint64), "y_train has the label 9223372036854775808"),
        (numpy.full(6, 1_000_000), "labels must be 0 to 65,535"),
        (numpy.zeros(5, dtype=int), "x_train has 6 images and y_train 5 labels"),
        (numpy.zeros(0, dtype=int), "x_train has 6 images and y_train 0 labels"),
    ],
)
def test_invalid_labels_are_rejected(tmp_path: Path, labels: NDArray[Any], complaint: str) -> None:
    save(tmp_path / "a.npz", {**make_arrays(), "y_train": labels})
    sentence = refusal(tmp_path)
    assert str(tmp_path / "a.npz") in sentence
    assert complaint in sentence


def test_different_numbers_of_test_images_and_labels_are_rejected(tmp_path: Path) -> None:
    save(tmp_path / "a.npz", {**make_arrays(), "y_test": numpy.zeros(0, dtype=int)})
    assert "x_test has 4 images and y_test 0 labels; they must be equally many" in refusal(tmp_path)


def test_empty_training_part_is_rejected(tmp_path: Path) -> None:
    save(tmp_path / "a.npz", make_arrays(num_train=0))
    assert "x_train has 0 images; it must have at least 1" in refusal(tmp_path)


def test_unknown_label_in_a_named_set_is_rejected(tmp_path: Path) -> None:
    arrays = make_arrays()
    arrays["y_test"][0] = 10
    save(tmp_path / "mnist" / "mnist.npz", arrays)
    with pytest.raises(InvalidInput) as caught:
        read_image_set(DatasetSettings(name="mnist", root=tmp_path))
    assert "y_test has the label 10; labels must be 0 to 9" in str(caught.value)


def test_named_set_keeps_classes_without_images(tmp_path: Path) -> None:
    save(tmp_path / "mnist" / "mnist.npz", make_arrays())
    image_set = read_image_set(DatasetSettings(name="mnist", root=tmp_path))
    assert image_set.class_names == tuple("0123456789")


def test_archive_larger_than_memory_is_rejected(tmp_path: Path) -> None:
    # A few bytes that claim 2**60 images.
    header = io.BytesIO()
    numpy.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": (2**60, 28, 28)}
    )
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x_train.npy", header.getvalue())
        labels = io.BytesIO()
        numpy.save(labels, numpy.zeros(6, dtype=int))
        archive.writestr("y_train.npy", labels.getvalue())
    sentence = refusal(tmp_path)
    assert "a.npz: x_train" in sentence


def make_blank(path: Path, num_images: int) -> Path:
    """Write images that are packed a thousand times smaller than they are."""
    images = numpy.zeros((num_images, 128, 128), dtype=numpy.uint8)
    numpy.savez_compressed(path, x_train=images, y_train=numpy.arange(num_images) % 2)
    return path


def test_archive_with_a_high_compression_ratio_is_rejected(tmp_path: Path) -> None:
    path = make_blank(tmp_path / "a.npz", 2**12 + 1)
    sentence = refusal(tmp_path)
    assert f"a.npz has {path.stat().st_size:,} bytes and would unpack to 67," in sentence
    assert "above 67,108,864 bytes a file must unpack to at most 100 times its size" in sentence


def test_high_compression_ratio_is_rejected_before_unpacking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_blank(tmp_path / "a.npz", 5000)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a member was opened")

    monkeypatch.setattr(zipfile.ZipFile, "open", refuse)
    archive = DatasetSettings(name="folder", root=tmp_path)
    with pytest.raises(InvalidInput, match="would unpack to"):
        open_data_set(archive)


def test_small_archive_of_blank_images_is_read(tmp_path: Path) -> None:
    path = make_blank(tmp_path / "a.npz", 200)
    assert path.stat().st_size * 100 < 200 * 128 * 128
    assert not read_folder(tmp_path).domains[0].train_images.any()


def test_large_archive_with_a_usual_compression_ratio_is_read(tmp_path: Path) -> None:
    images = numpy.zeros((4100, 128, 128), dtype=numpy.uint8)
    images[:60] = numpy.random.default_rng(0).integers(0, 256, (60, 128, 128))
    path = tmp_path / "a.npz"
    numpy.savez_compressed(path, x_train=images, y_train=numpy.arange(4100) % 2)
    assert images.nbytes > 2**26
    found = open_data_set(DatasetSettings(name="folder", root=tmp_path)).domains
    assert [len(domain.train.labels) for domain in found] == [4100]


def test_unpacking_stops_at_the_declared_size(tmp_path: Path) -> None:
    """An archive that hides its size is read only as far as it says."""
    content, labels = io.BytesIO(), io.BytesIO()
    numpy.save(content, numpy.zeros((5000, 128, 128), dtype=numpy.uint8))
    numpy.save(labels, numpy.zeros(5000, dtype=int))
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x_train.npy", content.getvalue())
        archive.writestr("y_train.npy", labels.getvalue())
        archive.getinfo("x_train.npy").file_size = 1000
    tracemalloc.start()
    sentence = refusal(tmp_path)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "a.npz: x_train cannot be read" in sentence
    assert most < 2**23
