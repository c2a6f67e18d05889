"""Declare each command: its arguments, the module that implements it, and its line of help.

Nothing here imports torch, so that help and errors appear at once. A new command is registered
here, by its class of arguments, and nowhere else.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform, get_args, get_origin

from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg

from mpfedcl.experiment import Experiment


@dataclass(frozen=True)
class Command:
    """A command: its arguments, and the module of `mpfedcl.cli` that implements it."""

    arguments: type[Any]
    module: str
    """It has a function for each of its commands: `data list` runs `data_list_command`."""
    summary: str


_T = TypeVar("_T")
_METAVARS: dict[Any, str] = {int: "INT", float: "FLOAT", str: "NAME", Path: "PATH", ...: "..."}

COMMANDS: dict[str, Command] = {}
"""All commands by name, in the order of the overview."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def _command(name: str, module: str, summary: str) -> Callable[[type[_T]], type[_T]]:
    """Make the decorated class a frozen dataclass: the arguments of a command."""

    def register(cls: type[_T]) -> type[_T]:
        for each, kind in cls.__annotations__.items():
            cls.__annotations__[each] = flag_type(kind)
        arguments = dataclass(frozen=True)(cls)
        COMMANDS[name] = Command(arguments, module, summary)
        return arguments

    return register


def flag_type(kind: Any) -> Any:
    """Return the type of a flag, annotated with how help shows its value; None is left out."""
    if kind is bool:
        return Annotated[bool, FlagCreatePairsOff]
    if kind in _METAVARS:
        return Annotated[kind, arg(metavar=_METAVARS[kind])]
    kinds = [each for each in get_args(kind) if each is not NoneType]
    if get_origin(kind) is Annotated or len(kinds) == len(get_args(kind)):
        return kind
    return Annotated[kind, _open("|".join(map(_metavar, kinds)))]


def _open(metavar: str, words: str | None = None) -> Any:
    """Return the help of an argument without a default value that help could show."""
    return arg(metavar=metavar, help_behavior_hint="", help=words)


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Annotated:
        return _metavar(get_args(kind)[0])
    if get_origin(kind) is tuple:
        return " ".join(_metavar(each) for each in get_args(kind))
    choices = ",".join(map(str, get_args(kind)))
    return f"{{{choices}}}" if get_origin(kind) is Literal else _METAVARS.get(kind, "VALUE")


# Arguments of several commands, with their help.
_Settings = Annotated[Experiment, arg(name="")]
_SettingsFile = Annotated[
    Path | None,
    Positional,
    _open(
        "[EXPERIMENT.TOML]",
        "TOML file of settings, such as the experiment.toml of a run; flags override its values.",
    ),
]
_Out = Annotated[Path | None, _open("DIR", "Output folder [default: a new one in runs/].")]
_Json = Annotated[bool, FlagCreatePairsOff, arg(help="Print the result as JSON and nothing else.")]
_Jobs = Annotated[
    int | Literal["auto"],
    _open("{auto,INT}", "Number of concurrent runs [default: as many as cores and memory allow]."),
]
_Predictors = Annotated[
    Literal["primary", "all"],
    arg(
        help="primary: show the primary metric of the method; all: show the personalized and the "
        "global model, each by classifier and by nearest prototype, on both test sets."
    ),
]
_SetName = Annotated[str, Positional, arg(metavar="NAME")]
_DataFolder = Annotated[
    Path | None,
    _open("DIR", "Data folder [default: $MPFEDCL_DATA, otherwise the user's cache folder]."),
]
_Replace = Annotated[
    bool, FlagCreatePairsOff, arg(help="Prepare domains again that already exist.")
]
_FinishedRun = Annotated[Path, Positional, arg(metavar="RUN", help="Folder of a finished run.")]
_RunWithModels = Annotated[
    Path,
    Positional,
    arg(
        metavar="RUN",
        help="Folder of a finished run, or a client's folder in a federation (DIR/clients/NAME), "
        "which keeps the models of its last run.",
    ),
]
_MovedWeights = Annotated[
    Path | None, _open("FILE", "Weights of the encoder, if the file has moved since the run.")
]
_OwnMethod = Annotated[
    str | None,
    _open("TEXT", "Your own method that the run has, so that the current folder is searched."),
]
_OwnModels = Annotated[
    tuple[str, ...],
    # One name each time: words after it are samples.
    UseAppendAction,
    arg(
        name="model.name",
        help="Your own models that the run has (package.module:function), so that the current "
        "folder is searched.",
    ),
]
_LogJson = Annotated[
    bool, FlagCreatePairsOff, arg(help="Log JSON lines with time and level, also to log files.")
]
_ClientName = Annotated[str, Positional, arg(metavar="NAME", help="Name of the client.")]
_Federation = Annotated[Path, Positional, arg(metavar="DIR", help="Folder of the federation.")]
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


