"""What the commands on finished runs take; no torch, as in `mpfedcl.cli.arguments.experiments`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mpfedcl.cli.arguments.experiments import Flag

_TrainedRun = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
_Client = Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")]
_Number = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")]
_Samples = Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")]
_File = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]


@dataclass(frozen=True)
class Predict:
    """Predict images with a finished run: label, certainty, and whether they fit the run's data.

    Images that cannot be read are named one by one, and the others are still predicted: exit code 0
    if all were, 3 if some could not be read, 2 if nothing was predicted. Examples:
    `mpfedcl predict runs/mine photo.jpg scans/ 'more/**/*.png'`,
    `mpfedcl predict runs/mine digits.npz --client client-2 --json`,
    `find . -name '*.png' | mpfedcl predict runs/mine -`.
    """

    run: _TrainedRun
    """Folder of the run, which must have ended; or a client's own folder in a federation
    (DIR/clients/NAME), for what it has kept of its last run."""
    images: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="IMAGES [IMAGES ...]", help_behavior_hint=""),
    ]
    """Files, folders (with all below them), patterns, npz archives (x_test, else x, else x_train),
    or - for paths on standard input, one per line. A run on vectors takes npz archives, one on a
    table CSV or Parquet files with the same columns."""
    client: _Client = None
    """Predict with this client's personal model [default: the global model; in a client's folder
    the one that the run is judged by]."""
    false_alarms: float = 0.05
    """Flag an image as unknown if it is farther away than all but this share of held-out images."""
    coverage: _Number = None
    """With a classifier: also give a set of classes that contains the true one with this
    probability."""
    estimate_prior: Flag = False
    """Estimate how common each class is among these images, and use that to predict; not together
    with --client, whose class shares are known."""
    log: Flag = False
    """Record how many images were far from the pool, for mpfedcl watch: counts only, no names."""
    held_out: _Samples = None
    """Labelled images that no client has trained with, FOLDER/<class>/*.png: the threshold for
    unknown images is measured on them and kept in calibration.json. For runs over a network, whose
    test images stay with the clients."""
    weights: _File = None
    """The encoder's weights, if the file has moved since the run."""
    json: Flag = False
    """Print a JSON object per image, one per line; those that cannot be read have an `error`."""
    probabilities: Flag = False
    """With --json: the probabilities of all classes."""


@dataclass(frozen=True)
class Export:
    """Write a finished run's model as one file, for programs without mpfedcl.

    The file is checked against PyTorch on real images, and is not written if it disagrees.
    Examples: `mpfedcl export runs/mine`, `mpfedcl export runs/mine --quantize int8 --out m.onnx`,
    `mpfedcl export runs/mine --client client-2 --predictor classifier --format torch-export`.
    """

    run: _TrainedRun
    """Folder of the run, which must have ended; or a client's own folder in a federation
    (DIR/clients/NAME), for what it has kept of its last run."""
    format: Literal["onnx", "safetensors", "torch-export"] = "onnx"
    """onnx: images in, label, distance and scores out; torch-export: the same as a .pt2 program;
    safetensors: only the tensors."""
    predictor: Annotated[
        Literal["prototype", "classifier"] | None,
        tyro.conf.arg(metavar="{prototype,classifier}", help_behavior_hint=""),
    ] = None
    """What predicts the class [default: prototype if the run has prototypes]."""
    client: _Client = None
    """This client's personal model [default: as for predict]."""
    encoder: Literal["include", "exclude"] = "include"
    """exclude: the file takes the encoder's features instead of images."""
    quantize: Annotated[
        Literal["int8"] | None, tyro.conf.arg(metavar="int8", help_behavior_hint="")
    ] = None
    """8-bit weights, about a quarter of the size (onnx); at most one point of accuracy is lost."""
    false_alarms: float = 0.05
    """Share of held-out images beyond the threshold for unknown, written into the metadata."""
    check_images: int = 1000
    """Number of images that the file is checked with."""
    held_out: _Samples = None
    """As for predict; the file is checked with one half of them, and int8 takes its ranges from the
    other."""
    weights: _File = None
    """The encoder's weights, if the file has moved since the run."""
    out: _File = None
    """Where the file is written [default: below exported/ in the run's folder]."""
    json: Flag = False
    """Print the file's metadata as JSON and nothing else."""


@dataclass(frozen=True)
class Join:
    """Let a new client join a finished run: it takes the model and pool, and predicts at once.

    Some of its images are held out and tested before and after a little training. The run stays as
    it is unless --add puts the client's prototypes into its pool; --leave takes them out again.
    A run of one exchange (fedgauss and its family) trains nothing: --add adds the client's sums,
    and everybody's classifier is computed again in closed form. Without --data it lists who has
    joined. Examples: `mpfedcl join runs/mine --data pictures --name clinic-7`,
    `mpfedcl join runs/mine --data pictures --name clinic-7 --epochs 5 --add`,
    `mpfedcl join runs/sums --data new-pictures --name clinic-7 --add --more`,
    `mpfedcl join runs/mine --leave clinic-7`.
    """

    run: _TrainedRun
    """Folder of a finished run, of a method with prototypes and a global model."""
    data: _Samples = None
    """The client's images: FOLDER/<class>/*.jpg, FOLDER/<domain>/<class>/*.jpg, FOLDER/<domain>.npz
    or FILE.npz (images or vectors, as the run has), for a run on a table a CSV or Parquet file;
    classes are the run's, some may be missing."""
    name: _Client = None
    """The client's name; no other client of the run may have it."""
    epochs: int = 1
    """Passes over its training images, as in a round of training; 0 takes the model as it is."""
    lr: _Number = None
    """Learning rate [default: the run's first, train.lr]."""
    test_fraction: _Number = None
    """Share of the images of each class to hold out, if the data come without test images [default:
    as the run split its images]."""
    add: Flag = False
    """Put the client's prototypes into the run's pool, if the guard accepts them."""
    replace: Flag = False
    """For a client that has already joined: ignore its old prototypes or sums; --add replaces
    them."""
    more: Flag = False
    """One exchange: add these images to those of a client that has already joined."""
    new_classes: Flag = False
    """One exchange: accept classes that are new to the run; they are numbered after the known
    ones."""
    leave: _Client = None
    """Take a client out again, as `mpfedcl leave` does; cannot be combined with other flags."""
    weights: _File = None
    """The encoder's weights, if the file has moved since the run."""
    json: Flag = False
    """Print JSON."""


@dataclass(frozen=True)
class Leave:
    """Take a client out of a finished run.

    Any client can leave a run of one exchange (fedgauss and its family): its sums are subtracted,
    and the classifier is exactly that of a run without it. Only clients that joined later can leave
    other runs; their prototypes are removed. Example: `mpfedcl leave runs/mine --name clinic-7`.
    """

    run: _TrainedRun
    """Folder of a finished run."""
    name: _Client = None
    """The client."""
    json: Flag = False
    """Print JSON."""


@dataclass(frozen=True)
class Contributions:
    """Show what each client of a run of one exchange is worth to the others.

    For each client in turn: the accuracy of the others without it, exactly, because its sums can be
    subtracted; nothing is trained. Needs each client's sums (statistics.keep) and the run's data.
    Writes contribution.json and contribution.png into the run's folder. Example: `mpfedcl contribution runs/mine`.
    """

    run: _TrainedRun
    """Folder of a finished run."""
    json: Flag = False
    """Print JSON."""


@dataclass(frozen=True)
class Advise:
    """Tell a client whether joining a run of one exchange would help it; nothing is sent.

    On its held-out images it compares what it can do alone, in closed form, with what the
    federation's sums give it, with a 95 % interval of the difference. Example:
    `mpfedcl advise runs/mine --data pictures`.
    """

    run: _TrainedRun
    """Folder of a finished run."""
    data: _Samples = None
    """The client's images, as for `mpfedcl join`."""
    test_fraction: _Number = None
    """Share of the images of each class to hold out [default: as the run split its images; if that
    leaves fewer than 200, each image is tested once, in five folds]."""
    weights: _File = None
    """The encoder's weights, if the file has moved since the run."""
    json: Flag = False
    """Print JSON."""
