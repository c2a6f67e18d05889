"""The works, and the peers that do them beside mpfedcl."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy

from mpfedcl import Experiment
from mpfedcl.data.loading import load_federated_data

HERE = Path(__file__).resolve().parent
VENVS = HERE.parent / ".venvs"
DATA = HERE.parent / ".data"

METHODS = ("fedavg", "mp-fedcl")
IMAGES = 2000
"""Of the sample; they are dealt out evenly."""


class NoNumbersError(Exception):
    """Why a peer has no numbers, in a few words."""


@dataclass(frozen=True)
class Work:
    """The 2,000 images of the sample, dealt out evenly to so many clients."""

    name: str
    clients: int
    rounds: int
    """That count, unless told otherwise; one more comes before them."""

    @property
    def data(self) -> Path:
        """Where all peers read the clients' images."""
        return DATA / f"mnist-sample-iid-{self.clients}.npz"

    def export(self) -> None:
        """Write the clients' images."""
        export(Experiment(clients=self.clients, partition={"kind": "iid"}), self.data)


@dataclass(frozen=True)
class SkewedWork:
    """The sample under label skew, as time_to_accuracy.py deals it."""

    seed: int

    @property
    def data(self) -> Path:
        """Where all peers read the clients' images."""
        return DATA / f"mnist-sample-label-{self.seed}.npz"

    def export(self) -> None:
        """Write the clients' images."""
        export(Experiment(seed=self.seed).replace(partition__alpha=0.05), self.data)


def export(experiment: Experiment, path: Path) -> None:
    """Write the images of an experiment's clients, one client after the other."""
    dealt = load_federated_data(experiment)
    path.parent.mkdir(parents=True, exist_ok=True)
    numpy.savez(
        path,
        x=numpy.concatenate([client.inputs.numpy() for client in dealt.clients]),
        y=numpy.concatenate([client.labels.numpy() for client in dealt.clients]),
        sizes=[len(client.labels) for client in dealt.clients],
        test_x=dealt.test_inputs.numpy(),
        test_y=dealt.test_labels.numpy(),
    )


WORKS = (Work("few", 5, 20), Work("many", 100, 12))


@dataclass(frozen=True)
class Peer:
    """A program of this folder; of its settings the fastest is shown, all are in the results."""

    name: str
    script: str
    methods: tuple[str, ...]
    settings: tuple[tuple[str, ...], ...]
    only_few: tuple[tuple[str, ...], ...] = ()
    """More settings, for where there are few clients to fill the cores with."""

    def command(
        self, work: Work | SkewedWork, method: str, rounds: int, setting: Sequence[str]
    ) -> list[str]:
        """Return the command line of one run."""
        python = VENVS / self.name / "bin" / "python"
        if not python.exists():
            raise NoNumbersError(f"not installed (install.sh {self.name})")
        chosen = ["--method", method] if len(self.methods) > 1 else []
        flags = ["--data", str(work.data), "--rounds", str(rounds)]
        return [str(python), str(HERE / self.script), *flags, *chosen, *setting]


PEERS = (
    Peer("handwritten", "handwritten.py", METHODS, (("--threads", "1"), ("--threads", "2"))),
    Peer(
        "flower",
        "flower_simulation.py",
        ("fedavg",),
        tuple(("--cpus", "1", "--pull-interval", seconds) for seconds in ("0.1", "0.01")),
        tuple(("--cpus", "2", "--pull-interval", seconds) for seconds in ("0.1", "0.01")),
    ),
    Peer(
        "pfl",
        "pfl_simulation.py",
        ("fedavg",),
        (("--threads", "1"), ("--threads", "2"), ("--processes", "2")),
    ),
)