@_command("run", "run", "run or resume one experiment")
class Run:
    """Run one experiment, or resume a run.

    Examples: `mpfedcl run`, `mpfedcl run --method fedavg --partition.alpha 0.5 --out runs/mine`,
    `mpfedcl run --resume runs/mine --rounds 120`.
    """

    file: _SettingsFile = None
    out: _Out = None
    resume: Path | None = None
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
    tuned: Annotated[Path | None, _open("DIR")] = None
    """Folder of mpfedcl tune: each method has the settings of its best-<method>.toml there, and
    other settings must be left out [default of --methods: all methods in the folder]."""
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
    budget: int = 12  # Number of trials per method.
    seeds: tuple[int, ...] = (0,)  # Seeds of each trial.
    validation: float = 0.2
    """Fraction of each client's training images of each class to hold out for validation."""
    out: _Out = None
    jobs: _Jobs = "auto"
    json: _Json = False
    settings: _Settings = field(default_factory=Experiment)


@_command("report", "report", "write results as one HTML page")
class Report:
    """Write the results of runs as one HTML file, which opens without a network.

    Examples: `mpfedcl report runs/mine`, `mpfedcl report demo --latex --csv --pdf`.
    """

    folders: Annotated[tuple[Path, ...], Positional, arg(metavar="DIR [DIR ...]")]
    """Folders of runs, comparisons or searches; each becomes a section."""
    out: Path | None = None  # Output file [default: report.html in the first folder].
    latex: bool = False  # Also write each table as DIR/*.tex, for LaTeX with booktabs.
    csv: bool = False  # Also write DIR/*.csv, with a row per round, test set and predictor.
    pdf: bool = False  # Also write the figures as DIR/*.pdf, with TrueType fonts.


@_command("watch", "report", "show runs on a local web page, live")
class Watch:
    """Show all runs below a folder on a local web page, live and read-only.

    Examples: `mpfedcl watch`, `mpfedcl watch runs --port 9000`.
    """

    folder: Annotated[Path, Positional, arg(metavar="[RUNS_FOLDER]")] = Path("runs")
    """Folder that contains runs, at a depth of at most six."""
    port: int = 8700  # Port of the page; 0 selects a free one.
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

    name: Annotated[str, Positional, arg(metavar="[NAME]")] = "mnist-sample"  # Data set.
    out: Path = Path("partition.png")  # File of the figure.
    json: _Json = False
    settings: _Settings = field(default_factory=Experiment)


@_command("data fetch", "data", "download and prepare a public data set")
class DataFetch:
    """Download the original files of a public data set and prepare them.

    After an interruption the same command continues. Example: `mpfedcl data fetch mnist`.
    """

    name: _SetName  # Data set: mnist, digit5 (or svhn, usps), cifar10, cifar100 or domainnet.
    root: _DataFolder = None
    replace: _Replace = False


@_command("data prepare", "data", "prepare original files that you downloaded")
class DataPrepare:
    """Convert original files that you downloaded into the layout of the data folder.

    Example: `mpfedcl data prepare digit5 --source downloads`.
    """

    name: _SetName  # Data set: mnist, digit5, cifar10, cifar100 or domainnet.
    source: Path  # Folder of the original files, as published.
    root: _DataFolder = None
    replace: _Replace = False


@_command("data encode", "data", "encode images or texts into files of features")
class DataEncode:
    """Encode images or texts into files of features; later runs need neither them nor the encoder.

    Writes OUT/<domain>.npz. A run on the features equals the run on the images with the same
    encoder, which all clients must use with the same weights. Examples:
    `mpfedcl data encode images features --weights encoder.safetensors`,
    `mpfedcl data encode my.csv features --encoder sentence:MODEL --text question --label intent`,
    then `mpfedcl run --dataset.name folder --dataset.root features`.
    """

    root: Annotated[Path, Positional, arg(metavar="DATA")]
    """Folder of images: DATA/<domain>/<class>/*.png|jpg or DATA/<domain>.npz. For texts: a CSV or
    Parquet file, a JSON list of [text, label], or a folder of such files, one for each client."""
    folder: Annotated[Path | None, Positional, _open("[OUT]", "The same as --out.")] = None
    encoder: str = "resnet18"
    """As for --encoder.name: resnet18, onnx:PATH ... For texts: sentence:PATH, the folder of a
    sentence transformer."""
    weights: Path | None = None  # Weights [default: from $MPFEDCL_WEIGHTS, then the data folder].
    out: Path | None = None  # Output folder; it must be new or empty [default: features].
    text: str | None = None  # Column of the texts.
    label: str | None = None
    """Column of the classes. Without it the files can only be used for predictions."""
    client: str | None = None  # Column of the clients [default: each file is a client].
    split: str | None = None  # Column that holds train or test [default: no test set].


