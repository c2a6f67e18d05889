"""Frozen encoders: images in, features out, and a fingerprint that tells one from another."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.images import Images
from mpfedcl.core.progress import WaitingBar
from mpfedcl.core.rng import generator
from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment.names import unknown_encoder
from mpfedcl.experiment.settings import EncoderSettings
from mpfedcl.models.encoders.preprocessing import InputPreparation, PixelScaling, Preprocessing
from mpfedcl.models.encoders.weights import find_weights, load_weights
from mpfedcl.models.resnet import ResNet18

IMAGES_AT_ONCE = 128
"""A batch that keeps the processor busy and needs little memory (about 100 MB at 64 px)."""
_VERSION = 1
"""Raised whenever features of the same weights would come out differently."""

Features = NDArray[numpy.float32]
"""[images, feature_size]."""
OnProgress = Callable[[int], None]
"""Told how many more images are done."""


class Encoder(Protocol):
    """A frozen network; equal fingerprints mean equal features for equal images."""

    @property
    def name(self) -> str:
        """What people call it."""

    @property
    def feature_size(self) -> int:
        """Numbers that stand for an image."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 over kind, weights and preprocessing, in hexadecimal."""

    @property
    def preprocessing(self) -> InputPreparation:
        """What happens to an image first."""

    def encode(self, images: Images, on_progress: OnProgress | None = None) -> Features:
        """Return the features of images in any size; a bar shows unless `on_progress` is given."""


class ResNetEncoder:
    """ResNet-18 with fixed weights and running statistics."""

    feature_size = ResNet18.feature_size

    def __init__(
        self,
        name: str,
        tensors: Tensors,
        preprocessing: Preprocessing,
        device: torch.device | str = "cpu",
    ) -> None:
        self.name = name
        self.preprocessing = preprocessing
        self.tensors = tensors
        """Parameters and running statistics in float32, for `TrainableEncoder` to start from."""
        self.fingerprint = fingerprint_weights("resnet18", tensors, preprocessing)
        self._device = torch.device(device)
        self._network = ResNet18()

    @torch.inference_mode()
    def encode(self, images: Images, on_progress: OnProgress | None = None) -> Features:
        """Return the features [images, 512]."""
        params = {name: value.to(self._device) for name, value in self.tensors.items()}
        encode_batch = torch_batch_encoder(
            lambda inputs: self._network.apply(params, inputs), self.preprocessing, self._device
        )
        return encode_in_batches(encode_batch, images, self, on_progress)


def find_encoder(
    name: str,
    weights: Path | None,
    *data_folders: Path,
    device: torch.device | str = "cpu",
    find_scaling: Callable[[], PixelScaling] | None = None,
    settings: EncoderSettings | None = None,
) -> Encoder:
    """Return the encoder that the settings name; `settings` say how an ONNX model is used.

    `random-resnet18` is the same network on every call; `random-resnet18:7` is another one, and so
    it is with `random-filters`, which are made for the images' own format: `find_scaling` tells it.
    """
    kind, _, rest = name.partition(":")
    if kind == "resnet18" and not rest:
        path = find_weights(weights, *data_folders)
        found = load_weights(path)
        return ResNetEncoder(f"resnet18 {path.name}", found.tensors, found.preprocessing, device)
    if kind == "torchvision" and rest:
        from mpfedcl.models.encoders.torchvision_encoder import load_torchvision_encoder

        return load_torchvision_encoder(rest, weights, device)
    if weights is not None:
        raise InvalidInput(
            f"encoder.weights is {str(weights)!r}, but encoder.name {name!r} takes none; it must "
            "be left out, or encoder.name must be resnet18."
        )
    if kind == "onnx" and rest:
        from mpfedcl.models.encoders.onnx_encoder import OnnxEncoder

        return OnnxEncoder(Path(rest).expanduser(), settings or EncoderSettings())
    if kind == "random-filters":
        from mpfedcl.models.encoders.random_filters import RandomFilters

        if find_scaling is None:
            raise InvalidInput(
                f"encoder.name is {name!r}, which is made for images of a known size; there are "
                "none here, so it must be another."
            )
        return RandomFilters.parse(name, find_scaling, device)
    if kind == "random-resnet18" and (not rest or rest.isdecimal()):
        tensors = ResNet18().init(generator(int(rest or 0), "random-resnet18"), torch.float32)
        return ResNetEncoder(name, tensors, Preprocessing(), device)
    raise unknown_encoder(name)


def fingerprint_weights(kind: str, tensors: Tensors, preprocessing: InputPreparation) -> str:
    """Return the SHA-256 over everything that decides what the features are."""
    sha = hashlib.sha256(fingerprint_header(kind, preprocessing))
    for name, value in sorted(tensors.items()):
        sha.update(json.dumps([name, list(value.shape), str(value.dtype)]).encode())
        sha.update(value.detach().cpu().contiguous().numpy().data)
    return sha.hexdigest()


def fingerprint_header(kind: str, preprocessing: InputPreparation) -> bytes:
    """Return what a fingerprint begins with."""
    return json.dumps([_VERSION, kind, preprocessing.to_json()], sort_keys=True).encode()


def torch_batch_encoder(
    apply: Callable[[Tensor], Tensor], preprocessing: InputPreparation, device: torch.device
) -> Callable[[Images], Features]:
    """Return what `encode_in_batches` needs of a network in torch."""

    def encode_batch(batch: Images) -> Features:
        # A batch of one takes other kernels, whose last bits differ: an image's features must not
        # depend on how many others were missing from the cache.
        whole = batch if len(batch) > 1 else numpy.repeat(batch, 2, axis=0)
        inputs = preprocessing.standardize(torch.from_numpy(whole).to(device), torch.float32)
        features: Features = apply(inputs)[: len(batch)].cpu().numpy()
        return features

    return encode_batch


def encode_in_batches(
    encode_batch: Callable[[Images], Features],
    images: Images,
    encoder: Encoder,
    on_progress: OnProgress | None,
    batch_size: int | None = None,
) -> Features:
    """Encode bytes [images, channels, height, width] in batches, so that few are in memory at once.

    A bar shows where the caller shows none; broken numbers are refused.
    """
    size = batch_size or IMAGES_AT_ONCE
    features = numpy.empty((len(images), encoder.feature_size), dtype=numpy.float32)
    with WaitingBar("Encoding images", len(images)) as bar:
        for first in range(0, len(images), size):
            batch = encoder.preprocessing.to_input_bytes(images[first : first + size])
            features[first : first + len(batch)] = encode_batch(batch)
            (on_progress or bar.advance)(len(batch))
    if not numpy.isfinite(features).all():
        raise InvalidInput(
            f"the encoder {encoder.name} gives features that are not finite numbers; its weights "
            "must be sound, and its preprocessing the one it was trained with."
        )
    return features
