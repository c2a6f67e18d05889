"""Declare each command: its arguments, the module that implements it, and its line of help.

Nothing here imports torch, so that help and bad input are answered at once. A new command is
registered here, by its class of arguments, and nowhere else.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from mpfedcl.experiment import Experiment

_ExperimentSettings = Annotated[Experiment, tyro.conf.arg(name="")]
_ExperimentFile = Annotated[
    Path | None,
    tyro.conf.Positional,
    tyro.conf.arg(metavar="[EXPERIMENT.TOML]", help_behavior_hint=""),
]
_OpenFolder = Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")]
_Root = Annotated[
    Path | None,
    tyro.conf.arg(
        metavar="DIR",
        help_behavior_hint="",
        help="Data folder [default: $MPFEDCL_DATA, else the user's cache folder].",
    ),
]
_Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
_Json = Annotated[_Flag, tyro.conf.arg(help="Print JSON.")]
_Jobs = Annotated[int | Literal["auto"], tyro.conf.arg(metavar="{auto,INT}", help_behavior_hint="")]
_OpenText = Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")]
_OpenInt = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]
_OpenFloat = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")]
_OpenPath = Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]
_OpenFile = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]
_ClientName = Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")]
_Samples = Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")]
_FinishedRun = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
_FederationFolder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
_SetName = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]


@dataclass(frozen=True)
class Command:
    """A command: its arguments, and the module of `mpfedcl.cli` that implements it."""

    name: str
    arguments: type[Any]
    module: str
    usage: str
    help: str

    @property
    def function(self) -> str:
        """Return the name of the implementing function: `data_list_command` for `data list`."""
        return f"{self.name.replace(' ', '_')}_command"


_T = TypeVar("_T")

COMMANDS: dict[str, Command] = {}
"""All commands by name, in the order of the overview, which is that of their classes below."""


def _command(name: str, module: str, usage: str, words: str) -> Callable[[type[_T]], type[_T]]:
    """Register the decorated class as the arguments of a command."""

    def register(arguments: type[_T]) -> type[_T]:
        COMMANDS[name] = Command(name, arguments, module, usage, words)
        return arguments

    return register


@_command("run", "run", "[experiment.toml] [settings] [--out DIR]", "one run, or --resume DIR")
@dataclass(frozen=True)
class Run:
    """Run one experiment, or resume one.

    Settings come from the file if one is given; flags override it. Examples:
    `mpfedcl run`, `mpfedcl run --method fedavg --partition.alpha 0.5 --out runs/mine`,
    `mpfedcl run --resume runs/mine --rounds 120`.
    """

    file: _ExperimentFile = None
    """A TOML file of settings, such as the experiment.toml of another run."""
    out: _OpenFolder = None
    """Folder for the run [default: a new one below runs/]."""
    resume: _OpenFolder = None
    """Resume the run in this folder; only --rounds, --engine, --workers, --worker-timeout, --track
    and --track-to may be given too."""
    predictors: Literal["headline", "all"] = "headline"
    """all: personal and global model, by classifier and by nearest prototype, on both tests."""
    json: _Flag = False
    """Print the summary as JSON and nothing else."""
    settings: _ExperimentSettings = field(default_factory=Experiment)


@_command("compare", "run", "--methods A B --seeds 0 1 2 [settings]", "a table of mean(std)")
@dataclass(frozen=True)
class Compare:
    """Run several methods over several seeds and print mean(std) of the last round.

    Runs that are already there are not repeated: the same command continues after an interruption.
    Example: `mpfedcl compare --methods mp-fedcl fedavg local --seeds 0 1 2 --out runs/comparison`.
    """

    file: _ExperimentFile = None
    """A TOML file of settings that all runs have in common."""
    methods: tuple[str, ...] = ("mp-fedcl", "sp-fedcl", "fedavg", "fedproto", "local")
    """The methods, by name; all: every method that fits the data set."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """The seeds; each fixes data split, initial weights, batches and clustering."""
    out: _OpenFolder = None
    """Folder for the comparison [default: a new one below runs/]."""
    jobs: _Jobs = "auto"
    """Runs at the same time [default: auto, as many as cores and memory allow]."""
    predictors: Literal["headline", "all"] = "headline"
    """all: every method by all predictors on both tests."""
    json: _Flag = False
    """Print the comparison as JSON and nothing else."""
    settings: _ExperimentSettings = field(default_factory=Experiment)


@_command(
    "tune", "run", "--methods A B [--budget 12] [settings]", "settings chosen on validation images"
)
@dataclass(frozen=True)
class Tune:
    """Choose each method's settings on validation images, with the same budget for all.

    Every method is tried with the same number of settings, a grid search over its own search space;
    hopeless ones are dropped early. Images are held out of the clients' training images: no test
    image is opened. Runs that are already there are not repeated: the same command continues after
    an interruption. Example:
    `mpfedcl tune --methods mp-fedcl fedavg --rounds 40 --out runs/tuning`, then
    `mpfedcl run runs/tuning/best-fedavg.toml`.
    """

    file: _ExperimentFile = None
    """A TOML file of settings that all runs have in common; its values are the defaults."""
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
    out: _OpenFolder = None
    """Folder for the search [default: a new one below runs/]."""
    jobs: _Jobs = "auto"
    """Runs at the same time [default: auto, as many as cores and memory allow]."""
    json: _Flag = False
    """Print the search as JSON and nothing else."""
    settings: _ExperimentSettings = field(default_factory=Experiment)


@_command("report", "report", "DIR [DIR ...] [--latex] [--csv] [--pdf]", "one HTML page of results")
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
    latex: _Flag = False
    """Also write each table as DIR/*.tex, for LaTeX with booktabs."""
    csv: _Flag = False
    """Also write the measurements in long form as DIR/*.csv, a row per round, test and reading."""
    pdf: _Flag = False
    """Also write the figures as DIR/*.pdf, with TrueType fonts as journals ask for."""


@_command("watch", "report", "[RUNS_FOLDER] [--port 8700]", "a local web page of runs, live")
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


@_command("methods", "report", "", "the methods, one line each")
@dataclass(frozen=True)
class Methods:
    """List the methods: what they do, send and keep, and the papers that describe them."""

    json: _Json = False


@_command("data list", "data", "", "the data sets, and which are here")
@dataclass(frozen=True)
class DataList:
    """List the data sets, and which are in the data folder."""

    root: _OpenFolder = None
    """Data folder to look in [default: $MPFEDCL_DATA, else the user's cache folder]."""
    json: _Json = False


@_command("data show", "data", "NAME [settings]", "which client holds which samples")
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
    settings: _ExperimentSettings = field(default_factory=Experiment)


@_command("data fetch", "data", "NAME", "download public data and prepare it")
@dataclass(frozen=True)
class DataFetch:
    """Download the public originals of a data set and prepare them.

    After an interruption the same command continues. Examples: `mpfedcl data fetch mnist`,
    `mpfedcl data fetch digit5 --root data`.
    """

    name: _SetName
    """Data set: mnist, digit5 (or its parts svhn, usps), office10 (its caltech), domainnet."""
    root: _Root = None
    replace: _Flag = False
    """Prepare domains again even if they are already there."""


@_command("data prepare", "data", "NAME --source DIR", "prepare data that you downloaded")
@dataclass(frozen=True)
class DataPrepare:
    """Turn originals that you have downloaded into the layout of the data folder.

    Example: `mpfedcl data prepare digit5 --source downloads`.
    """

    name: _SetName
    """Data set: mnist, digit5, office10 or domainnet."""
    source: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Folder with the originals, as their publishers offer them."""
    root: _Root = None
    replace: _Flag = False
    """Prepare domains again even if they are already there."""


@_command("data encode", "data", "ROOT --encoder E --out DIR", "pictures into features, once")
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
    weights: _OpenFile = None
    """Weights of resnet18 [default: looked for as for a run: $MPFEDCL_WEIGHTS, the data folder]."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("features")
    """New or empty folder for the files."""


@_command("data cache", "data", "[--clear]", "encoded images that are kept")
@dataclass(frozen=True)
class DataCache:
    """Show what the cache of encoded images holds, or empty it."""

    clear: _Flag = False
    """Drop everything; features are computed again when next needed."""
    json: _Json = False


@_command(
    "predict",
    "inference",
    "RUN IMAGES... [--client NAME] [--json]",
    "predict images with a trained run",
)
@dataclass(frozen=True)
class Predict:
    """Predict images with a finished run: label, certainty, and whether they fit the run's data.

    Images that cannot be read are named one by one, and the others are still predicted: exit code 0
    if all were, 3 if some could not be read, 2 if nothing was predicted. Examples:
    `mpfedcl predict runs/mine photo.jpg scans/ 'more/**/*.png'`,
    `mpfedcl predict runs/mine digits.npz --client client-2 --json`,
    `find . -name '*.png' | mpfedcl predict runs/mine -`.
    """

    run: _FinishedRun
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
    client: _ClientName = None
    """Predict with this client's personal model [default: the global model; in a client's folder
    the one that the run is judged by]."""
    false_alarms: float = 0.05
    """Flag an image as unknown if it is farther away than all but this share of held-out images."""
    coverage: _OpenFloat = None
    """With a classifier: also give a set of classes that contains the true one with this
    probability."""
    estimate_prior: _Flag = False
    """Estimate how common each class is among these images, and use that to predict; not together
    with --client, whose class shares are known."""
    log: _Flag = False
    """Record how many images were far from the pool, for mpfedcl watch: counts only, no names."""
    held_out: _Samples = None
    """Labelled images that no client has trained with, FOLDER/<class>/*.png: the threshold for
    unknown images is measured on them and kept in calibration.json. For runs over a network, whose
    test images stay with the clients."""
    weights: _OpenFile = None
    """The encoder's weights, if the file has moved since the run."""
    json: _Flag = False
    """Print a JSON object per image, one per line; those that cannot be read have an `error`."""
    probabilities: _Flag = False
    """With --json: the probabilities of all classes."""


@_command("export", "inference", "RUN [--format onnx] [--quantize int8]", "its model as one file")
@dataclass(frozen=True)
class Export:
    """Write a finished run's model as one file, for programs without mpfedcl.

    The file is checked against PyTorch on real images, and is not written if it disagrees.
    Examples: `mpfedcl export runs/mine`, `mpfedcl export runs/mine --quantize int8 --out m.onnx`,
    `mpfedcl export runs/mine --client client-2 --predictor classifier --format torch-export`.
    """

    run: _FinishedRun
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
    client: _ClientName = None
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
    weights: _OpenFile = None
    """The encoder's weights, if the file has moved since the run."""
    out: _OpenFile = None
    """Where the file is written [default: below exported/ in the run's folder]."""
    json: _Flag = False
    """Print the file's metadata as JSON and nothing else."""


@_command(
    "join", "inference", "RUN --data FOLDER --name NAME [--add]", "a new client of a finished run"
)
@dataclass(frozen=True)
class Join:
    """Let a new client join a finished run: it takes the model and pool, and predicts at once.

    Some of its images are held out and tested before and after a little training. The run stays as
    it is unless --add puts the client's prototypes into its pool; --leave takes them out again.
    A run of one exchange (fedgauss and its family) trains nothing: --add adds the client's sums,
    and the classifier of each client is computed again in closed form. Without --data it lists the
    clients that have joined. Examples: `mpfedcl join runs/mine --data pictures --name clinic-7`,
    `mpfedcl join runs/mine --data pictures --name clinic-7 --epochs 5 --add`,
    `mpfedcl join runs/sums --data new-pictures --name clinic-7 --add --more`,
    `mpfedcl join runs/mine --leave clinic-7`.
    """

    run: _FinishedRun
    """Folder of a finished run, of a method with prototypes and a global model."""
    data: _Samples = None
    """The client's images: FOLDER/<class>/*.jpg, FOLDER/<domain>/<class>/*.jpg, FOLDER/<domain>.npz
    or FILE.npz (images or vectors, as the run has), for a run on a table a CSV or Parquet file;
    classes are the run's, some may be missing."""
    name: _ClientName = None
    """The client's name; no other client of the run may have it."""
    epochs: int = 1
    """Passes over its training images, as in a round of training; 0 takes the model as it is."""
    lr: _OpenFloat = None
    """Learning rate [default: the run's first, train.lr]."""
    test_fraction: _OpenFloat = None
    """Share of the images of each class to hold out, if the data come without test images [default:
    as the run split its images]."""
    add: _Flag = False
    """Put the client's prototypes into the run's pool, if the guard accepts them."""
    replace: _Flag = False
    """For a client that has already joined: ignore its old prototypes or sums; --add replaces
    them."""
    more: _Flag = False
    """One exchange: add these images to those of a client that has already joined."""
    new_classes: _Flag = False
    """One exchange: accept classes that are new to the run; they are numbered after the known
    ones."""
    leave: _ClientName = None
    """Take a client out again, as `mpfedcl leave` does; cannot be combined with other flags."""
    weights: _OpenFile = None
    """The encoder's weights, if the file has moved since the run."""
    json: _Json = False


@_command("leave", "inference", "RUN --name NAME", "a client taken out of it again")
@dataclass(frozen=True)
class Leave:
    """Take a client out of a finished run.

    Any client can leave a run of one exchange (fedgauss and its family): its sums are subtracted,
    and the classifier is exactly that of a run without it. Only clients that joined later can leave
    other runs; their prototypes are removed. Example: `mpfedcl leave runs/mine --name clinic-7`.
    """

    run: _FinishedRun
    """Folder of a finished run."""
    name: _ClientName = None
    """The client."""
    json: _Json = False


@_command("contribution", "inference", "RUN", "what each client adds for the others")
@dataclass(frozen=True)
class Contribution:
    """Show what each client of a run of one exchange contributes to the others.

    For each client in turn: the accuracy of the others without it, exactly, because its sums can be
    subtracted; nothing is trained. Needs each client's sums (statistics.keep) and the run's data.
    Writes contribution.json and contribution.png into the run directory. Example:
    `mpfedcl contribution runs/mine`.
    """

    run: _FinishedRun
    """Folder of a finished run."""
    json: _Json = False


@_command("advise", "inference", "RUN --data FOLDER", "should this client join?")
@dataclass(frozen=True)
class Advise:
    """Tell a client whether joining a run of one exchange would help it; nothing is sent.

    On its held-out images it compares what it can do alone, in closed form, with what the
    federation's sums give it, with a 95 % interval of the difference. Example:
    `mpfedcl advise runs/mine --data pictures`.
    """

    run: _FinishedRun
    """Folder of a finished run."""
    data: _Samples = None
    """The client's images, as for `mpfedcl join`."""
    test_fraction: _OpenFloat = None
    """Share of the images of each class to hold out [default: as the run split its images; if that
    leaves fewer than 200, each image is tested once, in five folds]."""
    weights: _OpenFile = None
    """The encoder's weights, if the file has moved since the run."""
    json: _Json = False


@_command("federation init", "federation", "DIR --clients N", "a federation over a network")
@dataclass(frozen=True)
class FederationInit:
    """Make the folder of a federation: certificates, a key for each client, a page each.

    Run it again to add clients; existing keys are never changed. Examples:
    `mpfedcl federation init lab --clients 3`,
    `mpfedcl federation init lab --names hospital-a hospital-b --host fl.example.org`.
    """

    directory: _FederationFolder
    """The folder."""
    clients: _OpenInt = None
    """Number of clients; they are called client-0, client-1 and so on."""
    names: tuple[str, ...] = ()
    """Clients by name."""
    host: _OpenText = None
    """Name or address under which clients reach the server [default: 127.0.0.1]."""
    port: int = 9800
    """The server's port."""


@_command("federation server", "federation", "DIR", "its server, on Flower")
@dataclass(frozen=True)
class FederationServer:
    """Start the server of a federation and keep it running until Ctrl-C.

    It listens only on this machine unless --bind says otherwise (see docs/federation.md).
    Clients need their keys to take part; starting a run needs the server's secret,
    a file in its folder. Example: `mpfedcl federation server lab`.
    """

    directory: _FederationFolder
    """The federation's folder."""
    bind: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""
    insecure: _Flag = False
    """No TLS and no keys, for trying things out on this machine; runs still need the secret."""


@_command("federation client", "federation", "DIR --data FOLDER", "one of its clients")
@dataclass(frozen=True)
class FederationClient:
    """Take part in a federation with the images of a folder, until Ctrl-C.

    Examples: `mpfedcl federation client . --data images` in a client's own folder, or
    `mpfedcl federation client lab --name client-0 --share 0` to try a federation out.
    """

    directory: _FederationFolder
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
    secure_aggregation: _Flag = False
    """Take part only with secure aggregation: the server must not see this client's updates."""
    device: str = "cpu"
    """Device to compute on: cpu, cuda, cuda:1."""
    methods: tuple[str, ...] = ()
    """Methods package.module:Class that the server may ask for; they must be installed here."""
    server: _OpenText = None
    """host:port of the server [default: as the folder says]."""
    insecure: _Flag = False
    """No TLS and no keys, for trying things out on one machine."""


@_command("federation start", "federation", "DIR [settings]", "a run with its clients")
@dataclass(frozen=True)
class FederationStart:
    """Run an experiment with the clients of a federation whose server is running here.

    Settings come from the file if one is given; flags override it. The run directory is an
    ordinary one. Ctrl-C stops after the current round. Examples:
    `mpfedcl federation start lab --rounds 20`,
    `mpfedcl federation start lab experiment.toml --out runs/lab`,
    `mpfedcl federation start lab --resume runs/lab`.
    """

    directory: _FederationFolder
    """The federation's folder."""
    file: _ExperimentFile = None
    """A TOML file of settings."""
    out: _OpenPath = None
    """Folder for the run [default: a new one below runs/]."""
    resume: _OpenPath = None
    """Resume the run in this folder; only --rounds may be given too."""
    predictors: Literal["headline", "all"] = "headline"
    """all: personal and global model, by classifier and by nearest prototype."""
    json: _Flag = False
    """Print the summary as JSON and nothing else."""
    settings: _ExperimentSettings = field(default_factory=Experiment)


@_command(
    "federation update",
    "federation",
    "DIR --run RUN --client NAME",
    "one client joins or leaves later",
)
@dataclass(frozen=True)
class FederationUpdate:
    """Let one client join a finished run of one exchange, bring new images to it, or leave it.

    Only that client needs to be connected to the federation's server. Examples:
    `mpfedcl federation update lab --run runs/lab --client clinic-7`,
    `mpfedcl federation update lab --run runs/lab --client clinic-7 --leave`.
    """

    directory: _FederationFolder
    """The federation's folder."""
    run: _OpenPath = None
    """The run directory: of fedgauss or its family, over a network."""
    client: _OpenText = None
    """The client's name; if it is already in the run, the sums that it sends replace its old
    ones."""
    leave: _Flag = False
    """Take the client out; it must be connected only if the run does not keep each client's
    sums."""
    json: _Flag = False
    """Print the result as JSON and nothing else."""


@_command("privacy plan", "privacy", "[--epsilon E ...]", "what a privacy budget costs")
@dataclass(frozen=True)
class PrivacyPlan:
    """Say what a privacy budget costs, before anything is run; no data are read.

    For one-shot methods: how much noise gets into which field, what that does to class means
    and second moments, and which of them to send. With --rounds: what it does to a model. Examples:
    `mpfedcl privacy plan --images 10000`,
    `mpfedcl privacy plan --epsilon 1 3 --images 2000 --classes 5 --model local --clients 4`,
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
    json: _Json = False


@_command("privacy receipt", "privacy", "RUN_OR_FILE --data FOLDER", "what a client would send")
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
    json: _Json = False
