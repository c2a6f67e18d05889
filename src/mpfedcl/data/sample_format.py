"""The format of samples that are used together: images of one size and color, or vectors."""

import math
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy
from numpy.typing import NDArray
from PIL import Image

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.images import Size, choose_size, resize_images
from mpfedcl.experiment.data_folder import VECTOR_TYPES

Samples = NDArray[Any]
"""Images as bytes [n, height, width] or [n, height, width, 3], or vectors [n, width] of floats."""


@dataclass(frozen=True)
class ImageFormat:
    """All images of one size and one color mode, as bytes."""

    height: int
    width: int
    is_color: bool
    noun: ClassVar[str] = "image"
    dtype: ClassVar[str] = "uint8"
    vector_width: ClassVar[None] = None

    def __str__(self) -> str:
        return describe_samples(self.vector_width)

    @property
    def size(self) -> Size:
        """Height and width."""
        return self.height, self.width

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one image as an array."""
        return (self.height, self.width, 3) if self.is_color else self.size

    @classmethod
    def from_shape(cls, shape: Any) -> Self | None:
        """Return the format of arrays of a shape, None where no image has such a shape."""
        if not _is_shape(shape):
            return None
        if len(shape) == 2 or (len(shape) == 3 and shape[2] == 3):
            return cls(shape[0], shape[1], len(shape) == 3)
        return None

    @classmethod
    def guess(cls, num_pixels: int) -> Self | None:
        """Return the only square format of so many numbers, gray or RGB, or None."""
        # Never both: the square root of 3 is irrational.
        for channels in (1, 3):
            side = math.isqrt(num_pixels // channels)
            if channels * side * side == num_pixels:
                return cls(side, side, channels == 3)
        return None

    def convert(self, images: Samples) -> Samples:
        """Return gray [n, h, w] or RGB [n, h, w, 3] bytes in this format."""
        if images.ndim == 4 and images.shape[3] == 1:
            images = images[..., 0]
        if images.ndim == 4 and not self.is_color:
            images = numpy.stack([numpy.asarray(Image.fromarray(i).convert("L")) for i in images])
        return resize_images(images, self.size, self.is_color)


@dataclass(frozen=True)
class VectorFormat:
    """All vectors of one width, in one precision."""

    vector_width: int
    dtype: str = "float32"
    noun: ClassVar[str] = "vector"

    def __str__(self) -> str:
        return describe_samples(self.vector_width)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one vector as an array."""
        return (self.vector_width,)

    @classmethod
    def from_shape(cls, shape: Any, dtype: str) -> Self | None:
        """Return the format of arrays of a shape, None where no vector has such a shape."""
        return cls(shape[0], dtype) if _is_shape(shape) and len(shape) == 1 else None

    def convert(self, vectors: Samples) -> Samples:
        """Return vectors [n, width] of floats in this precision, as they are otherwise."""
        if vectors.dtype.name not in VECTOR_TYPES or vectors.shape[1:] != self.shape:
            raise InvalidInput(
                f"a vector is an array {vectors.dtype} {list(vectors.shape[1:])}; it must be "
                f"{' or '.join(VECTOR_TYPES)} [{self.vector_width}]."
            )
        if found := find_not_finite(vectors):
            raise InvalidInput(
                f"a vector has {found}; vectors must be finite numbers of at most 3.4e38."
            )
        return vectors.astype(self.dtype)


SampleFormat = ImageFormat | VectorFormat


def describe_samples(vector_width: int | None) -> str:
    """Return in words what samples are; the width is None for images."""
    if vector_width is None:
        return "images"
    return f"vectors of {vector_width:,} number{'' if vector_width == 1 else 's'}"


def choose_format(
    formats: AbstractSet[SampleFormat], image_size: int | None, dtype: str = "float32"
) -> SampleFormat:
    """Return one format for samples of several: see `choose_size`; RGB if any image has color."""
    vectors = [each for each in formats if isinstance(each, VectorFormat)]
    images = [each for each in formats if isinstance(each, ImageFormat)]
    if not vectors:
        size = choose_size({each.size for each in images}, image_size)
        return ImageFormat(*size, any(each.is_color for each in images))
    if image_size is not None:
        raise InvalidInput(
            f"dataset.image_size is {image_size}; it must be left out, because the samples are "
            f"{vectors[0]}."
        )
    return VectorFormat(vectors[0].vector_width, dtype)


def find_not_finite(vectors: Samples, first_row: int = 0) -> str | None:
    """Return in words the first number that is not finite in float32, or None.

    In float32 whatever the precision of a run is: beyond its range no sum of squares is finite.
    """
    with numpy.errstate(over="ignore"):
        faults = numpy.argwhere(~numpy.isfinite(vectors.astype(numpy.float32, copy=False)))
    if not len(faults):
        return None
    row, column = (int(place) for place in faults[0])
    return f"{vectors[row, column]:g} at [{first_row + row}, {column}]"


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list | tuple) and all(type(n) is int and n > 0 for n in shape)
