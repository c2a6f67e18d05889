"""Archives that say whose each sample is."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.sample_index import open_data_set
from mpfedcl.experiment.settings import DatasetSettings


def write(path: Path, **changes: Any) -> Path:
    arrays = {
        "x_train": numpy.arange(4 * 36, dtype=numpy.uint8).reshape(4, 6, 6),
        "y_train": [0, 1, 0, 1],
        "clients_train": ["b", "a", "b", "b"],
        "x_test": numpy.zeros((2, 6, 6), numpy.uint8),
        "y_test": [1, 0],
        "clients_test": ["a", "a"],
    }
    kept: dict[str, Any] = {
        key: each for key, each in (arrays | changes).items() if each is not None
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    numpy.savez(path, **kept)
    return path


def open_folder(root: Path) -> dict[str, tuple[list[int], list[int] | None]]:
    found = open_data_set(DatasetSettings(name="folder", root=root))
    return {
        each.name: (
            each.train.rows.tolist(),
            None if each.test is None else each.test.rows.tolist(),
        )
        for each in found.domains
    }


def test_each_client_of_an_archive_is_a_domain(tmp_path: Path) -> None:
    write(tmp_path / "one" / "set.npz")
    assert open_folder(tmp_path / "one") == {"a": ([1], [4, 5]), "b": ([0, 2, 3], [])}
    write(tmp_path / "two" / "set.npz", x_test=None, y_test=None, clients_test=None)
    assert open_folder(tmp_path / "two") == {"a": ([1], None), "b": ([0, 2, 3], None)}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"clients_train": None}, "clients_train is missing; it must be a list of 4 names"),
        ({"clients_test": None}, "clients_test is missing; it must be a list of 2 names"),
        ({"clients_train": ["a", "b"]}, r"clients_train has <U1 \[2\]; it must be"),
        ({"clients_train": [1, 2, 3, 4]}, r"clients_train has int64 \[4\]"),
        ({"clients_train": [["a"] * 4]}, r"clients_train has <U1 \[1, 4\]"),
        ({"clients_test": ["a", "z"]}, "clients_test has 'z'"),
        ({"clients_train": ["a", "b", "../x", "b"]}, r"the domain '\.\./x'; a domain's name"),
        ({"clients_train": numpy.array(["a"] * 4, dtype=object)}, "pickles are never read"),
    ],
)
def test_invalid_client_names_are_rejected(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    write(tmp_path / "set" / "file.npz", **changes)
    with pytest.raises(InvalidInput, match=told):
        open_folder(tmp_path / "set")


def test_client_in_two_files_is_rejected(tmp_path: Path) -> None:
    write(tmp_path / "set" / "one.npz")
    write(tmp_path / "set" / "two.npz")
    with pytest.raises(InvalidInput, match="has the domain or client 'a' twice"):
        open_folder(tmp_path / "set")


@given(st.lists(st.sampled_from(["x", "xy", "ä", "a b", "0"]), min_size=1, max_size=12))
def test_samples_are_grouped_by_client_in_order(names: list[str]) -> None:
    with TemporaryDirectory() as folder:
        root, num = Path(folder), len(names)
        blank = numpy.zeros((num, 6, 6), numpy.uint8)
        write(root / "set.npz", x_train=blank, y_train=[0] * num, clients_train=names,
              x_test=None, y_test=None, clients_test=None)  # fmt: skip
        found = open_folder(root)
    assert list(found) == sorted(set(names))
    for name, (rows, _) in found.items():
        assert rows == [i for i, each in enumerate(names) if each == name]
