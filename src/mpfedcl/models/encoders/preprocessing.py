"""What happens to an image before an encoder sees it: size, color and scale, all in one place."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self

import numpy
import torch
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.images import Images, resize_images

NOTE = "mpfedcl"
"""The metadata key that holds everything as JSON: one key, so that equal files have equal bytes."""

_LARGEST_SIZE = 1024
_Color = tuple[float, float, float]
_NUMBER = r"-?(?:\d+\.?\d*|\.\d+)(?:[eE]-?\d+)?"
_THREE_NUMBERS = rf"\[?\(?\s*({_NUMBER})\s*,\s*({_NUMBER})\s*,\s*({_NUMBER})"


class InputPreparation(Protocol):
    """What an encoder does to an image first."""

    @property
    def image_shape(self) -> tuple[int, ...]:
        """The shape of one image as bytes: (height, width), or (height, width, 3) in color."""

    def to_input_bytes(self, images: Images) -> Images:
        """Return the images as bytes [images, channels, height, width] in that size and color."""

    def standardize(self, pixels: Tensor, dtype: torch.dtype) -> Tensor:
        """Return these bytes as the numbers a network expects."""

    def to_json(self) -> dict[str, Any]:
        """Return the values for a file's metadata and for fingerprints."""


@dataclass(frozen=True)
class Preprocessing:
    """Images become RGB squares (gray is replicated) whose pixels are (x / 255 - mean) / std.

    Images that shrink (photos, mostly) are resampled by Lanczos, images that grow (digits) by
    bicubic interpolation; see `resize_image`.
    """

    image_size: int = 64
    mean: _Color = (0.485, 0.456, 0.406)
    std: _Color = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        if not 1 <= self.image_size <= _LARGEST_SIZE:
            raise InvalidInput(
                f"the encoder's image_size is {self.image_size}; it must be 1 to {_LARGEST_SIZE}."
            )
        if min(self.std) <= 0:
            raise InvalidInput(f"the encoder's std is {self.std}; each must be above 0.")

    @property
    def image_shape(self) -> tuple[int, ...]:
        """The shape of one image as bytes."""
        return self.image_size, self.image_size, 3

    def to_input_bytes(self, images: Images) -> Images:
        """Return the images as RGB bytes [images, 3, image_size, image_size]."""
        resized = resize_images(images, (self.image_size, self.image_size), is_color=True)
        return numpy.ascontiguousarray(resized.transpose(0, 3, 1, 2))

    def standardize(self, pixels: Tensor, dtype: torch.dtype) -> Tensor:
        """Return pixels in 0 to 255 [images, 3, height, width] as the numbers a network expects."""
        # Scale and shift in one step: (x / 255 - mean) / std.
        mean, std = (
            torch.tensor(values, dtype=dtype, device=pixels.device)[:, None, None]
            for values in (self.mean, self.std)
        )
        return pixels.to(dtype) * (1 / (255 * std)) - mean / std

    def to_json(self) -> dict[str, Any]:
        """Return the values for a file's metadata and for fingerprints."""
        return asdict(self)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str], default: Self) -> Self:
        """Read the metadata of an encoder file; what they do not say is as in `default`.

        Either the JSON under the key `mpfedcl`, or flat keys: image_size or resolution
        ("64x64 RGB"), mean and std ("[0.5, 0.5, 0.5]"), or normalization ("x/255 then mean [...]
        std [...]").
        """
        if NOTE in metadata:
            return cls._from_note(metadata[NOTE], default)
        size = re.match(
            r"\s*(\d{1,4})(?!\d)", metadata.get("image_size") or metadata.get("resolution") or ""
        )
        scale = metadata.get("normalization") or metadata.get("normalisation") or ""
        return cls(
            int(size[1]) if size else default.image_size,
            _find_color(metadata.get("mean", ""))
            or _find_color(scale, after="mean")
            or default.mean,
            _find_color(metadata.get("std", "")) or _find_color(scale, after="std") or default.std,
        )

    @classmethod
    def _from_note(cls, note: str, default: Self) -> Self:
        try:
            values = {**default.to_json(), **json.loads(note)["preprocessing"]}
            mean, std = ([float(number) for number in values[name]] for name in ("mean", "std"))
            if len(mean) != 3 or len(std) != 3:
                raise ValueError
            return cls(
                int(values["image_size"]), (mean[0], mean[1], mean[2]), (std[0], std[1], std[2])
            )
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise InvalidInput(
                f"the encoder's metadata {NOTE!r} are {note[:80]!r}; they must be JSON with "
                "preprocessing: image_size, mean and std."
            ) from None


@dataclass(frozen=True)
class PixelScaling:
    """Images keep the data's own size and color; pixels are (x / 255 - mean) / deviation."""

    image_shape: tuple[int, ...]
    """(height, width), or (height, width, 3) in color."""
    mean: float
    deviation: float

    @property
    def channels(self) -> int:
        """3 in color, else 1."""
        return 3 if len(self.image_shape) == 3 else 1

    def to_input_bytes(self, images: Images) -> Images:
        """Return images that are gray, or RGB for color, as bytes [images, channels, h, w]."""
        height, width = self.image_shape[:2]
        resized = resize_images(images, (height, width), is_color=self.channels == 3)
        # A copy: torch takes no array that cannot be written to, as decoded images may be.
        planes = resized[:, None] if resized.ndim == 3 else resized.transpose(0, 3, 1, 2)
        return numpy.array(planes, order="C")

    def standardize(self, pixels: Tensor, dtype: torch.dtype) -> Tensor:
        """Return pixels in 0 to 255 as a model on pixels gets them."""
        return (pixels.to(dtype) / 255 - self.mean) / self.deviation

    def to_json(self) -> dict[str, Any]:
        """Return the values for a file's metadata and for fingerprints."""
        return asdict(self)


def channels_first(images: Tensor) -> Tensor:
    """Return gray [B, h, w] or color [B, h, w, 3] as [B, channels, h, w]."""
    return images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2)


def _find_color(text: str, after: str = "") -> _Color | None:
    """Return the first three numbers of a list that follows a word, or None."""
    found = re.search(rf"{after}\s*[:=]?\s*{_THREE_NUMBERS}", text)
    return (float(found[1]), float(found[2]), float(found[3])) if found else None