@_command("data cache", "data", "show or clear the cache of encoded images")
class DataCache:
    """Show the cache of encoded images, or clear it."""

    clear: bool = False  # Delete all cached features; they are computed again when needed.
    json: _Json = False


@_command("predict", "finished_runs", "classify images with a finished run")
class Predict:
    """Classify images with a finished run: label, confidence, and whether they fit its data.

    Unreadable images are reported one by one and the others are still classified. Exit code 0: all
    images were classified; 3: some were unreadable; 2: none was classified. Examples:
    `mpfedcl predict runs/mine photo.jpg scans/ more/*.png`,
    `mpfedcl predict runs/mine digits.npz --client client-2 --json`,
    `find . -name '*.png' | mpfedcl predict runs/mine -`.
    """

    run: _RunWithModels
    images: Annotated[tuple[str, ...], Positional, _open("IMAGES [IMAGES ...]")]
    """Files, folders (searched recursively), npz archives (x_test, else x, else x_train), or - to
    read paths from standard input, one per line. A run on vectors takes npz archives, a run on a
    table takes CSV or Parquet files with the same columns."""
    client: str | None = None
    """Client whose personalized model is used [default: the global model; in a client's folder,
    the model of the primary metric]."""
    false_alarms: float = 0.05  # Share of held-out images above the out-of-distribution threshold.
    coverage: float | None = None
    """Also print a prediction set that contains the true class with this probability."""
    held_out: Path | None = None
    """Labeled images that no client trained with, FOLDER/<class>/*.png, to measure the threshold
    for out-of-distribution images. For runs over a network, whose test images stay there."""
    weights: _MovedWeights = None
    csv: Path | None = None
    """Write a CSV file with a row per sample instead of printing them: a table's own columns,
    `predicted`, and `probability_<class>` or, if the nearest prototype decides, `distance`."""
    method: _OwnMethod = None
    own_models: _OwnModels = ()
    json: bool = False  # Print a JSON object per line and image; unreadable images have an `error`.


@_command("export", "finished_runs", "export the model of a finished run as ONNX or torch.export")
class Export:
    """Export the model of a finished run as one file, for programs without mpfedcl.

    The file is compared with PyTorch on test images, and is not written if they disagree. Encoders
    in torch are inside; with others the file takes their features instead of images. Examples:
    `mpfedcl export runs/mine`, `mpfedcl export runs/mine --client client-2 --out m.onnx`.
    """

    run: _RunWithModels
    predictor: Literal["prototype", "classifier"] | None = None
    """Decision rule [default: prototype if the run has prototypes, otherwise classifier]."""
    client: str | None = None
    """Client whose personalized model is exported [default: as for predict]."""
    false_alarms: float = 0.05  # As for predict, for the threshold in the metadata.
    weights: _MovedWeights = None
    out: Path | None = None
    """Output file: .onnx, or .pt2 for torch.export [default: .onnx in exported/ in the run's
    folder]."""
    method: _OwnMethod = None
    own_models: _OwnModels = ()
    json: _Json = False


