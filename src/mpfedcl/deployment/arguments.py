"""What the commands on finished runs take, as plain data; nothing here imports torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

_Open = {"help_behavior_hint": ""}


@dataclass(frozen=True)
class Join:
    """Let a new client join a finished run: it takes the model and pool, and predicts at once.

    Part of its images is held out and read before and after a little training. The run stays as it
    is unless --add puts the client's prototypes into its pool; --leave takes them out again.
    Without --data it lists who has joined. Examples:
    `mpfedcl join runs/mine --data pictures --name clinic-7`,
    `mpfedcl join runs/mine --data pictures --name clinic-7 --epochs 5 --add`,
    `mpfedcl join runs/mine --leave clinic-7`.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of a finished run, of a method with prototypes and an averaged model."""
    data: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", **_Open)] = None
    """The client's images: FOLDER/<class>/*.jpg, FOLDER/<domain>/<class>/*.jpg, FOLDER/<domain>.npz
    or FILE.npz; classes are the run's, some may be missing."""
    name: Annotated[str | None, tyro.conf.arg(metavar="NAME", **_Open)] = None
    """What the client is called; nobody else in the run may be."""
    epochs: int = 1
    """Passes over its training images, as in a client's round; 0 takes the model as it is."""
    lr: Annotated[float | None, tyro.conf.arg(metavar="FLOAT", **_Open)] = None
    """Learning rate [default: the run's first, train.lr]."""
    test_fraction: Annotated[float | None, tyro.conf.arg(metavar="FLOAT", **_Open)] = None
    """Share of the images of each class to hold out, where the data bring no test images of their
    own [default: as the run dealt out its images]."""
    add: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Put the client's prototypes into the run's pool, if the guard lets them pass."""
    replace: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """A client that has joined already does without its old prototypes; --add replaces them."""
    leave: Annotated[str | None, tyro.conf.arg(metavar="NAME", **_Open)] = None
    """Take a client that has joined out of the pool again; goes with nothing else."""
    weights: Annotated[Path | None, tyro.conf.arg(metavar="FILE", **_Open)] = None
    """The encoder's weights, where they are no longer found as the run found them."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print JSON."""
