"""What the commands about privacy take; no torch, as in `mpfedcl.cli.arguments.experiments`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mpfedcl.cli.arguments.experiments import Flag

_OpenFloat = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")]
_OpenText = Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")]
_OpenPath = Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]
_OpenInt = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]


@dataclass(frozen=True)
class PrivacyPlan:
    """Say what a privacy budget costs, before anything is run; no data are read.

    For one-shot methods: how much noise gets into which field, what that does to class means
    and second moments, and which of them to send. With --rounds: what it does to a model. Examples:
    `mpfedcl privacy plan --images 10000`,
    `mpfedcl privacy plan --epsilon 1 3 --images 2000 --classes 5 --trust nobody --clients 4`,
    `mpfedcl privacy plan --unit client --clients 2000 --rounds 60 --fraction 0.1`.
    """

    epsilon: tuple[float, ...] = (0.5, 1.0, 3.0, 8.0)
    """Budgets to look at."""
    delta: float = 1e-5
    """Delta: the probability with which the guarantee may fail."""
    unit: Literal["record", "client"] = "record"
    """Whether the guarantee is about one image, or about all images of a client."""
    model: Literal["central", "local"] = "central"
    """Who adds the noise: the server, or each client."""
    images: int = 2000
    """Training images of all clients together."""
    clients: int = 5
    """Clients."""
    classes: int = 10
    """Classes."""
    dimension: int = 64
    """Dimensions of a feature, after projection (privacy.dimensions)."""
    rounds: int = 0
    """Rounds of training; 0: one exchange of sums."""
    fraction: float = 1.0
    """Share of the clients that train per round."""
    parameters: int = 100_000
    """With --rounds: number of the model's parameters."""
    clip: _OpenFloat = None
    """Unit client: the greatest length of what a client adds to the sums [default: 10]."""
    json: Flag = False
    """Print JSON."""


@dataclass(frozen=True)
class PrivacyReceipt:
    """Show a client what would leave its machine: a dry run on its own data; nothing is sent.

    Lists every field of every message to the server, with its size and the smallest number of
    images behind any of its numbers, as the client's program packs it, and the privacy budget.
    With --threshold, numbers of classes with fewer images are not sent, and the command fails if
    one would be sent anyway. Examples:
    `mpfedcl privacy receipt experiment.toml --data pictures`,
    `mpfedcl privacy receipt runs/lab --data pictures --threshold 5`.
    """

    settings: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_SETTINGS")]
    """A run's folder, or a TOML file of settings, as the server has it."""
    data: _OpenPath = None
    """This client's images or vectors, as for `mpfedcl federation client`."""
    share: _OpenInt = None
    """Instead of images of its own: this part (from 0) of the experiment's data set."""
    threshold: _OpenInt = None
    """Numbers from fewer images than this are not sent (the client's --min-cluster-size)."""
    encoder: _OpenText = None
    """An encoder of its own, such as onnx:PATH [default: what the experiment names]."""
    encoder_weights: _OpenPath = None
    """Where the encoder's weights are [default: as for a run]."""
    methods: tuple[str, ...] = ()
    """Methods package.module:Class that the server may ask for; they must be installed here."""
    json: Flag = False
    """Print JSON."""