@_command("join", "finished_runs", "add a client to a finished run")
class Join:
    """Add a new client to a finished run, whose model and prototype pool it receives.

    Some of the client's images are held out to test the model before and after a short training.
    The run is unchanged unless --add adds the client's prototypes to its pool. With a one-shot
    method (fedgauss and its family) nothing is trained: --add adds the client's statistics, and
    all classifiers are computed again in closed form. Example:
    `mpfedcl join runs/mine --data images --name clinic-7 --epochs 5 --add`.
    """

    run: Annotated[Path, Positional, arg(metavar="RUN")]
    """Folder of a finished run of a method with prototypes and a global model."""
    data: Path
    """Data of the client: FOLDER/<class>/*.jpg, FOLDER/<domain>/<class>/*.jpg, FOLDER/<domain>.npz
    or FILE.npz (images or vectors, as in the run); for a run on a table a CSV or Parquet file."""
    name: str  # Name of the client, which no other client of the run may have.
    epochs: int | None = None  # Epochs of training, not with one-shot methods [default: 1].
    lr: float | None = None  # Learning rate [default: train.lr of the run].
    test_fraction: float | None = None
    """Fraction of each class to hold out, if the data has no test set [default: as in the run]."""
    add: bool = False  # Add the prototypes to the run's pool, if update validation accepts them.
    replace: bool = False
    """For a client that has already joined: ignore its old prototypes or statistics; with --add
    they are replaced."""
    weights: _MovedWeights = None
    method: _OwnMethod = None
    own_models: _OwnModels = ()
    json: _Json = False


@_command("leave", "finished_runs", "remove a client from a finished run (exact unlearning)")
class Leave:
    """Remove a client from a finished run.

    Any client can leave a run of a one-shot method (fedgauss and its family): its statistics are
    subtracted, and the classifier equals that of a run without it. From other runs only clients
    that joined later can be removed, with their prototypes. Example:
    `mpfedcl leave runs/mine --name clinic-7`.
    """

    run: _FinishedRun
    name: str  # Name of the client.
    json: _Json = False


@_command("contribution", "finished_runs", "measure each client's leave-one-out contribution")
class Contribution:
    """Measure the leave-one-out contribution of each client of a one-shot run to the others.

    For each client, the statistics of the others give their exact accuracy without it; nothing is
    trained. Requires the statistics of each client (statistics.keep) and the data of the run.
    Writes contribution.json into the run directory. Example:
    `mpfedcl contribution runs/mine`.
    """

    run: _FinishedRun
    json: _Json = False


@_command("advise", "finished_runs", "estimate whether a client would gain from joining")
class Advise:
    """Estimate whether a client would gain from joining a one-shot run; nothing is sent.

    Compares the classifier of the client's own data with that of the federation by
    cross-validation, with a 95 % confidence interval of the difference. Example:
    `mpfedcl advise runs/mine --data images`.
    """

    run: _FinishedRun
    data: Path  # Data of the client, as for `mpfedcl join`.
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
    clients: int | None = None  # Number of clients, which are named client-0, client-1 and so on.
    names: tuple[str, ...] = ()  # Names of the clients, instead of their number.
    host: str | None = None  # Address at which clients reach the server [default: 127.0.0.1].
    port: int = 9800  # Port of the server.


@_command("federation server", "federation", "run the server of a federation")
class FederationServer:
    """Run the server of a federation until Ctrl-C.

    The server listens on this machine only, unless --bind is given (see docs/federation.md).
    Clients need their keys to take part; starting a run needs the server's secret, a file in its
    folder. Example: `mpfedcl federation server lab`.
    """

    directory: _Federation
    bind: str = "127.0.0.1"  # Address to listen on; 0.0.0.0 for all interfaces.
    metrics_port: int | None = (
        None  # Port of /metrics (for Prometheus) and /healthz [default: off].
    )
    metrics_bind: str = "127.0.0.1"  # Address of /metrics and /healthz.
    log_json: _LogJson = False


@_command("federation client", "federation", "run a client of a federation")
class FederationClient:
    """Take part in a federation with the data of a folder, until Ctrl-C.

    Examples: `mpfedcl federation client . --data images` in a client's folder, or
    `mpfedcl federation client lab --name client-0 --share 0` to try out a federation.
    """

    directory: Annotated[Path, Positional, arg(metavar="DIR")]
    """Folder of the client, or with --name the folder of the federation."""
    name: str | None = None  # Name of the client [default: the client of the folder].
    data: Path | None = None
    """Data of this client: FOLDER/<class>/*.png|jpg, FOLDER/<domain>/<class>/*, npz files, or CSV
    or Parquet files if the federation is on tables."""
    share: _Share = None
    encoder: _Encoder = None
    encoder_weights: _EncoderWeights = None
    policy: Annotated[Path | None, _open("FILE")] = None
    """What this client allows, whatever the server asks for [default: the folder's policy.toml]."""
    device: str = "cpu"  # Device to compute on: cpu, cuda, cuda:1.
    log_json: _LogJson = False
    server: str | None = None  # host:port of the server [default: as in the client's folder].


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
    resume: Path | None = None  # Resume the run in this folder; only --rounds may be given with it.
    predictors: _Predictors = "primary"
    json: _Json = False
    settings: _Settings = field(default_factory=Experiment)


