"""Declare each command: its arguments, the module that implements it, and its line of help.

Nothing here imports torch, so that help and errors appear at once. A new command is registered
here, by its class of arguments, and nowhere else.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

import tyro

from mpfedcl.experiment import Experiment


def _open(metavar: str, words: str | None = None) -> Any:
    """Return the help of an argument without a default value that help could show."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="", help=words)


_Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
_MaybeText = Annotated[str | None, _open("TEXT")]
_MaybeName = Annotated[str | None, _open("NAME")]
_MaybeInt = Annotated[int | None, _open("INT")]
_MaybeFloat = Annotated[float | None, _open("FLOAT")]
_MaybeFile = Annotated[Path | None, _open("FILE")]
_MaybeFolder = Annotated[Path | None, _open("FOLDER")]
_Name = Annotated[str, tyro.conf.arg(metavar="NAME")]
_Folder = Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
_Run = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
_SetName = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]

# Arguments of several commands, with their help.
_Settings = Annotated[Experiment, tyro.conf.arg(name="")]
_SettingsFile = Annotated[
    Path | None,
    tyro.conf.Positional,
    _open(
        "[EXPERIMENT.TOML]",
        "TOML file of settings, such as the experiment.toml of a run; flags override its values.",
    ),
]
_Out = Annotated[Path | None, _open("DIR", "Output folder [default: a new one in runs/].")]
_Json = Annotated[_Flag, tyro.conf.arg(help="Print the result as JSON and nothing else.")]
_Jobs = Annotated[
    int | Literal["auto"],
    _open(
        "{auto,INT}",
        "Number of concurrent runs [default: auto, as many as cores and memory allow].",
    ),
]
_Predictors = Annotated[
    Literal["primary", "all"],
    tyro.conf.arg(
        help="primary: show the primary metric of the method; all: show the personalized and the "
        "global model, each by classifier and by nearest prototype, on both test sets."
    ),
]
_DataFolder = Annotated[
    Path | None,
    _open("DIR", "Data folder [default: $MPFEDCL_DATA, otherwise the user's cache folder]."),
]
_Replace = Annotated[
    _Flag, tyro.conf.arg(help="Prepare all domains again, even those that already exist.")
]
_FinishedRun = Annotated[_Run, tyro.conf.arg(metavar="RUN", help="Folder of a finished run.")]
_RunWithModels = Annotated[
    _Run,
    tyro.conf.arg(
        metavar="RUN",
        help="Folder of a finished run, or a client's folder in a federation (DIR/clients/NAME), "
        "which keeps the models of its last run.",
    ),
]
_MovedWeights = Annotated[
    Path | None, _open("FILE", "Weights of the encoder, if the file has moved since the run.")
]
_Federation = Annotated[
    Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR", help="Folder of the federation.")
]
_Share = Annotated[
    int | None,
    _open("INT", "Use this part (counted from 0) of the experiment's data set instead of --data."),
]
_Encoder = Annotated[
    str | None,
    _open("TEXT", "Encoder of this client, such as onnx:PATH [default: the experiment's]."),
]
_EncoderWeights = Annotated[
    Path | None, _open("FILE", "Weights of the encoder [default: searched for as in a run].")
]
_AllowedMethods = Annotated[
    tuple[str, ...],
    tyro.conf.arg(
        help="Custom methods (package.module:Class) that the server may request; they must be "
        "installed on this machine."
    ),
]


@dataclass(frozen=True)
class Command:
    """A command: its arguments, and the module of `mpfedcl.cli` that implements it."""

    name: str
    arguments: type[Any]
    module: str
    """For `data list`, with the function `data_list_command`."""
    summary: str


_T = TypeVar("_T")

