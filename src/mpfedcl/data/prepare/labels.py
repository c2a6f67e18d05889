"""Labels of the originals, checked before they are trusted."""

from pathlib import Path
from typing import Any

import numpy

from mpfedcl.data.train_test_split import Indices
from mpfedcl.errors import InvalidInput


def check_labels(
    labels: Any, allowed: range, path: Path, num_images: int, images: Path | None = None
) -> Indices:
    """Return labels as integers; there must be one an image, and each in the allowed range."""
    numbers = numpy.asarray(labels).reshape(-1)
    whole = numbers.astype(numpy.int64) if numbers.dtype.kind in "iuf" else None
    if whole is None or not numpy.array_equal(whole, numbers):
        raise InvalidInput(
            f"{path} has labels of type {numbers.dtype}; they must be whole numbers."
        )
    wrong = whole[(whole < allowed.start) | (whole >= allowed.stop)]
    if len(wrong):
        raise InvalidInput(
            f"{path} has the label {wrong[0]}; labels in it must be {allowed.start} to "
            f"{allowed.stop - 1}."
        )
    if len(whole) != num_images:
        raise InvalidInput(
            f"{images or path} has {num_images:,} images and {path.name} {len(whole):,} labels; "
            "they must be equally many."
        )
    return whole
