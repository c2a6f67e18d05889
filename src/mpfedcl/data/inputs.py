"""From images to a model's inputs: pixels as they are, or features of a frozen encoder."""

import hashlib
import json
from collections.abc import Callable

import numpy
import torch
from torch import Tensor

from mpfedcl.data.samples import SampleIndex
from mpfedcl.data.train_test_split import Indices
from mpfedcl.encoders.encoder import Encoder
from mpfedcl.encoders.feature_cache import FeatureCache
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.datasets import find_specification
from mpfedcl.images import Images, choose_size

InputMaker = Callable[[SampleIndex, Indices, Experiment], Tensor]
"""Turns images of a set, by number, into inputs [images, ...] in the experiment's precision."""


def make_plain_inputs(sample_index: SampleIndex, rows: Indices, experiment: Experiment) -> Tensor:
    """Return pixels [images, height, width] or [images, height, width, 3]; see `to_inputs`."""
    # The size comes from all images of the set, so that it does not depend on the draw.
    sizes, is_colour = sample_index.store.inspect_images()
    size = choose_size(sizes, experiment.dataset.image_size)
    return to_inputs(sample_index.store.load(rows, size, is_colour), experiment)


def to_inputs(images: Images, experiment: Experiment) -> Tensor:
    """Return bytes as numbers, standardized by the set's constants or in 0 to 1."""
    pixels = torch.from_numpy(numpy.ascontiguousarray(images))
    inputs = pixels.to(getattr(torch, experiment.dtype)).div_(255)
    if experiment.dataset.standardize:
        spec = find_specification(experiment.dataset.name)
        inputs.sub_(spec.pixel_mean).div_(spec.pixel_deviation)
    return inputs


def feature_input_maker(encoder: Encoder) -> InputMaker:
    """Return a maker of features [images, feature_size]; images are opened only if it must be."""

    def make(sample_index: SampleIndex, rows: Indices, experiment: Experiment) -> Tensor:
        def load() -> Images:
            # In the encoder's size at once: less memory, and every image is resized once.
            size = encoder.preprocessing.image_size
            return sample_index.store.load(rows, (size, size), is_colour=True)

        names = json.dumps(sample_index.store.identify(rows)).encode()
        with FeatureCache() as cache:
            signature = hashlib.sha256(names).hexdigest()
            features = cache.encode_source(encoder, signature, load)
        return torch.from_numpy(features).to(getattr(torch, experiment.dtype))

    return make


def byte_input_maker(encoder: Encoder) -> InputMaker:
    """Return a maker of images as bytes [images, 3, size, size], for an encoder that is trained."""

    def make(sample_index: SampleIndex, rows: Indices, _experiment: Experiment) -> Tensor:
        size = encoder.preprocessing.image_size
        images = sample_index.store.load(rows, (size, size), is_colour=True)
        return torch.from_numpy(encoder.preprocessing.to_input_bytes(images))

    return make