COMMANDS: dict[str, Command] = {}
"""All commands by name, in the order of the overview."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def _command(name: str, module: str, summary: str) -> Callable[[type[_T]], type[_T]]:
    """Make the decorated class a frozen dataclass: the arguments of a command."""

    def register(cls: type[_T]) -> type[_T]:
        arguments = dataclass(frozen=True)(cls)
        COMMANDS[name] = Command(name, arguments, module, summary)
        return arguments

    return register


@_command("run", "run", "run or resume one experiment")
class Run:
    """Run one experiment, or resume a run.

    Examples: `mpfedcl run`, `mpfedcl run --method fedavg --partition.alpha 0.5 --out runs/mine`,
    `mpfedcl run --resume runs/mine --rounds 120`.
    """

    file: _SettingsFile = None
    out: _Out = None
    resume: Annotated[Path | None, _open("DIR")] = None
    """Resume the run in this folder; only --rounds, --engine, --workers, --worker-timeout, --track
    and --track-to may be given with it."""
    predictors: _Predictors = "primary"
    json: _Json = False
    settings: _Settings = field(default_factory=Experiment)


@_command("compare", "run", "run several methods over several seeds, print mean(std)")
class Compare:
    """Run several methods over several seeds and print mean(std) of the last round.

    Finished runs are not repeated: after an interruption the same command continues. Example:
    `mpfedcl compare --methods mp-fedcl fedavg local --seeds 0 1 2 --out runs/comparison`.
    """

    file: _SettingsFile = None
    methods: tuple[str, ...] = ("mp-fedcl", "sp-fedcl", "fedavg", "fedproto", "local")
    """Names of the methods; all: every method that supports the data set."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds; each determines the data split, initial weights, batches and clustering."""
    out: _Out = None
    jobs: _Jobs = "auto"
    predictors: _Predictors = "primary"
    json: _Json = False
    settings: _Settings = field(default_factory=Experiment)


@_command("tune", "run", "tune hyperparameters on validation images")
class Tune:
    """Tune the hyperparameters of each method on validation images, with equally many trials.

    Trials are a grid search over the method's search space; poor ones are stopped early. The
    validation images are held out of the clients' training images, and no test image is opened.
    Finished runs are not repeated: after an interruption the same command continues. Example:
    `mpfedcl tune --methods mp-fedcl fedavg --rounds 40 --out runs/tuning`, then
    `mpfedcl run runs/tuning/best-fedavg.toml`.
    """

    file: _SettingsFile = None
    methods: tuple[str, ...] = ("mp-fedcl", "sp-fedcl", "fedavg", "fedproto", "local")
    """Names of the methods."""
    budget: int = 12
    """Number of trials per method."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of each trial."""
    validation: float = 0.2
    """Fraction of each client's training images of each class that is held out for validation."""
    tolerance: float = 1.0
    """Trials within this many standard errors of the best are considered equal; the one with the
    fewest changes to the defaults is chosen."""
    out: _Out = None
    jobs: _Jobs = "auto"
    json: _Json = False
    settings: _Settings = field(default_factory=Experiment)


@_command("report", "report", "write results as one HTML page")
class Report:
    """Write the results of runs as one HTML file, which opens without a network.

    Examples: `mpfedcl report runs/mine`, `mpfedcl report demo --latex --csv --pdf`,
    `mpfedcl report runs/a runs/b --out both.html`.
    """

    folders: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR [DIR ...]")
    ]
    """Folders of runs, comparisons or searches; each becomes a section."""
    out: Annotated[Path | None, _open("FILE.html")] = None
    """Output file [default: report.html in the first folder]."""
    latex: _Flag = False
    """Also write each table as DIR/*.tex, for LaTeX with booktabs."""
    csv: _Flag = False
    """Also write the measurements as DIR/*.csv, with a row per round, test set and predictor."""
    pdf: _Flag = False
    """Also write the figures as DIR/*.pdf, with TrueType fonts, which journals require."""


@_command("watch", "report", "show runs on a local web page, live")
class Watch:
    """Show all runs below a folder on a local web page, live and read-only.

    Examples: `mpfedcl watch`, `mpfedcl watch runs --port 9000`.
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="[RUNS_FOLDER]")] = Path(
        "runs"
    )
    """Folder that contains runs, at a depth of at most six."""
    port: int = 8700
    """Port of the page; 0 selects a free one."""
    host: str = "127.0.0.1"
    """Address to listen on. An address that is not local makes your runs readable to others."""


@_command("methods", "report", "list the methods")
class Methods:
    """List the methods with their uploads, client states and papers."""

    json: _Json = False


@_command("data list", "data", "list the data sets")
class DataList:
    """List the data sets, and which of them are in the data folder."""

    root: _DataFolder = None
    json: _Json = False


@_command("data show", "data", "show how a data set is split among clients")
class DataShow:
    """Show how a data set is split among clients, as a table and as a figure.

    Example: `mpfedcl data show mnist-sample --partition.alpha 0.5 --clients 10`.
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]")] = "mnist-sample"
    """Name of the data set."""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE.png")] = Path("partition.png")
    """File of the figure."""
    json: _Json = False
    settings: _Settings = field(default_factory=Experiment)


