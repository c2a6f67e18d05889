"""From an experiment's settings to the clients' data and the model that fits them."""

import torch
from torch import Tensor

from mpfedcl.data.federated import FederatedData, load_federated
from mpfedcl.data.imageset import Listing
from mpfedcl.data.inputs import byte_inputs, feature_inputs
from mpfedcl.data.reader import data_folder
from mpfedcl.data.split import Indices
from mpfedcl.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.models import Mlp, Model
from mpfedcl.models.encoder import Encoder, find_encoder
from mpfedcl.models.trainable import make_trainable
from mpfedcl.settings import DatasetSettings
from mpfedcl.team import Team

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
    experiment: Experiment, device: torch.device, listing: Listing | None = None
) -> tuple[FederatedData, Model]:
    """Return the clients' data and the model that fits them: pixels, features, or both trained.

    With a listing, its images instead of the data set's.
    """
    settings = experiment.encoder
    if settings.name in (None, "none"):
        if settings.train or settings.weights is not None:
            raise InvalidInput(
                "encoder.name is 'none'; with encoder.train or encoder.weights it must name an "
                "encoder, such as resnet18."
            )
        data = load_federated(experiment, listing=listing).to(device)
        return data, make_model(experiment, data.input_size, data.num_classes)
    # For one's own pictures the root is the set itself; weights mostly lie with the other data.
    folders = [data_folder(each)[0] for each in (experiment.dataset, DatasetSettings())]
    found: list[Encoder] = []

    def make_inputs(listing: Listing, rows: Indices, experiment: Experiment) -> Tensor:
        # Only once the data are dealt out: data that are missing are the first thing to say.
        encoder = find_encoder(str(settings.name), settings.weights, *folders, device=device)
        found.append(encoder)
        make = byte_inputs(encoder) if settings.train else feature_inputs(encoder)
        return make(listing, rows, experiment)

    data = load_federated(experiment, make_inputs, listing).to(device)
    (encoder,) = found
    # On record, so that a run is not gone on with behind other weights.
    data.partition["encoder"] = encoder.fingerprint
    if settings.train:
        return data, make_trainable(encoder, data.num_classes)
    return data, make_model(experiment, data.input_size, data.num_classes)


def make_model(experiment: Experiment, input_size: int, num_classes: int) -> Model:
    """Return the model for pixels, or for the features of a frozen encoder."""
    is_behind_encoder = experiment.encoder.name not in (None, "none")
    hidden = _HIDDEN[-1:] if is_behind_encoder else _HIDDEN
    return Mlp((input_size, *hidden), num_classes)
