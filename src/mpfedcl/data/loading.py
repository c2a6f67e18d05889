"""From an experiment's settings to the clients' data and the model that fits them."""

from collections.abc import Callable

import torch
from torch import Tensor

from mpfedcl.data.client_data import FederatedData, load_federated
from mpfedcl.data.image_set import Listing
from mpfedcl.data.inputs import InputMaker, byte_inputs, feature_inputs
from mpfedcl.data.reader import data_folder
from mpfedcl.data.split import Indices
from mpfedcl.encoders.encoder import Encoder, find_encoder
from mpfedcl.encoders.trainable import make_trainable
from mpfedcl.engines.process_group import Team
from mpfedcl.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.settings import DatasetSettings
from mpfedcl.models import Mlp, Model

Loader = Callable[[Experiment, InputMaker | None], FederatedData]
"""Opens data, given how images become inputs (pixels without)."""

_HIDDEN = (512, 512, 256)


def load_in_turn(
    experiment: Experiment, device: torch.device, team: Team | None
) -> tuple[FederatedData, Model]:
    """Load; in a team the leader goes first, so that only one encodes what is not cached yet."""
    takes_turns = team is not None and experiment.encoder.name not in (None, "none")
    if team is not None and takes_turns and not team.leads:
        team.wait()
    loaded = load_data_and_model(experiment, device)
    if team is not None and takes_turns and team.leads:
        team.wait()
    return loaded


def load_data_and_model(
    experiment: Experiment, device: torch.device, load: Loader = load_federated
) -> tuple[FederatedData, Model]:
    """Return the clients' data and the model that fits them: pixels, features, or both trained."""
    settings = experiment.encoder
    if settings.name in (None, "none"):
        if settings.train or settings.weights is not None:
            raise InvalidInput(
                "encoder.name is 'none'; with encoder.train or encoder.weights it must name an "
                "encoder, such as resnet18."
            )
        data = load(experiment, None).to(device)
        return data, make_model(None, data.input_size, data.num_classes)
    found: list[Encoder] = []

    def make_inputs(listing: Listing, rows: Indices, experiment: Experiment) -> Tensor:
        # Only once the data are dealt out: data that are missing are the first thing to say.
        encoder = find_encoder_of(experiment, device)
        found.append(encoder)
        make = byte_inputs(encoder) if settings.train else feature_inputs(encoder)
        return make(listing, rows, experiment)

    data = load(experiment, make_inputs).to(device)
    (encoder,) = found
    # On record, so that a run is not gone on with behind other weights.
    data.partition["encoder"] = encoder.fingerprint
    model = make_model(encoder, data.input_size, data.num_classes, trains_encoder=settings.train)
    return data, model


def find_encoder_of(experiment: Experiment, device: torch.device) -> Encoder:
    """Return the encoder that an experiment names; its weights may lie with the data."""
    settings = experiment.encoder
    # For one's own pictures the root is the set itself; weights mostly lie with the other data.
    folders = [data_folder(each)[0] for each in (experiment.dataset, DatasetSettings())]
    return find_encoder(str(settings.name), settings.weights, *folders, device=device)


def make_model(
    encoder: Encoder | None, input_size: int, num_classes: int, *, trains_encoder: bool = False
) -> Model:
    """Return the model on pixels, on a frozen encoder's features, or with the encoder in it."""
    if encoder is not None and trains_encoder:
        return make_trainable(encoder, num_classes)
    return make_mlp(input_size, num_classes, is_encoded=encoder is not None)


def make_mlp(input_size: int, num_classes: int, *, is_encoded: bool) -> Model:
    """Return the model on pixels, or on the features of an encoder that is not at hand."""
    return Mlp((input_size, *(_HIDDEN[-1:] if is_encoded else _HIDDEN)), num_classes)
