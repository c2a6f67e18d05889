"""Image files: checked, and decoded in parallel into one array."""

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy
from PIL import ExifTags, Image, ImageOps

from mpfedcl.core.errors import InvalidInput, explain
from mpfedcl.core.files import identify_file
from mpfedcl.core.images import Images, Size, resize_image
from mpfedcl.core.progress import WaitingBar
from mpfedcl.data.samples import ImageFormat, Indices, SampleFormat, choose_format, digest_rows

EXTENSIONS = (".png", ".jpg", ".jpeg")
_FORMATS = ("PNG", "JPEG")
_GREY_MODES = ("1", "L", "LA", "La")
_DEEP_GREY_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N")
_TURNED = (5, 6, 7, 8)
"""EXIF orientations that swap height and width."""
_MOST_FAULTS_NAMED = 3

_Result = TypeVar("_Result")


def is_image_file(path: Path) -> bool:
    """Return whether a path is an image file that is not hidden."""
    return path.suffix.lower() in EXTENSIONS and not path.name.startswith(".") and path.is_file()


@dataclass(frozen=True)
class ImageFileStore:
    """Image files, decoded in parallel when they are asked for."""

    paths: Sequence[Path]

    def __len__(self) -> int:
        return len(self.paths)

    def sign(self, rows: Indices) -> str:
        """Return a digest of the path, size and modification times of each file, in order."""
        paths = [self.paths[row] for row in rows]
        # Resolving a path takes longer than all the rest, and folders are few.
        folders = {folder: folder.resolve() for folder in {path.parent for path in paths}}
        return digest_rows(rows, *(identify_file(path, folders[path.parent]) for path in paths))

    def inspect(self) -> set[SampleFormat]:
        """Read the headers of all files."""
        return {*_map_files(_read_header, self.paths, "Looking at images")}

    def load(self, rows: Indices, wanted: SampleFormat) -> Images:
        """Decode files into one array; no more than images in their final size stays in memory."""
        assert isinstance(wanted, ImageFormat)
        paths = [self.paths[row] for row in rows]
        images = numpy.empty((len(paths), *wanted.shape), dtype=numpy.uint8)
        positions = {path: position for position, path in enumerate(paths)}

        def decode(path: Path) -> None:
            images[positions[path]] = _decode(path, wanted.size, wanted.is_color)

        _map_files(decode, paths, "Decoding images")
        return images


def read_image_files(paths: Sequence[Path], image_size: int | None) -> Images:
    """Decode files into one array: RGB if any is, in one size."""
    store = ImageFileStore(paths)
    wanted = choose_format(store.inspect(), image_size)
    return store.load(numpy.arange(len(paths)), wanted)


def read_image_file(path: Path, size: Size, is_color: bool) -> Images:
    """Decode one file: [height, width], or [height, width, 3] if `is_color`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _decode(path, size, is_color)
        except Exception as error:
            raise InvalidInput(_name_faults([f"{path} ({_explain(error, path)})"])) from None


def convert_image(image: Image.Image, size: Size, is_color: bool) -> Images:
    """Return an image upright, in one color mode and size."""
    flat = _flatten(ImageOps.exif_transpose(image), "RGB" if is_color else "L")
    return numpy.asarray(resize_image(flat, size))


def is_colored(image: Image.Image) -> bool:
    """Return whether an image has color, by its mode."""
    return image.mode not in (*_GREY_MODES, *_DEEP_GREY_MODES)


def _decode(path: Path, size: Size, is_color: bool) -> Images:
    with _open(path) as image:
        return convert_image(image, size, is_color)


def _map_files(work: Callable[[Path], _Result], paths: Sequence[Path], title: str) -> list[_Result]:
    """Process every file in threads; one error names all files that cannot be read."""

    def attempt(path: Path) -> tuple[list[_Result], str | None]:
        try:
            return [work(path)], None
        # Decoders raise nearly anything on broken bytes: OSError, SyntaxError, struct.error, ...
        except Exception as error:
            return [], _explain(error, path)

    results: list[_Result] = []
    faults: list[str] = []
    # Decoders warn of odd but harmless metadata; what matters is checked and raised.
    with (
        warnings.catch_warnings(),
        ThreadPoolExecutor() as executor,
        WaitingBar(title, len(paths)) as bar,
    ):
        warnings.simplefilter("ignore")
        outcomes = executor.map(attempt, paths)
        for path, (result, fault) in zip(paths, outcomes, strict=True):
            bar.advance(1)
            results.extend(result)
            if fault is not None:
                faults.append(f"{path} ({fault})")
    if faults:
        raise InvalidInput(_name_faults(faults))
    return results


def _explain(error: Exception, path: Path) -> str:
    return explain(error).replace(repr(str(path)), "").rstrip()


def _name_faults(faults: list[str]) -> str:
    named = ", ".join(faults[:_MOST_FAULTS_NAMED])
    allowed = f"images must be whole {' or '.join(_FORMATS)} files"
    if len(faults) == 1:
        return f"{named} cannot be read as an image; {allowed}, so repair or remove it."
    more = ", ..." if len(faults) > _MOST_FAULTS_NAMED else ""
    return (
        f"{len(faults)} files cannot be read as images: {named}{more}; {allowed}, so repair or "
        "remove them."
    )


def _open(path: Path) -> Image.Image:
    image = Image.open(path, formats=_FORMATS)
    limit = Image.MAX_IMAGE_PIXELS
    # Pillow raises only above twice its limit, and warns below; we reject above the limit.
    if limit is not None and image.width * image.height > limit:
        image.close()
        raise ValueError(
            f"{image.width} x {image.height} pixels are more than the {limit:,} allowed"
        )
    return image


def _read_header(path: Path) -> ImageFormat:
    """Return the format that the upright image will have."""
    with _open(path) as image:
        turned = False
        # Pillow would decode a whole PNG in search of an EXIF block at its end.
        if image.format != "PNG" or "exif" in image.info:
            turned = image.getexif().get(ExifTags.Base.Orientation) in _TURNED
        size = (image.width, image.height) if turned else (image.height, image.width)
        return ImageFormat(*size, is_colored(image))


def _flatten(image: Image.Image, mode: str) -> Image.Image:
    """Return the image as 8-bit gray ("L") or color ("RGB"); transparent parts turn white."""
    if image.mode in _DEEP_GREY_MODES:
        # Pillow would clip at 255; 16 bits scale to 8 by 65535 / 255.
        deep = numpy.asarray(image, dtype=numpy.float64)
        scaled = numpy.clip(numpy.rint(deep / 257), 0, 255).astype(numpy.uint8)
        return Image.fromarray(scaled).convert(mode)
    if image.mode.endswith(("A", "a")) or "transparency" in image.info:
        see_through = image.convert("LA" if mode == "L" else "RGBA")
        flat = Image.new(mode, image.size, "white")
        flat.paste(see_through.convert(mode), mask=see_through.getchannel("A"))
        return flat
    return image.convert(mode)
