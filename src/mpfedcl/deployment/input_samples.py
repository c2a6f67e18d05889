"""Images given to a model: the format they are brought to, and those that a command line names."""

import glob
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TextIO

import numpy
from PIL import Image

from mpfedcl.data.image_files import EXTENSIONS, is_image_file, read_image_file
from mpfedcl.data.npz_archive import open_unlabelled_samples
from mpfedcl.errors import InvalidInput
from mpfedcl.files import identify_file
from mpfedcl.images import Images, Size, resize_images

_IMAGES_AT_ONCE = 256


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


@dataclass(frozen=True)
class NamedSample:
    """An image that is opened when it is asked for; what is wrong with it is said then."""

    name: str
    load: Callable[[InputFormat], Images]


def list_samples(words: Sequence[str], stdin: TextIO) -> list[NamedSample]:
    """Return what the words name, in their order; `-` stands for a path a line on stdin."""
    found: list[NamedSample] = []
    for word in words:
        if word == "-":
            for line in stdin:
                if path := line.rstrip("\r\n"):
                    found += _list_path(path)
        else:
            found += _list_path(word)
    return found


def read_batches(
    images: Sequence[NamedSample], input_format: InputFormat
) -> Iterator[tuple[list[str], Images, dict[int, str]]]:
    """Yield the images batch by batch, decoded in parallel; none is lost for another's fault.

    A batch is all names, the images that could be read, and what is wrong with the others by place.
    """

    def attempt(image: NamedSample) -> Images | str:
        try:
            return image.load(input_format)
        except InvalidInput as error:
            return str(error)

    with ThreadPoolExecutor() as executor:
        for first in range(0, len(images), _IMAGES_AT_ONCE):
            part = images[first : first + _IMAGES_AT_ONCE]
            loaded = list(executor.map(attempt, part))
            sound = [each for each in loaded if not isinstance(each, str)]
            faults = {n: each for n, each in enumerate(loaded) if isinstance(each, str)}
            empty = numpy.empty((0, *input_format.shape), dtype=numpy.uint8)
            stacked = numpy.stack(sound) if sound else empty
            yield [image.name for image in part], stacked, faults


def _list_path(word: str) -> list[NamedSample]:
    path = Path(word).expanduser()
    if path.exists() or not glob.has_magic(word):
        return _list_one(path)
    # pathlib has no glob for a pattern that may begin anywhere.
    matches = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207
    if not matches:
        return [_unreadable(word, f"{word} matches no file; a pattern must match at least one.")]
    return [image for each in matches for image in _list_one(Path(each))]


def _list_one(path: Path) -> list[NamedSample]:
    if path.is_dir():
        pictures = sorted(each for each in path.rglob("*") if is_image_file(each))
        if not pictures:
            wanted = ", ".join(f"*{extension}" for extension in EXTENSIONS)
            return [_unreadable(str(path), f"{path} has no images; it must have files {wanted}.")]
        return [_from_file(each) for each in pictures]
    return _from_archive(path) if path.suffix.lower() == ".npz" else [_from_file(path)]


def _from_file(path: Path) -> NamedSample:
    return NamedSample(
        str(path),
        lambda wanted: read_image_file(path, wanted.size, wanted.is_colour),
    )


def _from_archive(path: Path) -> list[NamedSample]:
    try:
        store = open_unlabelled_samples(lambda: path.open("rb"), str(path), identify_file(path))
        # At once and in their own size: an archive is read from its beginning each time.
        (size,), is_colour = store.inspect_images()
        images = store.load(numpy.arange(len(store)), size, is_colour)
    except InvalidInput as error:
        return [_unreadable(str(path), str(error))]
    except OSError as error:
        reason = error.strerror or error
        return [
            _unreadable(str(path), f"{path} cannot be read ({reason}); it must be an npz file.")
        ]

    def image(number: int) -> NamedSample:
        return NamedSample(f"{path}[{number}]", lambda wanted: wanted.convert(images[[number]])[0])

    return [image(number) for number in range(len(store))]


def _unreadable(name: str, fault: str) -> NamedSample:
    def refuse(_wanted: InputFormat) -> Images:
        raise InvalidInput(fault)

    return NamedSample(name, refuse)