@_command("data fetch", "data", "download and prepare a public data set")
class DataFetch:
    """Download the original files of a public data set and prepare them.

    After an interruption the same command continues. Examples: `mpfedcl data fetch mnist`,
    `mpfedcl data fetch digit5 --root data`.
    """

    name: _SetName
    """Data set: mnist, digit5 (or its parts svhn, usps), office10 (or its part caltech) or
    domainnet."""
    root: _DataFolder = None
    replace: _Replace = False


@_command("data prepare", "data", "prepare original files that you downloaded")
class DataPrepare:
    """Convert original files that you downloaded into the layout of the data folder.

    Example: `mpfedcl data prepare digit5 --source downloads`.
    """

    name: _SetName
    """Data set: mnist, digit5, office10 or domainnet."""
    source: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Folder of the original files, as published."""
    root: _DataFolder = None
    replace: _Replace = False


@_command("data encode", "data", "encode images into files of features")
class DataEncode:
    """Encode images into files of features, so that later runs need neither images nor encoder.

    Writes OUT/<domain>.npz with a feature vector and a label per image, and the class names. A run
    on the features equals the run on the images with the same encoder. Clients that use their
    files together must use the same encoder with the same weights. Examples:
    `mpfedcl data encode images --weights encoder.safetensors --out features`, then
    `mpfedcl run --dataset.name folder --dataset.root features`.
    """

    root: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="ROOT")]
    """Folder of images, as for --dataset.name folder: ROOT/<domain>/<class>/*.png|jpg or
    ROOT/<domain>.npz."""
    encoder: str = "resnet18"
    """Encoder, as for --encoder.name: resnet18, onnx:PATH, torchvision:NAME, ..."""
    weights: _MaybeFile = None
    """Weights of resnet18 [default: searched for as in a run: $MPFEDCL_WEIGHTS, then the data
    folder]."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("features")
    """Output folder; it must be new or empty."""


@_command("data cache", "data", "show or clear the cache of encoded images")
class DataCache:
    """Show the cache of encoded images, or clear it."""

    clear: _Flag = False
    """Delete all cached features; they are computed again when needed."""
    json: _Json = False


@_command("predict", "inference", "classify images with a finished run")
class Predict:
    """Classify images with a finished run: label, confidence, and whether they fit its data.

    Unreadable images are reported one by one and the others are still classified. Exit code 0: all
    images were classified; 3: some were unreadable; 2: none was classified. Examples:
    `mpfedcl predict runs/mine photo.jpg scans/ 'more/**/*.png'`,
    `mpfedcl predict runs/mine digits.npz --client client-2 --json`,
    `find . -name '*.png' | mpfedcl predict runs/mine -`.
    """

    run: _RunWithModels
    images: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        _open("IMAGES [IMAGES ...]"),
    ]
    """Files, folders (searched recursively), patterns, npz archives (x_test, else x, else x_train),
    or - to read paths from standard input, one per line. A run on vectors takes npz archives, a run
    on a table takes CSV or Parquet files with the same columns."""
    client: _MaybeName = None
    """Use the personalized model of this client [default: the global model; in a client's folder,
    the model of the primary metric]."""
    false_alarms: float = 0.05
    """Fraction of held-out images that the threshold for out-of-distribution images would flag."""
    coverage: _MaybeFloat = None
    """With a classifier: also print a prediction set that contains the true class with this
    probability."""
    estimate_prior: _Flag = False
    """Estimate the class prior of these images and correct the predictions with it; not with
    --client, whose class prior is known."""
    log: _Flag = False
    """Record the number of out-of-distribution images for mpfedcl watch; names are not recorded."""
    held_out: _MaybeFolder = None
    """Labeled images that no client trained with, FOLDER/<class>/*.png. The out-of-distribution
    threshold is measured on them and stored in calibration.json. Meant for runs over a network,
    whose test images stay with the clients."""
    weights: _MovedWeights = None
    json: _Flag = False
    """Print one JSON object per line and image; unreadable images have an `error`."""
    probabilities: _Flag = False
    """With --json: include the probabilities of all classes."""


@_command("export", "inference", "export the model of a finished run (ONNX and others)")
class Export:
    """Export the model of a finished run as one file, for programs without mpfedcl.

    The file is compared with PyTorch on real images, and is not written if they disagree.
    Examples: `mpfedcl export runs/mine`, `mpfedcl export runs/mine --quantize int8 --out m.onnx`,
    `mpfedcl export runs/mine --client client-2 --predictor classifier --format torch-export`.
    """

    run: _RunWithModels
    format: Literal["onnx", "safetensors", "torch-export"] = "onnx"
    """onnx: images in; label, distance and scores out; torch-export: the same as a .pt2 program;
    safetensors: the tensors only."""
    predictor: Annotated[
        Literal["prototype", "classifier"] | None,
        _open("{prototype,classifier}"),
    ] = None
    """Decision rule [default: prototype if the run has prototypes, otherwise classifier]."""
    client: _MaybeName = None
    """Export the personalized model of this client [default: as for predict]."""
    encoder: Literal["include", "exclude"] = "include"
    """exclude: the exported model takes features of the encoder instead of images."""
    quantize: Annotated[Literal["int8"] | None, _open("int8")] = None
    """Store 8-bit weights, about a quarter of the size (onnx only). The export fails if it loses
    more than one point of accuracy."""
    false_alarms: float = 0.05
    """Fraction of held-out images that the out-of-distribution threshold in the metadata flags."""
    check_images: int = 1000
    """Number of images that the file is checked with."""
    held_out: _MaybeFolder = None
    """As for predict; one half checks the file, the other half calibrates int8."""
    weights: _MovedWeights = None
    out: _MaybeFile = None
    """Output file [default: in exported/ in the run's folder]."""
    json: _Json = False


@_command("join", "inference", "add a client to a finished run")
class Join:
    """Add a new client to a finished run, whose model and prototype pool it receives.

    Some of the client's images are held out to test the model before and after a short training.
    The run is unchanged unless --add adds the client's prototypes to its pool; --leave removes them
    again. With a one-shot method (fedgauss and its family) nothing is trained: --add adds the
    client's statistics, and all classifiers are computed again in closed form. Without --data the
    command lists the clients that have joined. Examples:
    `mpfedcl join runs/mine --data images --name clinic-7`,
    `mpfedcl join runs/mine --data images --name clinic-7 --epochs 5 --add`,
    `mpfedcl join runs/one-shot --data new-images --name clinic-7 --add --more`,
    `mpfedcl join runs/mine --leave clinic-7`.
    """

    run: _Run
    """Folder of a finished run of a method with prototypes and a global model."""
    data: _MaybeFolder = None
    """Data of the client: FOLDER/<class>/*.jpg, FOLDER/<domain>/<class>/*.jpg, FOLDER/<domain>.npz
    or FILE.npz (images or vectors, as in the run), for a run on a table a CSV or Parquet file. The
    classes are those of the run; some may be missing."""
    name: _MaybeName = None
    """Name of the client, which no other client of the run may have."""
    epochs: _MaybeInt = None
    """Epochs of training [default: 1]; 0 uses the model unchanged. Not with one-shot methods."""
    lr: _MaybeFloat = None
    """Learning rate [default: train.lr of the run]."""
    test_fraction: _MaybeFloat = None
    """Fraction of the images of each class to hold out, if the data has no test set [default: as in
    the run]."""
    add: _Flag = False
    """Add the client's prototypes to the run's pool, if update validation accepts them."""
    replace: _Flag = False
    """For a client that has already joined: ignore its old prototypes or statistics; with --add
    they are replaced."""
    more: _Flag = False
    """One-shot methods: add these images to those of a client that has already joined."""
    new_classes: _Flag = False
    """One-shot methods: accept classes that the run does not have; they are numbered after its
    own."""
    leave: _MaybeName = None
    """Remove this client again, as `mpfedcl leave` does; only --json may be given with it."""
    weights: _MovedWeights = None
    json: _Json = False


@_command("leave", "inference", "remove a client from a finished run (exact unlearning)")
class Leave:
    """Remove a client from a finished run.

    Any client can leave a run of a one-shot method (fedgauss and its family): its statistics are
    subtracted, and the classifier equals that of a run without it. From other runs only clients
    that joined later can be removed, with their prototypes. Example:
    `mpfedcl leave runs/mine --name clinic-7`.
    """

    run: _FinishedRun
    name: _Name
    """Name of the client."""
    json: _Json = False


@_command("contribution", "inference", "measure each client's leave-one-out contribution")
class Contribution:
    """Measure the leave-one-out contribution of each client of a one-shot run to the others.

    For each client, the statistics of the others give their exact accuracy without it; nothing is
    trained. Requires the statistics of each client (statistics.keep) and the data of the run.
    Writes contribution.json and contribution.png into the run directory. Example:
    `mpfedcl contribution runs/mine`.
    """

    run: _FinishedRun
    json: _Json = False


@_command("advise", "inference", "estimate whether a client would gain from joining")
class Advise:
    """Estimate whether a client would gain from joining a one-shot run; nothing is sent.

    Compares, on held-out images of the client, the classifier of its own data with that of the
    federation, with a 95 % confidence interval of the difference. Example:
    `mpfedcl advise runs/mine --data images`.
    """

    run: _FinishedRun
    data: _Folder
    """Data of the client, as for `mpfedcl join`."""
    test_fraction: _MaybeFloat = None
    """Fraction of the images of each class to hold out [default: as in the run; if fewer than 200
    images would be held out, each image is tested once, in five folds]."""
    weights: _MovedWeights = None
    json: _Json = False


@_command("federation init", "federation", "create the keys and folders of a federation")
class FederationInit:
    """Create the folder of a federation: certificates, and a key and instructions for each client.

    Run the command again to add clients; existing keys are never changed. Examples:
    `mpfedcl federation init lab --clients 3`,
    `mpfedcl federation init lab --names hospital-a hospital-b --host fl.example.org`.
    """

    directory: _Federation
    clients: _MaybeInt = None
    """Number of clients, which are named client-0, client-1 and so on."""
    names: tuple[str, ...] = ()
    """Names of the clients, instead of their number."""
    host: _MaybeText = None
    """Name or address at which clients reach the server [default: 127.0.0.1]."""
    port: int = 9800
    """Port of the server."""


@_command("federation server", "federation", "run the server of a federation")
class FederationServer:
    """Run the server of a federation until Ctrl-C.

    The server listens on this machine only, unless --bind is given (see docs/federation.md).
    Clients need their keys to take part; starting a run needs the server's secret, a file in its
    folder. Example: `mpfedcl federation server lab`.
    """

    directory: _Federation
    bind: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all interfaces."""
    insecure: _Flag = False
    """Disable TLS and client keys, for tests on this machine; starting a run still needs the
    secret."""


@_command("federation client", "federation", "run a client of a federation")
class FederationClient:
    """Take part in a federation with the data of a folder, until Ctrl-C.

    Examples: `mpfedcl federation client . --data images` in a client's folder, or
    `mpfedcl federation client lab --name client-0 --share 0` to try out a federation.
    """

    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Folder of the client, or with --name the folder of the federation."""
    name: _MaybeText = None
    """Name of the client [default: the client of the folder]."""
    data: _MaybeFolder = None
    """Data of this client: FOLDER/<class>/*.png|jpg, FOLDER/<domain>/<class>/*, or npz files
    (images or vectors)."""
    share: _Share = None
    encoder: _Encoder = None
    encoder_weights: _EncoderWeights = None
    min_cluster_size: int = 1
    """Never send a prototype of fewer images than this, whatever the experiment requests."""
    max_epsilon: _MaybeFloat = None
    """Take part only under local differential privacy, and spend at most this epsilon over all
    runs."""
    secure_aggregation: _Flag = False
    """Take part only with secure aggregation, which hides this client's updates from the server."""
    device: str = "cpu"
    """Device to compute on: cpu, cuda, cuda:1."""
    methods: _AllowedMethods = ()
    server: _MaybeText = None
    """host:port of the server [default: as in the client's folder]."""
    insecure: _Flag = False
    """Disable TLS and client keys, for tests on one machine."""


@_command("federation start", "federation", "run an experiment with the clients")
class FederationStart:
    """Run an experiment with the clients of a federation whose server runs on this machine.

    The run directory is the same as that of a simulation. Ctrl-C stops after the current round.
    Examples: `mpfedcl federation start lab --rounds 20`,
    `mpfedcl federation start lab experiment.toml --out runs/lab`,
    `mpfedcl federation start lab --resume runs/lab`.
    """

    directory: _Federation
    file: _SettingsFile = None
    out: _Out = None
    resume: Annotated[Path | None, _open("DIR")] = None
    """Resume the run in this folder; only --rounds may be given with it."""
    predictors: _Predictors = "primary"
    json: _Json = False
    settings: _Settings = field(default_factory=Experiment)


@_command("federation update", "federation", "let one client join or leave a finished run")
class FederationUpdate:
    """Let one client join a finished one-shot run, replace its data in it, or leave it.

    Only this client needs to be connected to the server. Examples:
    `mpfedcl federation update lab --run runs/lab --client clinic-7`,
    `mpfedcl federation update lab --run runs/lab --client clinic-7 --leave`.
    """

    directory: _Federation
    run: _Folder
    """Run directory of a one-shot method (fedgauss and its family) over a network."""
    client: _Name
    """Name of the client; if it is already in the run, its new statistics replace the old ones."""
    leave: _Flag = False
    """Remove the client; it needs to be connected only if the run keeps pooled statistics."""
    json: _Json = False


@_command("privacy plan", "privacy", "estimate the cost of privacy budgets")
class PrivacyPlan:
    """Estimate the cost of privacy budgets before a run; no data is read.

    For one-shot methods: the noise in each part of the statistics, its effect on class means and
    second moments, and which of them to send. With --rounds: its effect on a model. Examples:
    `mpfedcl privacy plan --images 10000`,
    `mpfedcl privacy plan --epsilon 1 3 --images 2000 --classes 5 --model local --clients 4`,
    `mpfedcl privacy plan --unit client --clients 2000 --rounds 60 --fraction 0.1`.
    """

    epsilon: tuple[float, ...] = (0.5, 1.0, 3.0, 8.0)
    """Privacy budgets to compare."""
    delta: float = 1e-5
    """Probability with which the guarantee may fail."""
    unit: Literal["record", "client"] = "record"
    """Whether the guarantee protects one image (record) or all images of a client."""
    model: Literal["central", "local"] = "central"
    """Whether the server (central) or each client (local) adds the noise."""
    images: int = 2000
    """Number of training images of all clients."""
    clients: int = 5
    """Number of clients."""
    classes: int = 10
    """Number of classes."""
    dimension: int = 64
    """Dimension of a feature after projection (privacy.dimensions)."""
    rounds: int = 0
    """Rounds of training; 0: a one-shot method."""
    fraction: float = 1.0
    """Fraction of the clients that train per round."""
    parameters: int = 100_000
    """With --rounds: number of parameters of the model."""
    clip: _MaybeFloat = None
    """Unit client: largest norm of a client's statistics [default: 10]."""
    json: _Json = False


@_command("privacy receipt", "privacy", "show the messages that a client would send")
class PrivacyReceipt:
    """Show the messages that a client would send: a dry run on its data; nothing is sent.

    Lists each field of each message to the server with its size and the smallest number of images
    behind any of its values, and the privacy budget. With --threshold, values of classes with fewer
    images are not sent, and the command fails if one would be sent anyway. Examples:
    `mpfedcl privacy receipt experiment.toml --data images`,
    `mpfedcl privacy receipt runs/lab --data images --threshold 5`.
    """

    settings: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_SETTINGS")]
    """Run directory, or TOML file of settings, of the server."""
    data: _MaybeFolder = None
    """Data of this client, as for `mpfedcl federation client`."""
    share: _Share = None
    threshold: _MaybeInt = None
    """Do not send values of fewer images than this (--min-cluster-size of the client)."""
    encoder: _Encoder = None
    encoder_weights: _EncoderWeights = None
    methods: _AllowedMethods = ()
    json: _Json = False
