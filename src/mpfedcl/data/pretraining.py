"""An image set as pretraining needs it: all domains together, and some images held out."""

import numpy
import torch

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.images import Images
from mpfedcl.core.rng import numpy_generator
from mpfedcl.data.reader import read_image_set
from mpfedcl.data.train_test_split import Indices, split_by_class
from mpfedcl.experiment.pretraining import PretrainSettings
from mpfedcl.models.encoders.preprocessing import Preprocessing
from mpfedcl.models.encoders.pretraining import PretrainingData

_FEWEST_CLASSES = 2


def load_pretraining_data(settings: PretrainSettings) -> PretrainingData:
    """Read the set, whole, and hold some images out unless it has test images of its own."""
    dataset = settings.dataset
    values = {**dataset.model_dump(), "image_size": settings.image_size}
    image_set = read_image_set(type(dataset)(**values))
    training: list[tuple[Images, Indices]] = []
    testing: list[tuple[Images, Indices]] = []
    for domain in image_set.domains:
        images, labels = domain.train_images, domain.train_labels
        if domain.test_images is not None and domain.test_labels is not None:
            training.append((images, labels))
            testing.append((domain.test_images, domain.test_labels))
        else:
            key = numpy_generator(settings.seed, "pretrain", "split", domain.name)
            kept, held_out = split_by_class(labels, settings.held_out, key)
            training.append((images[kept], labels[kept]))
            testing.append((images[held_out], labels[held_out]))
    images, labels = _join(training, settings)
    size = dataset.train_size
    if size is not None:
        if size > len(labels):
            raise InvalidInput(
                f"dataset.train_size is {size:,}; it must be at most {len(labels):,}, the number "
                "of training images."
            )
        key = numpy_generator(settings.seed, "pretrain", "draw")
        chosen = numpy.sort(key.choice(len(labels), size, replace=False))
        images, labels = images[chosen], labels[chosen]
    if len(numpy.unique(labels)) < _FEWEST_CLASSES:
        raise InvalidInput(
            f"dataset.name is {dataset.name!r} with {len(labels)} training images of "
            f"{len(numpy.unique(labels))} classes; an encoder needs at least 2 classes."
        )
    test_images, test_labels = _join(testing, settings)
    return PretrainingData(
        image_set.class_names,
        torch.from_numpy(images),
        torch.from_numpy(labels),
        torch.from_numpy(test_images),
        torch.from_numpy(test_labels),
    )


def _join(
    parts: list[tuple[Images, Indices]], settings: PretrainSettings
) -> tuple[Images, Indices]:
    preprocessing = Preprocessing(settings.image_size)
    return (
        numpy.concatenate([preprocessing.to_input_bytes(images) for images, _ in parts]),
        numpy.concatenate([labels for _, labels in parts]),
    )
