"""From an experiment's settings to the clients' data and the model that fits them."""

from collections.abc import Callable

import torch
from torch import Tensor

from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.client_data import FederatedData, load_federated_data
from mpfedcl.data.inputs import (
    InputMaker,
    byte_input_maker,
    choose_own_format,
    feature_input_maker,
    make_plain_inputs,
    pixel_constants,
)
from mpfedcl.data.samples import SampleIndex
from mpfedcl.data.train_test_split import Indices
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.data_folder import encoder_data_folders
from mpfedcl.models import Model
from mpfedcl.models.encoders.encoder import Encoder, find_encoder
from mpfedcl.models.encoders.preprocessing import PixelScaling
from mpfedcl.models.encoders.random_filters import RandomFilters
from mpfedcl.models.encoders.trainable_encoder import make_model

Loader = Callable[[Experiment, InputMaker | None], FederatedData]
"""Opens data, given how images become inputs; without it, pixels or vectors as they are."""


def load_data_and_model(
    experiment: Experiment, device: torch.device, load: Loader = load_federated_data
) -> tuple[FederatedData, Model]:
    """Return the clients' data and the model that fits them: on samples, features, or both."""
    settings = experiment.encoder
    if settings.name in (None, "none"):
        if settings.train or settings.weights is not None:
            raise InvalidInput(
                "encoder.name is 'none'; with encoder.train or encoder.weights it must name an "
                "encoder, such as resnet18."
            )
        return _load_plain_data(experiment, device, load)
    found: list[Encoder] = []

    def make_inputs(sample_index: SampleIndex, rows: Indices, experiment: Experiment) -> Tensor:
        if sample_index.vector_width is not None:
            raise InvalidInput(
                f"encoder.name is {settings.name!r}, but the samples are {sample_index}; it must "
                "be none or left out, because encoders take images."
            )
        # Only once the data are split: data that are missing are the first thing to say.
        encoder = find_experiment_encoder(
            experiment, device, lambda: choose_own_format(sample_index, experiment).shape
        )
        found.append(encoder)
        make = byte_input_maker(encoder) if settings.train else feature_input_maker(encoder)
        return make(sample_index, rows, experiment)

    data = load(experiment, make_inputs).to(device)
    (encoder,) = found
    # On record, so that a run is not resumed behind other weights.
    data.partition["encoder"] = encoder.fingerprint
    if isinstance(encoder, RandomFilters):
        # Nothing else tells it: the features are as many for every size.
        data.partition["image_shape"] = list(encoder.preprocessing.image_shape)
    model = make_model(
        encoder, data.input_size, data.num_classes, experiment.model, trains_encoder=settings.train
    )
    return data, model


def _load_plain_data(
    experiment: Experiment, device: torch.device, load: Loader
) -> tuple[FederatedData, Model]:
    """Return data that meet no encoder, and the model on them."""
    shapes: list[tuple[int, ...]] = []

    def make_inputs(sample_index: SampleIndex, rows: Indices, experiment: Experiment) -> Tensor:
        inputs = make_plain_inputs(sample_index, rows, experiment)
        shapes.append(tuple(inputs.shape[1:]))
        return inputs

    data = load(experiment, make_inputs).to(device)
    # A client that has its samples to itself uses its model on others of the same form.
    data.partition.setdefault("input_shape", list(shapes[0]))
    if experiment.model.name == "cnn" and not data.holds_vectors:
        # A server must know it too, and flat pixels do not tell.
        data.partition["image_shape"] = list(shapes[0])
    model = make_model(
        None,
        data.input_size,
        data.num_classes,
        experiment.model,
        takes_features=data.holds_vectors,
        image_shape=shapes[0],
    )
    return data, model


def find_experiment_encoder(
    experiment: Experiment,
    device: torch.device,
    find_image_shape: Callable[[], tuple[int, ...]] | None = None,
) -> Encoder:
    """Return the encoder that an experiment names; its weights may lie with the data.

    One without an image size of its own asks for the shape of the images.
    """

    def find_scaling() -> PixelScaling:
        assert find_image_shape is not None
        return PixelScaling(find_image_shape(), *pixel_constants(experiment))

    settings = experiment.encoder
    folders = encoder_data_folders(experiment.dataset)
    return find_encoder(
        str(settings.name),
        settings.weights,
        *folders,
        device=device,
        find_scaling=find_scaling if find_image_shape else None,
        settings=settings,
    )
