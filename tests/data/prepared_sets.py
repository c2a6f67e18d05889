"""A set prepared from downloads, what was written, and the sentence where it cannot be."""

from pathlib import Path
from typing import Any

import numpy
import pytest
from numpy.typing import NDArray

from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.public.prepare import Preparation, prepare_set


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
