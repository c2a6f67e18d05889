"""The images that a command line names: files, folders, globs, archives, a list on stdin."""

import glob
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy

from mpfedcl.data.image_files import EXTENSIONS, is_image_file, read_image_file
from mpfedcl.data.npz_archive import open_unlabelled_samples
from mpfedcl.deployment.input_format import InputFormat
from mpfedcl.errors import InvalidInput
from mpfedcl.files import identify_file
from mpfedcl.images import Images

_IMAGES_AT_ONCE = 256


@dataclass(frozen=True)
class NamedSample:
    """An image that is opened when it is asked for; what is wrong with it is said then."""

    name: str
    load: Callable[[InputFormat], Images]


@dataclass(frozen=True)
class SampleBatch:
    """Images that could be read, and what is wrong with the others, by place in the batch."""

    names: list[str]
    images: Images
    faults: dict[int, str]


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


def read_batches(images: Sequence[NamedSample], input_format: InputFormat) -> Iterator[SampleBatch]:
    """Yield the images batch by batch, decoded in parallel; none is lost for another's fault."""

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
            yield SampleBatch([image.name for image in part], stacked, faults)


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
