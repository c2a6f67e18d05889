"""Frozen encoders: preprocessing, the interface, and the registry that finds one by name."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, Self

import numpy
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.images import Images, resize_images
from mpfedcl.core.plugins import entry_points, load
from mpfedcl.core.progress import WaitingBar
from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment.names import unknown_encoder
from mpfedcl.experiment.settings import EncoderSettings

_LARGEST_SIZE = 1024
_Color = tuple[float, float, float]


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
        """Return pixels in 0 to 255 [images, 3, height, width] as network inputs."""
        # Scale and shift in one step: (x / 255 - mean) / std.
        mean, std = (
            torch.tensor(values, dtype=dtype, device=pixels.device)[:, None, None]
            for values in (self.mean, self.std)
        )
        return pixels.to(dtype) * (1 / (255 * std)) - mean / std

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str], default: Self) -> Self:
        """Read image_size, mean and std from the metadata of an encoder file.

        Values are JSON, such as "[0.5, 0.5, 0.5]"; missing ones are taken from `default`.
        """
        told = {name: metadata[name] for name in asdict(default) if name in metadata}
        try:
            values = {name: json.loads(text) for name, text in told.items()}
            return TypeAdapter(cls).validate_python({**asdict(default), **values})
        except (ValueError, RecursionError):
            raise InvalidInput(
                f"the encoder's metadata are {str(told)[:200]}; they must be JSON: image_size a "
                "whole number, mean and std lists of three numbers."
            ) from None


@dataclass(frozen=True)
class PixelScaling:
    """Images keep the data's size and color mode; pixels are (x / 255 - mean) / deviation."""

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
        """Return pixels in 0 to 255 as inputs of a model on pixels."""
        return (pixels.to(dtype) / 255 - self.mean) / self.deviation


InputPreparation = Preprocessing | PixelScaling
"""The preparation of images for an encoder."""


def channels_first(images: Tensor) -> Tensor:
    """Return gray [B, h, w] or color [B, h, w, 3] as [B, channels, h, w]."""
    return images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2)


IMAGES_AT_ONCE = 128
"""Keeps the processor busy with little memory (about 100 MB at 64 px)."""
_VERSION = 1
"""To be raised whenever the same weights give other features."""

Features = NDArray[numpy.float32]
"""[images, feature_size]."""