@_command("federation update", "federation", "let one client join or update a finished run")
class FederationUpdate:
    """Let one client join a finished one-shot run, or replace its data in it.

    Only this client needs to be connected to the server. To remove a client: `mpfedcl leave`.
    Example: `mpfedcl federation update lab --run runs/lab --client clinic-7`.
    """

    directory: _Federation
    run: Path  # Run directory of a one-shot method (fedgauss and its family) over a network.
    client: str  # Client; if it is in the run, its new statistics replace the old ones.
    json: _Json = False


@_command("federation status", "federation_operations", "show the clients and the run in progress")
class FederationStatus:
    """Show which clients are connected, since when, and what they do in the run in progress.

    The exit code is 1 if the server does not run. Example: `mpfedcl federation status lab`.
    """

    directory: _Federation
    json: _Json = False


@_command("federation revoke", "federation_operations", "shut out a client by revoking its key")
class FederationRevoke:
    """Revoke the key of a client, also while the server and a run are in progress.

    The client's requests and answers are refused at once. `mpfedcl federation init DIR --names
    NAME` lets it come back with a new key. Example: `mpfedcl federation revoke lab client-0`.
    """

    directory: _Federation
    name: _ClientName


@_command("federation rotate", "federation_operations", "give a client a new key")
class FederationRotate:
    """Create a new key for a client and revoke its old one.

    The new node.key is in DIR/clients/NAME; bring it to the machine of the client over a channel
    that you trust. Example: `mpfedcl federation rotate lab client-0`.
    """

    directory: _Federation
    name: _ClientName


@_command("federation renew", "federation_operations", "renew the certificate of the server")
class FederationRenew:
    """Create a new certificate for the server, with the same key and the same authority.

    Clients need nothing, and a server in progress uses it within seconds. With --authority the
    certificate of the authority (10 years) is renewed, too. Example:
    `mpfedcl federation renew lab`.
    """

    directory: _Federation
    authority: Annotated[bool, FlagCreatePairsOff] = False
    """Renew ca.pem as well; it goes to each client before the old one expires."""


@_command("federation audit", "federation_operations", "verify and print an audit log")
class FederationAudit:
    """Verify the hash chain of an audit log and print its entries.

    A log that was changed is reported in one line with exit code 2. DIR is the folder of the
    federation or of a client. Examples: `mpfedcl federation audit lab`,
    `mpfedcl federation audit lab --client client-0`.
    """

    directory: Annotated[Path, Positional, arg(metavar="DIR")]
    """Folder of the federation, or of a client."""
    client: str | None = None  # Name of a client whose log to read instead of the server's.
    contains: str | None = None  # SHA-256 of an entry that the log must have, noted before.
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

    epsilon: tuple[float, ...] = (0.5, 1.0, 3.0, 8.0)  # Privacy budgets to compare.
    delta: float = 1e-5  # Probability with which the guarantee may fail.
    unit: Literal["record", "client"] = "record"
    """What is protected: a single image (record), or all images of a client (client)."""
    model: Literal["central", "local"] = "central"
    """central: the server adds the noise; local: each client."""
    images: int = 2000  # Number of training images of all clients.
    clients: int = 5  # Number of clients.
    classes: int = 10  # Number of classes.
    dimension: int = 64  # Dimension of a feature after projection (privacy.dimensions).
    rounds: int = 0  # Rounds of training; 0: a one-shot method.
    fraction: float = 1.0  # Fraction of the clients that train per round.
    parameters: int = 100_000  # With --rounds: number of parameters of the model.
    clip: float | None = None  # Unit client: largest norm of a client's statistics [default: 10].
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

    settings: Annotated[Path, Positional, arg(metavar="RUN_OR_SETTINGS")]
    """Run directory, or TOML file of settings, of the server."""
    data: Path | None = None  # Data of this client, as for `mpfedcl federation client`.
    share: _Share = None
    threshold: int | None = None
    """Do not send values of fewer images than this (the policy's min_class_count)."""
    encoder: _Encoder = None
    encoder_weights: _EncoderWeights = None
    policy: Annotated[Path | None, _open("FILE")] = None
    """The client's policy [default: that of --client, otherwise the defaults]."""
    client: Annotated[Path | None, _open("DIR")] = None
    """Folder of the client: its policy, its own split of the data, and the budget it has spent."""
    json: _Json = False
