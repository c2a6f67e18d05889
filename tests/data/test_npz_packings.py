"""Archives in ways of packing that numpy never uses."""

import io
import zipfile
from pathlib import Path

import numpy
import pytest

from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.npz_archive import open_archive, open_unlabeled_samples


def save_packed(path: Path, packing: int) -> Path:
    with zipfile.ZipFile(path, "w", packing) as archive:
        for name, array in (("x_train", numpy.zeros((2, 3, 3), "u1")), ("y_train", [0, 1])):
            content = io.BytesIO()
            numpy.save(content, numpy.asarray(array))
            archive.writestr(f"{name}.npy", content.getvalue())
    return path


@pytest.mark.parametrize("packing", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_compression_with_unbounded_memory_is_rejected(tmp_path: Path, packing: int) -> None:
    path = save_packed(tmp_path / "a.npz", packing)
    with pytest.raises(
        InvalidInput, match=r"a\.npz: 'x_train.npy' is packed in an unusual way; it"
    ):
        open_archive(path, None)


@pytest.mark.parametrize("packing", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_compression_methods_of_numpy_are_read(tmp_path: Path, packing: int) -> None:
    path = save_packed(tmp_path / "a.npz", packing)
    _, domains, _ = open_archive(path, None)
    assert [domain.train.labels.tolist() for domain in domains] == [[0, 1]]


def test_empty_list_in_place_of_samples_is_rejected(tmp_path: Path) -> None:
    numpy.savez(tmp_path / "a.npz", x=[])
    with pytest.raises(InvalidInput, match="it must be images or arrays"):
        open_unlabeled_samples(tmp_path / "a.npz")
