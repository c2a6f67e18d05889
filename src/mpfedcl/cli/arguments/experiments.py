"""What each command takes: the flags and their help, as plain data.

Nothing here imports torch, so that help and bad input answer at once.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mpfedcl.experiment import Experiment

ExperimentSettings = Annotated[Experiment, tyro.conf.arg(name="")]
ExperimentFile = Annotated[
    Path | None,
    tyro.conf.Positional,
    tyro.conf.arg(metavar="[EXPERIMENT.TOML]", help_behavior_hint=""),
]
_Folder = Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")]
_Root = Annotated[
    Path | None,
    tyro.conf.arg(
        metavar="DIR",
        help_behavior_hint="",
        help="Data folder [default: $MPFEDCL_DATA, else the user's cache folder].",
    ),
]
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
_Json = Annotated[Flag, tyro.conf.arg(help="Print JSON.")]
_Jobs = Annotated[int | Literal["auto"], tyro.conf.arg(metavar="{auto,INT}", help_behavior_hint="")]


@dataclass(frozen=True)
class Run:
    """Run one experiment, or resume one.

    Settings come from the file if one is given; flags override it. Examples:
    `mpfedcl run`, `mpfedcl run --method fedavg --partition.alpha 0.5 --out runs/mine`,
    `mpfedcl run --resume runs/mine --rounds 120`.
    """

    file: ExperimentFile = None
    """A TOML file of settings, such as the experiment.toml of another run."""
    out: _Folder = None
    """Folder for the run [default: a new one below runs/]."""
    resume: _Folder = None
    """Resume the run in this folder; only --rounds, --engine, --workers, --worker-timeout, --track
    and --track-to may be given too."""
    predictors: Literal["headline", "all"] = "headline"
    """all: personal and global model, by classifier and by nearest prototype, on both tests."""
    json: Flag = False
    """Print the summary as JSON and nothing else."""
    settings: ExperimentSettings = field(default_factory=Experiment)


@dataclass(frozen=True)
class Compare:
    """Run several methods over several seeds and print mean(std) of the last round.

    Runs that are already there are not repeated: the same command continues after an interruption.
    Example: `mpfedcl compare --methods mp-fedcl fedavg local --seeds 0 1 2 --out runs/comparison`.
    """

    file: ExperimentFile = None
    """A TOML file of settings that all runs have in common."""
    methods: tuple[str, ...] = ("mp-fedcl", "sp-fedcl", "fedavg", "fedproto", "local")
    """The methods, by name; all: every method that fits the data set."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """The seeds; each fixes data split, initial weights, batches and clustering."""
    out: _Folder = None
    """Folder for the comparison [default: a new one below runs/]."""
    jobs: _Jobs = "auto"
    """Runs at the same time [default: auto, as many as cores and memory allow]."""
    predictors: Literal["headline", "all"] = "headline"
    """all: every method by all predictors on both tests."""
    json: Flag = False
    """Print the comparison as JSON and nothing else."""
    settings: ExperimentSettings = field(default_factory=Experiment)


@dataclass(frozen=True)
class Tune:
    """Choose each method's settings on validation images, with the same budget for all.

    Every method is tried with the same number of settings, a grid search over its own search_space;
    hopeless ones are dropped early. Images are held out of the clients' training images: no test
    image is opened. Runs that are already there are not repeated: the same command continues after
    an interruption. Example:
    `mpfedcl tune --methods mp-fedcl fedavg --rounds 40 --out runs/tuning`, then
    `mpfedcl run runs/tuning/best-fedavg.toml`.
    """

    file: ExperimentFile = None
    """A TOML file of settings that all runs have in common; its search_space' values are the defaults."""
    methods: tuple[str, ...] = ("mp-fedcl", "sp-fedcl", "fedavg", "fedproto", "local")
    """The methods, by name."""
    budget: int = 12
    """Settings tried for each method."""
    seeds: tuple[int, ...] = (0,)
    """The seeds that each of them is tried with."""
    validation: float = 0.2
    """Share of each client's training images of each class that is held out to judge settings."""
    tolerance: float = 1.0
    """Settings within this many standard errors of the best count as equal; of equals the one with
    the fewest changes is chosen."""
    out: _Folder = None
    """Folder for the search [default: a new one below runs/]."""
    jobs: _Jobs = "auto"
    """Runs at the same time [default: auto, as many as cores and memory allow]."""
    json: Flag = False
    """Print the search as JSON and nothing else."""
    settings: ExperimentSettings = field(default_factory=Experiment)


