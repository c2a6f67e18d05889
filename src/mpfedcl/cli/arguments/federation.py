"""What the commands of a federation over a network take. Nothing here imports torch or Flower."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mpfedcl.cli.arguments.experiments import ExperimentFile, ExperimentSettings, Flag
from mpfedcl.experiment import Experiment

_Dir = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
_OpenText = Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")]
_OpenInt = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]
_OpenFloat = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")]
_OpenPath = Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]


@dataclass(frozen=True)
class FederationInit:
    """Make the folder of a federation: certificates, a key for each client, a page each.

    Run it again to add clients; existing keys are never changed. Examples:
    `mpfedcl federation init lab --clients 3`,
    `mpfedcl federation init lab --names hospital-a hospital-b --host fl.example.org`.
    """

    directory: _Dir
    """The folder."""
    clients: _OpenInt = None
    """Number of clients; they are called client-0, client-1 and so on."""
    names: tuple[str, ...] = ()
    """Clients by name."""
    host: _OpenText = None
    """Name or address under which clients reach the server [default: 127.0.0.1]."""
    port: int = 9800
    """The server's port."""


@dataclass(frozen=True)
class FederationServer:
    """Start the server of a federation and keep it running until Ctrl-C.

    It listens only on this machine unless --bind says otherwise (see docs/federation.md).
    Clients need their keys to take part; runs are started by whoever can read the server's secret,
    a file in its folder. Example: `mpfedcl federation server lab`.
    """

    directory: _Dir
    """The federation's folder."""
    bind: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""
    insecure: Flag = False
    """No TLS and no keys, for trying things out on this machine; runs still need the secret."""


@dataclass(frozen=True)
class FederationClient:
    """Take part in a federation with the images of a folder, until Ctrl-C.

    Examples: `mpfedcl federation client . --data images` in a client's own folder, or
    `mpfedcl federation client lab --name client-0 --share 0` to try a federation out.
    """

    directory: _Dir
    """The client's folder, or the federation's with --name."""
    name: _OpenText = None
    """Which client this is [default: the one whose folder it is]."""
    data: _OpenPath = None
    """This client's images: FOLDER/<class>/*.png|jpg, FOLDER/<domain>/<class>/*, or npz files
    (images or vectors)."""
    share: _OpenInt = None
    """Instead of images of its own: this part (from 0) of the experiment's data set."""
    encoder: _OpenText = None
    """An encoder of its own, such as onnx:PATH [default: what the experiment names]."""
    encoder_weights: _OpenPath = None
    """Where the encoder's weights are [default: as for a run]."""
    min_cluster_size: int = 1
    """Never send a prototype of fewer images than this, whatever the experiment says."""
    max_epsilon: _OpenFloat = None
    """Take part only under a privacy budget whose noise this client adds itself, and spend at most
    this epsilon in all runs together."""
    secure_aggregation: Flag = False
    """Take part only with secure aggregation: the server must not see this client's updates."""
    device: str = "cpu"
    """Device to compute on: cpu, cuda, cuda:1."""
    methods: tuple[str, ...] = ()
    """Methods package.module:Class that the server may ask for; they must be installed here."""
    server: _OpenText = None
    """host:port of the server [default: as the folder says]."""
    insecure: Flag = False
    """No TLS and no keys, for trying things out on one machine."""


@dataclass(frozen=True)
class FederationStart:
    """Run an experiment with the clients of a federation whose server is running here.

    Settings come from the file if one is given; flags override it. The run directory is an
    ordinary one. Ctrl-C stops after the current round. Examples:
    `mpfedcl federation start lab --rounds 20`,
    `mpfedcl federation start lab experiment.toml --out runs/lab`,
    `mpfedcl federation start lab --resume runs/lab`.
    """

    directory: _Dir
    """The federation's folder."""
    file: ExperimentFile = None
    """A TOML file of settings."""
    out: _OpenPath = None
    """Folder for the run [default: a new one below runs/]."""
    resume: _OpenPath = None
    """Resume the run in this folder; only --rounds may be given too."""
    predictors: Literal["headline", "all"] = "headline"
    """all: personal and global model, by classifier and by nearest prototype."""
    json: Flag = False
    """Print the summary as JSON and nothing else."""
    settings: ExperimentSettings = field(default_factory=Experiment)


@dataclass(frozen=True)
class FederationUpdate:
    """Let one client join a finished run of one exchange, bring new images to it, or leave it.

    Only that client needs to be connected to the federation's server. Examples:
    `mpfedcl federation update lab --run runs/lab --client clinic-7`,
    `mpfedcl federation update lab --run runs/lab --client clinic-7 --leave`.
    """

    directory: _Dir
    """The federation's folder."""
    run: _OpenPath = None
    """The run directory: of fedgauss or its family, over a network."""
    client: _OpenText = None
    """The client's name; if it is already in the run, the sums that it sends replace its old
    ones."""
    leave: Flag = False
    """Take the client out; it must be connected only if the run does not keep each client's
    sums."""
    json: Flag = False
    """Print the result as JSON and nothing else."""
