"""One size and one color mode for images that are used together."""

import numpy
from numpy.typing import NDArray
from PIL import Image

Images = NDArray[numpy.uint8]
"""Gray [images, height, width] or RGB [images, height, width, 3]."""

Size = tuple[int, int]
"""Height and width."""


def resize_image(image: Image.Image, size: Size) -> Image.Image:
    """Return the image in the given size; its proportions follow the size."""
    height, width = size
    if image.size == (width, height):
        return image
    # Lanczos keeps detail when shrinking; when enlarging, it rings more than bicubic.
    shrinks = image.width * image.height > width * height
    method = Image.Resampling.LANCZOS if shrinks else Image.Resampling.BICUBIC
    return image.resize((width, height), method)


def resize_images(images: Images, size: Size, is_color: bool) -> Images:
    """Return the images in the given size, gray ones with three equal channels if `is_color`."""
    if images.shape[1:3] != size:
        resized = numpy.empty((len(images), *size, *images.shape[3:]), dtype=numpy.uint8)
        for position, image in enumerate(images):
            resized[position] = numpy.asarray(resize_image(Image.fromarray(image), size))
        images = resized
    if is_color and images.ndim == 3:
        images = numpy.repeat(images[..., None], 3, axis=3)
    return images
