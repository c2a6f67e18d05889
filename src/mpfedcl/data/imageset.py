"""Images in memory, as they come from disk: bytes, by domain."""

from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from mpfedcl.data.split import Indices

Images = NDArray[numpy.uint8]
"""Grey [images, height, width] or RGB [images, height, width, 3]."""


@dataclass(frozen=True)
class Domain:
    """The images of one domain; the test part is None where the set has no official split."""

    name: str
    train_images: Images
    train_labels: Indices
    test_images: Images | None = None
    test_labels: Indices | None = None


@dataclass(frozen=True)
class ImageSet:
    """A data set: domains in order of name, whose images all have one size and one colour mode."""

    name: str
    domains: tuple[Domain, ...]
    class_names: tuple[str, ...]
