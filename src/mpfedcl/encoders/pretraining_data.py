"""What an encoder is pretrained on: images, labels, and the random changes made to the images."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

_MARGIN = 8
"""Images are shifted by at most this part of their side."""


@dataclass(frozen=True)
class PretrainingData:
    """Bytes [images, 3, size, size] and labels, for training and for measuring."""

    class_names: tuple[str, ...]
    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @property
    def digest(self) -> str:
        """SHA-256 over the images and labels that train."""
        sha = hashlib.sha256(self.images.numpy().data)
        sha.update(self.labels.numpy().data)
        return sha.hexdigest()


def augment(pixels: Tensor, key: torch.Generator, *, flip: bool) -> Tensor:
    """Shift each image at random, repeating its edge, and mirror half of them if `flip`."""
    count, size = len(pixels), pixels.shape[-1]
    margin = size // _MARGIN
    places = torch.arange(size)
    rows, columns = (
        (places + torch.randint(-margin, margin + 1, (count, 1), generator=key)).clamp(0, size - 1)
        for _ in range(2)
    )
    if flip:
        mirrored = torch.rand((count, 1), generator=key) < 0.5
        columns = torch.where(mirrored, columns.flip(1), columns)
    which = torch.arange(count)[:, None, None, None]
    channels = torch.arange(pixels.shape[1])[None, :, None, None]
    return pixels[which, channels, rows[:, None, :, None], columns[:, None, None, :]]
