"""From samples to a model's inputs: pixels or vectors, or features of a frozen encoder."""

import hashlib
import json
import math
from collections.abc import Callable

import numpy
import torch
from torch import Tensor

from mpfedcl.core.images import Images
from mpfedcl.data.kept_inputs import keep_inputs
from mpfedcl.data.sample_format import ImageFormat, SampleFormat, Samples, choose_format
from mpfedcl.data.samples import SampleIndex
from mpfedcl.data.train_test_split import Indices
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.datasets import find_specification
from mpfedcl.models.encoders.encoder import Encoder
from mpfedcl.models.encoders.feature_cache import FeatureCache

InputMaker = Callable[[SampleIndex, Indices, Experiment], Tensor]
"""Turns samples of a set, by number, into inputs [samples, ...] in the experiment's precision."""


def make_plain_inputs(sample_index: SampleIndex, rows: Indices, experiment: Experiment) -> Tensor:
    """Return pixels [images, height, width] or [images, height, width, 3], or vectors."""
    wanted = choose_own_format(sample_index, experiment)
    constants = pixel_constants(experiment) if wanted.vector_width is None else None
    return _keep(
        f"{wanted!r} {constants}",
        sample_index,
        rows,
        experiment.dtype,
        wanted.shape,
        lambda: to_inputs(sample_index.store.load(rows, wanted), experiment),
    )


def _keep(
    kind: str,
    sample_index: SampleIndex,
    rows: Indices,
    dtype: str,
    shape: tuple[int, ...] | None,
    make: Callable[[], Tensor],
) -> Tensor:
    """Make inputs of a kind from some samples, unless they have been made before."""
    num_bytes = None
    if shape is not None:
        num_bytes = len(rows) * math.prod(shape) * numpy.dtype(dtype).itemsize
    return keep_inputs(lambda: f"{kind} {dtype} {sample_index.store.sign(rows)}", num_bytes, make)


def choose_own_format(sample_index: SampleIndex, experiment: Experiment) -> SampleFormat:
    """Return the format of samples that meet no encoder with a size of its own."""
    # The size comes from all images of the set, so that it does not depend on the draw.
    formats = sample_index.store.inspect()
    return choose_format(formats, experiment.dataset.image_size, experiment.dtype)


def to_inputs(samples: Samples, experiment: Experiment) -> Tensor:
    """Return vectors as they are; bytes standardized by the set's constants or in 0 to 1."""
    numbers = torch.from_numpy(numpy.ascontiguousarray(samples))
    inputs = numbers.to(getattr(torch, experiment.dtype))
    if numbers.is_floating_point():
        return inputs
    mean, deviation = pixel_constants(experiment)
    return inputs.div_(255).sub_(mean).div_(deviation)


def pixel_constants(experiment: Experiment) -> tuple[float, float]:
    """Return mean and deviation by which pixels in 0 to 1 are standardized; 0 and 1 if not."""
    if not experiment.dataset.standardize:
        return 0.0, 1.0
    spec = find_specification(experiment.dataset.name)
    return spec.pixel_mean, spec.pixel_deviation


def encoder_input_format(encoder: Encoder) -> ImageFormat:
    """Return the format in which an encoder takes images."""
    found = ImageFormat.from_shape(encoder.preprocessing.image_shape)
    assert found is not None
    return found


def feature_input_maker(encoder: Encoder) -> InputMaker:
    """Return a maker of features [images, feature_size]; images are opened only if it must be."""

    def make(sample_index: SampleIndex, rows: Indices, experiment: Experiment) -> Tensor:
        # Kept in one order, whichever they are asked for in: another split finds them again.
        ordered, places = numpy.unique(rows, return_inverse=True)

        def load() -> Images:
            # In the encoder's size at once: less memory, and every image is resized once.
            return sample_index.store.load(ordered, encoder_input_format(encoder))

        def encode() -> Tensor:
            names = json.dumps(sample_index.store.identify(ordered)).encode()
            with FeatureCache() as cache:
                signature = hashlib.sha256(names).hexdigest()
                features = cache.encode_source(encoder, signature, load)
            found = torch.from_numpy(features).to(getattr(torch, experiment.dtype))
            return found if numpy.array_equal(ordered, rows) else found[torch.from_numpy(places)]

        kind = f"features {encoder.fingerprint}"
        return _keep(kind, sample_index, rows, experiment.dtype, None, encode)

    return make


def byte_input_maker(encoder: Encoder) -> InputMaker:
    """Return a maker of images as bytes [images, 3, size, size], for an encoder that is trained."""

    def make(sample_index: SampleIndex, rows: Indices, _experiment: Experiment) -> Tensor:
        wanted = encoder_input_format(encoder)

        def load() -> Tensor:
            images = sample_index.store.load(rows, wanted)
            return torch.from_numpy(encoder.preprocessing.to_input_bytes(images))

        kind = f"bytes {encoder.preprocessing.to_json()}"
        return _keep(kind, sample_index, rows, "uint8", wanted.shape, load)

    return make
