"""The default encoder of one's own data: none where they are vectors."""

import tracemalloc
import zipfile
from pathlib import Path

import numpy
import pytest

from mpfedcl.experiment import Experiment
from mpfedcl.experiment.data_folder import holds_arrays
from small_experiments import save_images, save_pictures, save_vectors


@pytest.fixture(autouse=True)
def named_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images have an encoder; without weights they would be pixels."""
    monkeypatch.setenv("MPFEDCL_WEIGHTS", "resnet18.safetensors")


def default_encoder(root: Path, **changes: object) -> str | None:
    experiment = Experiment().replace(dataset__name="folder", dataset__root=root, **changes)
    found = experiment.resolved().encoder.name
    # Nor does a method's own encoder change it.
    assert experiment.resolved({"encoder__name": "random-filters"}).encoder.name == found
    return found


def test_default_encoder_is_none_for_vectors_only(tmp_path: Path) -> None:
    save_vectors(tmp_path / "vectors" / "A.NPZ.npz")
    save_images(tmp_path / "images" / "a.npz")
    save_pictures(tmp_path / "pictures", ("cat", "dog"))
    assert default_encoder(tmp_path / "vectors") == "none"
    assert default_encoder(tmp_path / "images") == "resnet18"
    assert default_encoder(tmp_path / "pictures") == "resnet18"
    assert default_encoder(tmp_path / "absent") == "resnet18"
    assert default_encoder(tmp_path / "vectors", encoder__name="onnx:e") == "onnx:e"


def test_default_encoder_depends_on_the_selected_domains(tmp_path: Path) -> None:
    save_images(tmp_path / "a.npz")
    save_vectors(tmp_path / "b.npz")
    assert default_encoder(tmp_path) == "resnet18"
    assert default_encoder(tmp_path, dataset__domains=("b",)) == "none"


def test_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save_vectors(tmp_path / "mine" / "a.npz")
    assert default_encoder(Path("~/mine")) == "none"


@pytest.mark.parametrize("content", [b"", b"no zip", b"PK\x03\x04 half of one"])
def test_unreadable_archives_do_not_count_as_vectors(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    assert not holds_arrays(tmp_path)
    assert not holds_arrays(tmp_path / "a.npz")


def test_floats_of_any_shape_and_token_ids_are_arrays(tmp_path: Path) -> None:
    for dtype, shape, expected in (
        ("float32", (4, 2), True),
        ("float64", (4, 2), True),
        ("float16", (4, 2, 2), True),
        ("int64", (4, 2), True),
        ("float32", (4,), False),
        ("int64", (4, 2, 2), False),
        ("uint8", (4, 2, 2), False),
    ):
        numpy.savez(tmp_path / "a.npz", x_train=numpy.zeros(shape, dtype))
        assert holds_arrays(tmp_path / "a.npz") is expected


@pytest.mark.whole
def test_only_the_header_is_unpacked(tmp_path: Path) -> None:
    """A header that says it has 200 MB, packed into 200 kB."""
    claimed = 200 * 2**20
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        start = b"\x93NUMPY\x02\x00" + claimed.to_bytes(4, "little")
        archive.writestr("x_train.npy", start + bytes(claimed))
    tracemalloc.start()
    assert not holds_arrays(tmp_path / "a.npz")
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