class Encoder(Protocol):
    """A frozen network; equal fingerprints mean equal features for equal images."""

    @property
    def name(self) -> str:
        """The name in listings and messages."""

    @property
    def feature_size(self) -> int:
        """The number of features of an image."""

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of type, weights and preprocessing, in hexadecimal."""

    @property
    def preprocessing(self) -> InputPreparation:
        """The preparation of images."""

    def encode(self, images: Images) -> Features:
        """Return the features of images of any size."""


def find_encoder(
    name: str,
    weights: Path | None,
    *data_folders: Path,
    device: torch.device | str = "cpu",
    find_scaling: Callable[[], PixelScaling] | None = None,
    settings: EncoderSettings | None = None,
) -> Encoder:
    """Return an encoder by name.

    An entry point in `mpfedcl.encoders` is a function of the text after the colon of the name, the
    encoder settings and the device.

    Args:
        name: `encoder.name`, such as resnet18, onnx:FILE or random-filters:SEED.
        weights: `encoder.weights`, for encoders that take some.
        data_folders: Folders that may hold weights.
        device: Device to compute on.
        find_scaling: Returns the format and scaling of the data's images, for `random-filters`.
        settings: How the outputs of an ONNX model are used.
    """
    # The modules of encoders need this one.
    from mpfedcl.models.encoders import torch_encoders

    kind, _, rest = name.partition(":")
    settings = settings or EncoderSettings()
    if kind == "resnet18" and not rest:
        return torch_encoders.load_resnet(weights, *data_folders, device=device)
    entry = entry_points("mpfedcl.encoders").get(kind)
    if weights is not None and entry is None:
        raise InvalidInput(
            f"encoder.weights is {str(weights)!r}, but encoder.name {name!r} takes none; it must "
            "be left out, or encoder.name must be resnet18."
        )
    if kind == "onnx" and rest:
        from mpfedcl.models.encoders.onnx_encoder import OnnxEncoder

        return OnnxEncoder(Path(rest).expanduser(), settings)
    if kind == "random-filters":
        from mpfedcl.models.encoders.random_filters import RandomFilters

        if find_scaling is None:
            raise InvalidInput(
                f"encoder.name is {name!r}, which is made for images of a known size; there are "
                "none here, so it must be another."
            )
        return RandomFilters.parse(name, find_scaling, device)
    if kind == "random-resnet18" and (not rest or rest.isdecimal()):
        return torch_encoders.random_resnet(name, int(rest or 0), device)
    if entry is None:
        raise unknown_encoder(name)
    found: Encoder = load(entry, "encoder.name")(rest, settings, torch.device(device))
    return found


def fingerprint_weights(kind: str, tensors: Tensors, preprocessing: InputPreparation) -> str:
    """Return the SHA-256 of everything that determines the features."""
    sha = hashlib.sha256(fingerprint_header(kind, preprocessing))
    for name, value in sorted(tensors.items()):
        sha.update(json.dumps([name, list(value.shape), str(value.dtype)]).encode())
        sha.update(value.detach().cpu().contiguous().numpy().data)
    return sha.hexdigest()


def fingerprint_header(kind: str, preprocessing: InputPreparation) -> bytes:
    """Return the first part of the content of a fingerprint."""
    return json.dumps([_VERSION, kind, asdict(preprocessing)], sort_keys=True).encode()


class TorchEncoder(ABC):
    """A frozen network in torch; subclasses define `apply`."""

    def __init__(
        self,
        name: str,
        kind: str,
        tensors: Tensors,
        preprocessing: InputPreparation,
        device: torch.device | str,
        feature_size: int,
        batch_size: int | None = None,
    ) -> None:
        self.name = name
        self.tensors = tensors
        """Parameters and constants."""
        self.preprocessing = preprocessing
        self.feature_size = feature_size
        self.fingerprint = fingerprint_weights(kind, tensors, preprocessing)
        self._device = torch.device(device)
        self._batch_size = batch_size

    @abstractmethod
    def apply(self, tensors: Tensors, inputs: Tensor) -> Tensor:
        """Return the features [B, feature_size] of standardized pixels [B, channels, h, w]."""

    @torch.inference_mode()
    def encode(self, images: Images) -> Features:
        """Return the features [images, feature_size]."""
        tensors = {name: value.to(self._device) for name, value in self.tensors.items()}

        def encode_batch(batch: Images) -> Features:
            # A batch of one uses other kernels, whose last bits differ: the features of an image
            # must not depend on the number of images.
            whole = batch if len(batch) > 1 else numpy.repeat(batch, 2, axis=0)
            pixels = torch.from_numpy(whole).to(self._device)
            inputs = self.preprocessing.standardize(pixels, torch.float32)
            features: Features = self.apply(tensors, inputs)[: len(batch)].cpu().numpy()
            return features

        return encode_in_batches(encode_batch, images, self, self._batch_size)


def encode_in_batches(
    encode_batch: Callable[[Images], Features],
    images: Images,
    encoder: Encoder,
    batch_size: int | None = None,
) -> Features:
    """Encode images by a function of bytes [B, channels, h, w]; features must be finite."""
    size = batch_size or IMAGES_AT_ONCE
    features = numpy.empty((len(images), encoder.feature_size), dtype=numpy.float32)
    with WaitingBar(f"Encoding images, {encoder.name}", len(images)) as bar:
        for first in range(0, len(images), size):
            batch = encoder.preprocessing.to_input_bytes(images[first : first + size])
            features[first : first + len(batch)] = encode_batch(batch)
            bar.advance(len(batch))
    if not numpy.isfinite(features).all():
        raise InvalidInput(
            f"the encoder {encoder.name} gives features that are not finite numbers; its weights "
            "must be sound, and its preprocessing the one it was trained with."
        )
    return features