@dataclass(frozen=True)
class Watch:
    """Show all runs below a folder on a local web page, live; it only reads.

    Examples: `mpfedcl watch`, `mpfedcl watch runs --port 9000`.
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="[RUNS_FOLDER]")] = Path(
        "runs"
    )
    """Folder that holds runs, at any depth up to six."""
    port: int = 8700
    """Port; 0 takes any free one."""
    host: str = "127.0.0.1"
    """Address to listen on; if it is not a local one, others can read your runs."""


@dataclass(frozen=True)
class Report:
    """Make one HTML file of what was run; it opens without a network.

    Examples: `mpfedcl report runs/mine`, `mpfedcl report demo --latex --csv --pdf`,
    `mpfedcl report runs/a runs/b --out both.html`.
    """

    folders: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR [DIR ...]")
    ]
    """Folders of runs, comparisons or searches; one section each."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE.html", help_behavior_hint="")] = None
    """Where the page is written [default: report.html in the first folder]."""
    latex: Flag = False
    """Also write each table as DIR/*.tex, for LaTeX with booktabs."""
    csv: Flag = False
    """Also write the measurements in long form as DIR/*.csv, a row per round, test and reading."""
    pdf: Flag = False
    """Also write the figures as DIR/*.pdf, with TrueType fonts as journals ask for."""


@dataclass(frozen=True)
class Methods:
    """List the methods: what they do, send and keep, and who described them."""

    json: _Json = False


@dataclass(frozen=True)
class DataList:
    """List the data sets, and which are in the data folder."""

    root: _Folder = None
    """Data folder to look in [default: $MPFEDCL_DATA, else the user's cache folder]."""
    json: _Json = False


@dataclass(frozen=True)
class DataShow:
    """Show how a data set is split among clients, and draw it.

    Example: `mpfedcl data show mnist-sample --partition.alpha 0.5 --clients 10`.
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]")] = "mnist-sample"
    """Data set."""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE.png")] = Path("partition.png")
    """Where the picture is written."""
    json: _Json = False
    settings: ExperimentSettings = field(default_factory=Experiment)


_Name = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]


@dataclass(frozen=True)
class DataFetch:
    """Download the public originals of a data set and prepare them.

    After an interruption the same command continues. Examples: `mpfedcl data fetch mnist`,
    `mpfedcl data fetch digit5 --root data`.
    """

    name: _Name
    """Data set: mnist, digit5 (or its parts svhn, usps), office10 (its caltech), domainnet."""
    root: _Root = None
    replace: Flag = False
    """Prepare domains again even if they are already there."""


@dataclass(frozen=True)
class DataPrepare:
    """Turn originals that you have downloaded into the layout of the data folder.

    Example: `mpfedcl data prepare digit5 --source downloads`.
    """

    name: _Name
    """Data set: mnist, digit5, office10 or domainnet."""
    source: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Folder with the originals, as their publishers offer them."""
    root: _Root = None
    replace: Flag = False
    """Prepare domains again even if they are already there."""


@dataclass(frozen=True)
class DataEncode:
    """Encode pictures once into files of features, so that the pictures need not be kept.

    Writes OUT/<domain>.npz with a vector of floats per picture, its label and the names of the
    classes. A run on them equals the run on the pictures with the same encoder, and needs no
    encoder. Sites that use their files together must have used the same encoder with the same
    weights. Examples: `mpfedcl data encode pictures --weights encoder.safetensors --out features`,
    then `mpfedcl run --dataset.name folder --dataset.root features`.
    """

    root: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="ROOT")]
    """Folder of pictures, as for --dataset.name folder: ROOT/<domain>/<class>/*.png|jpg or
    ROOT/<domain>.npz."""
    encoder: str = "resnet18"
    """Encoder, as for --encoder.name: resnet18, onnx:PATH, torchvision:NAME, ..."""
    weights: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Weights of resnet18 [default: looked for as for a run: $MPFEDCL_WEIGHTS, the data folder]."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("features")
    """New or empty folder for the files."""


@dataclass(frozen=True)
class DataCache:
    """Show what the cache of encoded images holds, or empty it."""

    clear: Flag = False
    """Drop everything; features are computed again when next needed."""
    json: _Json = False
