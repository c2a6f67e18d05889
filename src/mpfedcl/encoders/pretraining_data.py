"""The images that an encoder is trained on: all domains together, and some held out."""

import hashlib
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from mpfedcl.data.image_set import Domain
from mpfedcl.data.reader import read_image_set
from mpfedcl.data.split import Indices, split_by_class
from mpfedcl.encoders.preprocessing import Preprocessing
from mpfedcl.errors import InvalidInput
from mpfedcl.experiment.pretraining import PretrainSettings
from mpfedcl.images import Images
from mpfedcl.rng import numpy_generator

_FEWEST_IMAGES = 2
_MARGIN = 8
"""Images are shifted by at most this part of their side."""


@dataclass(frozen=True)
class PretrainData:
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


def load_pretrain_data(settings: PretrainSettings) -> PretrainData:
    """Read the set, whole, and hold some images out unless it has test images of its own."""
    dataset = settings.dataset
    values = {**dataset.model_dump(), "image_size": settings.image_size}
    image_set = read_image_set(type(dataset)(**values))
    training: list[tuple[Images, Indices]] = []
    testing: list[tuple[Images, Indices]] = []
    for domain in image_set.domains:
        kept, held_out = _split(domain, settings)
        training.append(kept)
        testing.append(held_out)
    images, labels = _join(training, settings)
    if dataset.train_size is not None:
        images, labels = _draw(images, labels, settings)
    if len(labels) < _FEWEST_IMAGES or len(numpy.unique(labels)) < _FEWEST_IMAGES:
        raise InvalidInput(
            f"dataset.name is {dataset.name!r} with {len(labels)} training images of "
            f"{len(numpy.unique(labels))} classes; an encoder needs at least 2 classes."
        )
    test_images, test_labels = _join(testing, settings)
    return PretrainData(
        image_set.class_names,
        torch.from_numpy(images),
        torch.from_numpy(labels),
        torch.from_numpy(test_images),
        torch.from_numpy(test_labels),
    )


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


def _split(
    domain: Domain, settings: PretrainSettings
) -> tuple[tuple[Images, Indices], tuple[Images, Indices]]:
    images, labels = domain.train_images, domain.train_labels
    if domain.test_images is not None and domain.test_labels is not None:
        return (images, labels), (domain.test_images, domain.test_labels)
    key = numpy_generator(settings.seed, "pretrain", "split", domain.name)
    kept, held_out = split_by_class(labels, settings.held_out, key)
    return (images[kept], labels[kept]), (images[held_out], labels[held_out])


def _join(
    parts: list[tuple[Images, Indices]], settings: PretrainSettings
) -> tuple[Images, Indices]:
    preprocessing = Preprocessing(settings.image_size)
    return (
        numpy.concatenate([preprocessing.arrange(images) for images, _ in parts]),
        numpy.concatenate([labels for _, labels in parts]),
    )


def _draw(images: Images, labels: Indices, settings: PretrainSettings) -> tuple[Images, Indices]:
    size = settings.dataset.train_size
    assert size is not None
    if size > len(labels):
        raise InvalidInput(
            f"dataset.train_size is {size:,}; it must be at most {len(labels):,}, the number of "
            "training images."
        )
    key = numpy_generator(settings.seed, "pretrain", "draw")
    chosen = numpy.sort(key.choice(len(labels), size, replace=False))
    return images[chosen], labels[chosen]
