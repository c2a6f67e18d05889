"""The format that a model's images have: size and colour, and how any image is converted to it."""

import math
from dataclasses import dataclass
from typing import Any, Self

import numpy
from PIL import Image

from mpfedcl.images import Images, Size, resize_images


@dataclass(frozen=True)
class InputFormat:
    """All images of one size and one colour mode, as bytes."""

    height: int
    width: int
    is_colour: bool

    @property
    def size(self) -> Size:
        """Height and width."""
        return self.height, self.width

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one image as an array."""
        return (self.height, self.width, 3) if self.is_colour else self.size

    @classmethod
    def from_shape(cls, shape: Any) -> Self | None:
        """Return the format of arrays of a shape, None where no image has such a shape."""
        if not isinstance(shape, list | tuple) or not all(type(n) is int and n > 0 for n in shape):
            return None
        if len(shape) == 2 or (len(shape) == 3 and shape[2] == 3):
            return cls(shape[0], shape[1], len(shape) == 3)
        return None

    @classmethod
    def guess(cls, num_pixels: int) -> Self | None:
        """Return the only square format of so many numbers, grey or RGB, or None."""
        # Never both: the square root of 3 is irrational.
        for channels in (1, 3):
            side = math.isqrt(num_pixels // channels)
            if channels * side * side == num_pixels:
                return cls(side, side, channels == 3)
        return None

    def convert(self, images: Images) -> Images:
        """Return grey [n, h, w] or RGB [n, h, w, 3] bytes in this format."""
        if images.ndim == 4 and images.shape[3] == 1:
            images = images[..., 0]
        if images.ndim == 4 and not self.is_colour:
            images = numpy.stack([numpy.asarray(Image.fromarray(i).convert("L")) for i in images])
        return resize_images(images, self.size, self.is_colour)
