"""The sections of settings of an experiment.

Nothing here imports torch, so that the command line shows help and errors at once.
"""

import reprlib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.plugins import entry_points
from mpfedcl.experiment.names import (
    AGGREGATION_RULES,
    MODELS,
    PARTITIONS,
    describe,
    describe_unknown_setting,
    did_you_mean,
)

if TYPE_CHECKING:
    PartitionKind = str
    RuleName = str
else:
    # Names from an index and from entry points, unknown to type checkers.
    PartitionKind = Literal[(*PARTITIONS, *entry_points("mpfedcl.partitions"))]
    RuleName = Literal[(*AGGREGATION_RULES, *entry_points("mpfedcl.aggregators"))]


_MOST_PER_CLASS = 65_536
_Positive = Annotated[float, Field(gt=0)]
# True and false are how files of earlier versions say it.
_Standardize = Annotated[
    Literal["federated", "client", "none"],
    BeforeValidator(
        lambda value: ("none", "federated")[value] if isinstance(value, bool) else value
    ),
]
_Patterns = Annotated[
    tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
]


class Settings(BaseModel):
    """A section of settings: frozen, without unknown names, with one-line errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )
    section: ClassVar[str] = ""
    """Name of the section in a file and in its flags: `section = "fedprox"` makes --fedprox.mu. By
    default the name of the class in lower case, without `Settings`."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "section" not in vars(cls):
            cls.section = cls.__name__.removesuffix("Settings").strip("_").lower()

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InvalidInput(_describe_error(self.section, type(self), error)) from None

    def __setattr__(self, name: str, value: Any) -> None:
        changed = f"{self.section}__{name}" if self.section else name
        raise InvalidInput(
            f"{changed.replace('__', '.')} cannot be changed; make another experiment instead: "
            f"experiment = experiment.replace({changed}={value!r})."
        )

    def flattened(self, prefix: str = "") -> list[tuple[str, Any]]:
        """Return all settings by dotted name."""
        found: list[tuple[str, Any]] = []
        for name, value in self:
            if isinstance(value, Settings):
                found += value.flattened(f"{prefix}{name}.")
            else:
                found.append((f"{prefix}{name}", value))
        return found


class DatasetSettings(Settings):
    """The data set, and the part of it that is used."""

    name: str = "mnist-sample"
    """Name of the data set; `mpfedcl data list` lists them. package.module:function returns data as
    `mpfedcl.run(data=...)` takes them."""
    root: Path | None = None
    """Data folder [default: $MPFEDCL_DATA, otherwise the user's cache folder]. For `folder` the
    root is the data set itself; for `table` it is a CSV or Parquet file or a folder of them."""
    label: str | None = None
    """table, frames: column of the class."""
    client: str | None = None
    """table: column of the owner of each row, the domain [default: each file is a domain]."""
    columns: tuple[str, ...] = ()
    """table: columns to use, in order; one of text with its words, as sex=f|m [default: all of the
    table with all of their words; over a network they must be given]."""
    drop: tuple[str, ...] = ()
    """table: columns to leave out, such as numbers of patients and dates."""
    train_size: Annotated[int | None, Field(ge=1)] = None
    """Number of training images, drawn at random [default: the data set's; 2000 for mnist]."""
    test_fraction: Annotated[float | None, Field(gt=0, lt=1)] = None
    """Fraction held out as test set if there is none [default: the data set's, mostly 0.5]."""
    classes: tuple[str, ...] = ()
    """Names of the classes, in order; a data set with other classes is rejected [default: the data
    set's; over a network, those of all clients that are connected at the start]."""
    domains: tuple[str, ...] = ()
    """Domains to use [default: the data set's; all under feature skew]."""
    per_class: Annotated[int | None, Field(ge=1)] = None
    """Maximum number of images per class; under feature skew, of training images per class and
    domain [default: the data set's]."""
    test_per_class: Annotated[int | None, Field(ge=1)] = None
    """Feature skew: maximum number of test images per class and domain [default: the data
    set's]."""
    standardize: _Standardize = "federated"
    """federated: scale pixels by the data set's mean and standard deviation, columns of tables by
    those of the training rows of all clients; client: columns by each client's own training rows;
    none: pixels to [0, 1], columns not at all."""
    image_size: Annotated[int | None, Field(ge=1, le=1024)] = None
    """Resize images to this many pixels per side [default: the original size; 28 if sizes differ;
    32 for `folder` without an encoder]."""


class PartitionSettings(Settings):
    """The split of the images among the clients."""

    kind: Annotated[PartitionKind, Field(description=describe(PARTITIONS))] = "label"
    alpha: Annotated[float, Field(gt=0, le=1e6)] = 0.05
    """Dirichlet concentration; smaller values give more skew."""
    balanced: bool = True
    """Label skew: a client that has its fair share of images gets none of the next class."""
    min_size: Annotated[int | None, Field(ge=1)] = None
    """Redraw until each client has at least this many training images [default: the data set's]."""
    test: Literal["shared", "matched"] | None = None
    """shared: every client is tested on the whole test set; matched: each client is tested on
    images that are split like its training images [default: the data set's]."""
    classes_per_client: Annotated[int, Field(ge=1)] = 2
    """Number of classes per client under `--partition.kind classes`."""
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of training images that replaces the test images, as for `mpfedcl tune`."""


class TrainSettings(Settings):
    """Local training."""

    epochs: Annotated[int, Field(ge=1)] = 1
    """Epochs of local training per round."""
    steps: Annotated[int | None, Field(ge=1)] = None
    """Batches per round instead of epochs, as many for every client; samples are reshuffled once
    all have been used [default: epochs]."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Images per batch; the last batch of an epoch may be smaller."""
    lr: Annotated[float, Field(gt=0)] = 0.01
    """Learning rate of the first round."""
    lr_decay: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Factor on the learning rate after each round."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Momentum of sgd, which is reset in each round."""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """sgd: gradient descent with momentum; adam: Adam, whose averages are reset in each round."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the weight decay that is added to the gradient."""
    class_weights: Literal["none", "balanced"] = "none"
    """balanced: a sample of class c weighs n / (C n_c) in the cross-entropy, with the client's n
    samples, n_c of them of class c, and the C classes that it holds. A batch's loss is divided by
    the sum of its weights, as torch's cross_entropy(weight=...) does."""
    augment: Literal["none", "crop", "flip", "crop-flip"] = "none"
    """Random changes of training images, other ones in each step. crop: add 4 black pixels on each
    side, then cut out the original size; flip: mirror an image with probability 1/2."""

    @model_validator(mode="after")
    def _refuse_epochs_with_steps(self) -> Self:
        if self.steps is not None and self.epochs > 1:
            raise InvalidInput(
                f"train.epochs is {self.epochs}; with train.steps it must be left out, because a "
                "round has either epochs or steps."
            )
        return self

    def learning_rate(self, round_number: int) -> float:
        """Return the learning rate of a round; rounds count from 1."""
        return self.lr * self.lr_decay ** (round_number - 1)

    def num_steps(self, num_samples: int) -> int:
        """Return the steps of a client in a round, including a last smaller batch."""
        return self.steps or self.epochs * -(-num_samples // self.batch_size)

    def effective_steps(self, num_steps: int) -> float:
        """Return the distance of several steps along a constant gradient, in learning rates.

        Momentum starts at 0, so that the first step has length 1, the second 1 + momentum, the
        third 1 + momentum + momentum²; without momentum the result is the number of steps.
        """
        lost = self.momentum * (1 - self.momentum**num_steps) / (1 - self.momentum)
        return (num_steps - lost) / (1 - self.momentum)


def _number_or_auto(most: int) -> BeforeValidator:
    """Return a check whose error names all that is allowed; a union's names only its first type."""

    def check(value: Any) -> Any:
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
        is_count = type(value) is int and 1 <= value <= most
        if value is not None and value != "auto" and not is_count:
            allowed = f"a whole number from 1 to {most:,}, or auto"
            raise PydanticCustomError("chosen", "Input should be {allowed}", {"allowed": allowed})
        return value

    return BeforeValidator(check)


Workers = Annotated[int | Literal["auto"], _number_or_auto(4096)]
EvaluateEvery = Annotated[int | Literal["auto"], _number_or_auto(10**9)]


class PrototypeSettings(Settings):
    """The prototypes of the clients and their pool."""

    section: ClassVar[str] = "prototypes"
    per_class: Annotated[int | Literal["auto"] | None, _number_or_auto(_MOST_PER_CLASS)] = None
    """K, prototypes per class (mp-fedcl); auto: each client chooses 1 to 8 for each class, by the
    number of clusters of its embeddings [default: the data set's; 2 for mnist]."""
    normalize: bool = True
    """Normalize embeddings to unit norm for loss, clustering and distances."""
    padding: Literal["all", "fill"] | None = None
    """Padding for a client with fewer than K prototypes of a class. all: all K slots hold the class
    mean; fill: only the missing slots do [default: all; fill for dp-fedcl and if K is auto]."""
    min_cluster_size: Annotated[int, Field(ge=1)] = 1
    """Prototypes of fewer images than this are never sent."""
    init: Literal["k-means++", "random"] = "k-means++"
    """Initialization of k-means."""
    pool_ttl: Annotated[int, Field(ge=1)] = 1
    """Number of broadcasts that use the prototypes of a client; matters if clients are sampled."""
    pool_size: Annotated[int | None, Field(ge=1, le=_MOST_PER_CLASS)] = None
    """Maximum number of prototypes per class that the server sends; those of all clients are merged
    by k-means, and their owners are then groups [default: no limit]."""


class ContrastSettings(Settings):
    """The contrastive loss."""

    form: Literal["slots", "pooled", "literal"] = "slots"
    """slots: as in the text of the paper; pooled: independent of the order of slots; literal: the
    printed formula of the paper, which lowers accuracy."""
    temperature: Annotated[float, Field(gt=0)] = 0.07
    """Temperature; smaller values give more weight to the nearest wrong class."""
    weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the contrastive loss relative to the cross-entropy."""


class EncoderSettings(Settings):
    """The encoder that turns images into features, frozen by default."""

    name: str | None = None
    """none (raw pixels), resnet18, onnx:PATH, random-filters (small images, no weights) or
    random-resnet18; the last two take a seed, as in random-filters:7 [default: the data set's,
    mostly resnet18; none for vectors; for mnist none or the method's]."""
    weights: Path | None = None
    """File of weights [default: $MPFEDCL_WEIGHTS, otherwise searched for in the folder `weights` in
    or next to the data folder]."""
    train: bool = False
    """Also train the encoder (resnet18 only); each client then runs the full network."""
    output: Annotated[str | None, Field(min_length=1)] = None
    """onnx: name of the output to use as features [default: the only output]."""
    tokens: Literal["mean", "class", "patches"] | None = None
    """onnx, for outputs [batch, tokens, features]. mean: the mean of all tokens; class: the first
    token; patches: the mean of all but the first [default: mean]."""
    mean: tuple[float, float, float] | None = None
    """onnx: mean of red, green and blue in [0, 1] [default: the model's metadata, otherwise 0]."""
    deviation: tuple[_Positive, _Positive, _Positive] | None = None
    """onnx: standard deviation of the colors [default: the model's metadata, otherwise 1]."""
    image_size: Annotated[int | None, Field(ge=1, le=1024)] = None
    """onnx: pixels per side, if any size fits [default: the model's metadata, otherwise 64]."""

    @property
    def onnx_choices(self) -> dict[str, Any]:
        """Return the given settings that only ONNX models take."""
        names = ("output", "tokens", "mean", "deviation", "image_size")
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    @model_validator(mode="after")
    def _refuse_onnx_choices(self) -> Self:
        # Without a name, the default of the data set is not known yet.
        if self.name is not None and not self.name.startswith("onnx:"):
            for name, value in self.onnx_choices.items():
                raise InvalidInput(
                    f"encoder.{name} is {value!r}; it must be left out, because encoder.name is "
                    f"{self.name!r} and only onnx:FILE takes it."
                )
        return self


class AggregationSettings(Settings):
    """The aggregation of client updates."""

    rule: RuleName = Field(default="mean", description=describe(AGGREGATION_RULES))
    attackers: Annotated[float, Field(ge=0, lt=0.5)] = 0.2
    """Assumed fraction of malicious clients in a round, for rules other than the mean: this
    fraction is trimmed at each end, or excluded by Krum."""


_TAKEN_BY = {"hidden": ("mlp", "cnn"), "norm": ("cnn",)}
"""The models that take a setting."""
_ModelsOfClients = Annotated[
    tuple[str, ...] | None,
    BeforeValidator(
        lambda value: (
            tuple(f"{client}={name}" for client, name in value.items())
            if isinstance(value, Mapping)
            else value
        )
    ),
]
"""A mapping in Python and in a file is also taken as its CLIENT=MODEL entries."""


def _takes(model: str | None, field: str) -> bool:
    """Return whether a model takes a setting."""
    if field == "embedding":
        return model not in MODELS[:3]
    return model is None or model in _TAKEN_BY[field]


class ModelSettings(Settings):
    """The model that clients train, on pixels or on features of the encoder."""

    name: str | None = None
    """mlp; linear (logistic regression); for images cnn (two 5 x 5 convolutions, then an mlp),
    cnn-small (of NIID-Bench), resnet8, resnet18 (with batch normalization) or timm:NAME (of timm,
    with fresh weights); or your own, package.module:function, which returns a torch.nn.Module
    [default: the data set's, or mlp]."""
    embedding: Annotated[str | None, Field(min_length=1)] = None
    """Own model, resnet and cnn-small: the submodule whose output is the embedding [default: the
    input of the last linear layer]."""
    hidden: tuple[Annotated[int, Field(ge=1, le=65_536)], ...] = ()
    """Sizes of the hidden layers; the last one is the embedding [default: 512 512 256 on pixels,
    256 on features, 512 in a cnn]."""
    norm: Literal["none", "group"] = "none"
    """cnn: normalization of the output of each convolution."""
    train: _Patterns = ()
    """Patterns of the names of parameters to train and send, such as head.* or *lora_*; all others
    are constants, equal at all clients [default: all]."""
    share: _Patterns = ()
    """Patterns of the names of trained parameters to send; the others stay with each client, whose
    personalized model then predicts [default: all that the method sends]."""
    clients: _ModelsOfClients = None
    """Other models for some clients, as north=resnet8 or clinic-*=package.module:function, whose
    embeddings are of equal size; a name comes before a pattern, and `hidden`, `norm` and
    `embedding` apply to the models that take them. For methods that share no parameters: fedpcl,
    fedproto, local, and mp-fedcl with --no-share-model [default: all have the same]."""

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        known = (*MODELS, *entry_points("mpfedcl.models"))
        if odd := [each for each in self.clients or () if not all(each.rpartition("="))]:
            raise InvalidInput(
                f"model.clients is {odd[0]!r}; it must be CLIENT=MODEL, such as north=resnet8."
            )
        of_clients = self.names_by_client
        given = [("model.name", self.name), *(("model.clients", n) for n in of_clients.values())]
        for field, name in given:
            if name is not None and name not in known and ":" not in name:
                raise InvalidInput(
                    f"{field} is {name!r}; it must be one of {', '.join(known)}, or "
                    f"package.module:function{did_you_mean(name, known)}."
                )
        if len(of_clients) < len(self.clients or ()):
            raise InvalidInput(f"model.clients is {self.clients!r}; it must name a client once.")
        if self.name is None:
            return self
        for field, models in _TAKEN_BY.items():
            value = getattr(self, field)
            if value not in ((), "none") and not any(_takes(each, field) for each in self.names):
                raise InvalidInput(
                    f"model.{field} is {value!r}; it must be left out, because model.name is "
                    f"{self.name!r} and only {' and '.join(models)} take it."
                )
        if self.embedding is not None and not any(_takes(n, "embedding") for n in self.names):
            raise InvalidInput(
                f"model.embedding is {self.embedding!r}; it must be left out, because model.name "
                f"is {self.name!r}, whose embedding is the last hidden layer."
            )
        return self

    @property
    def names_by_client(self) -> dict[str, str]:
        """The names of models by client or pattern."""
        return {client: name for client, _, name in (e.rpartition("=") for e in self.clients or ())}

    @property
    def names(self) -> list[str]:
        """The names of all models."""
        return list(dict.fromkeys([*filter(None, [self.name]), *self.names_by_client.values()]))

    def of_clients(self, clients: Iterable[str]) -> dict[str, "ModelSettings"]:
        """Return the settings of each client's model."""
        given = self.names_by_client
        patterns = {pattern: name for pattern, name in given.items() if set(pattern) & set("*?[")}

        def find(client: str) -> ModelSettings:
            fitting = (name for each, name in patterns.items() if fnmatchcase(client, each))
            name = given.get(client) or next(fitting, self.name)
            fields = ("hidden", "norm", "embedding")
            taken = {field: getattr(self, field) for field in fields if _takes(name, field)}
            return ModelSettings(name=name, **taken)

        return {client: find(client) for client in clients} if given else {}

    def check_clients(self, clients: Iterable[str]) -> None:
        """Reject names and patterns that fit no client."""
        known = sorted(clients)
        for each in sorted(self.names_by_client.keys() - set(known)):
            if not any(fnmatchcase(client, each) for client in known):
                raise InvalidInput(
                    f"model.clients names {each!r}, which fits no client; the clients are "
                    f"{', '.join(known[:12])}{' ...' if len(known) > 12 else ''}"
                    f"{did_you_mean(each, known)}."
                )


class ValidationSettings(Settings):
    """Validation of client updates."""

    max_norm: Annotated[float, Field(gt=0)] = 1e6
    """Maximum norm of a client's model change and of a prototype; larger ones are rejected."""
    bounds: Literal["auto", "on", "off"] = "auto"
    """Bound each client's influence by the updates of the others; auto: on over a network only."""
    share_cap: Annotated[float, Field(ge=1)] = 1.0
    """Bounds: maximum weight of a client, in clients of median size."""
    sizes: tuple[Annotated[str, Field(pattern=r".:[1-9][0-9]{0,11}$")], ...] = ()
    """Bounds: known numbers of samples of clients, such as hospital:5000, up to which each may
    weigh."""
    clip_factor: Annotated[float, Field(gt=0)] = 1.2
    """Bounds: a model change is clipped to this multiple of the last round's median norm."""
    strictness: Annotated[float, Field(ge=1)] = 1.0
    """Bounds: a client whose agreement with the others is below the typical agreement by this
    multiple of it (1: no agreement, 2: the opposite) loses weight; half more, and its weight is
    0."""
    odd_factor: Annotated[float, Field(gt=1)] = 4.0
    """Bounds: a client whose class means differ from those of the others by this multiple of the
    expected random difference is rejected (one-shot methods); so are prototypes whose norm is this
    multiple of the usual one."""

    @property
    def stated_sizes(self) -> dict[str, int]:
        """Return `sizes` by client."""
        pairs = (each.rpartition(":") for each in self.sizes)
        return {name: int(size) for name, _, size in pairs}


class StatisticsSettings(Settings):
    """The sufficient statistics that a one-shot run keeps."""

    keep: Literal["auto", "clients", "pooled"] = "auto"
    """clients: keep the statistics of each client, so that any client can leave later; pooled: keep
    only their sum, from which no client can leave; auto: clients, up to 10,000 and 1 GB."""
    random_features: Annotated[int, Field(ge=0, le=4096)] = 512
    """Random features that one-shot methods add to samples of fewer than 256 values; 0: none, for
    small messages."""


class UpdateSettings(Settings):
    """Processing of an update on its way to the server."""

    clip: Annotated[float | None, Field(gt=0)] = None
    """Largest L2 norm of a model change; larger ones are scaled down [default: no limit]."""
    compress: Literal["none", "half", "int8", "topk"] | None = None
    """Compression of uploads. half: half precision; int8: one byte per value, rounded at random so
    that the mean is unbiased; topk: only the largest changes of the model, and the rest is added to
    the next change. Prototypes are sent in half precision with topk, sufficient statistics with
    int8 and topk [default: none]."""
    keep: Annotated[float | None, Field(gt=0, le=1)] = None
    """topk: the share of a tensor's values that is sent [default: 0.05]."""


class PrivacySettings(Settings):
    """Differential privacy of one image or of one client."""

    epsilon: Annotated[float | None, Field(gt=0, le=100)] = None
    """Privacy budget; smaller values protect more and cost more accuracy, see `mpfedcl privacy
    plan` [default: no budget, no noise and no guarantee]."""
    delta: Annotated[float, Field(gt=0, lt=0.1)] = 1e-5
    """Probability that the guarantee fails; choose it well below 1 / number of images (clients)."""
    unit: Literal["record", "client"] | None = None
    """Unit of the guarantee: one training image (record, one-shot methods only), or all images of a
    client [default: record for one-shot methods, otherwise client]."""
    model: Literal["central", "local"] = "central"
    """central: the server adds the noise and sees the exact updates; local: each client adds noise
    before it sends (one-shot methods only), which costs more accuracy."""
    clip: Annotated[float | None, Field(gt=0)] = None
    """Unit client: maximum norm of an update [default: 1 for a model change, 10 for statistics]."""
    dimensions: Annotated[int, Field(ge=1)] = 64
    """One-shot methods: dimension to which features are projected by a public random matrix; fewer
    dimensions need less noise. No projection if features have no more dimensions."""
    moments: bool = False
    """fedgauss, fedlda: send second moments too, for thousands of images; fedridge always does."""
    noise: Annotated[float | None, Field(gt=0)] = None
    """Methods that train: noise multiplier, the standard deviation of the noise divided by the clip
    [default: calibrated to the budget over all rounds]. If given, the run ends before a round that
    the budget does not cover."""

    @property
    def has_budget(self) -> bool:
        """Whether there is a privacy budget."""
        return self.epsilon is not None

    def unit_for(self, *, trains: bool) -> Literal["record", "client"]:
        """Return the unit of the guarantee for a method that trains, or for a one-shot method."""
        return self.unit or ("client" if trains else "record")


class SystemsSettings(Settings):
    """Simulated system heterogeneity on a virtual clock, which is the same on every machine. Over a
    network only tick, concurrency and most_per_minute apply."""

    kind: Literal["none", "lognormal", "tiers"] | None = None
    """lognormal: the speeds of each client are drawn once; tiers: five equal groups wait 0, 0 to 5,
    6 to 10, 11 to 15 and 20 to 30 seconds before each update; none: no virtual clock [default:
    lognormal for asynchronous methods, otherwise none]."""
    spread: Annotated[float, Field(ge=0, le=5)] = 0.8
    """lognormal: standard deviation of the logarithm of client speeds; 0: all are equally fast."""
    follows: Literal["none", "size", "label"] = "none"
    """Which clients are slow: random ones (none), those with many samples (size), or those with the
    last classes (label), which biases asynchronous methods."""
    seconds_a_sample: Annotated[float, Field(gt=0, le=1e6)] = 0.001
    """Seconds per sample and epoch of a client of median speed."""
    jitter: Annotated[float, Field(ge=0, le=5)] = 0.1
    """Standard deviation of the logarithm of a client's training time."""
    down: Annotated[float, Field(gt=0)] = 1e6
    """Download speed of a client of median speed, in bytes per second."""
    up: Annotated[float, Field(gt=0)] = 1e6
    """Upload speed of a client of median speed, in bytes per second."""
    latency: Annotated[float, Field(ge=0, le=1e6)] = 0.1
    """Additional seconds per message, in each direction."""
    drop: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the updates that are lost."""
    patience: Annotated[float, Field(ge=1, le=1000)] = 2.0
    """Timeout of an update, as a multiple of the usual time of its client."""
    tick: Annotated[float | None, Field(gt=0, le=1e9)] = None
    """Seconds between aggregations at fixed intervals [default: the clients' median usual time;
    over a network a tenth of network.round_timeout]."""
    concurrency: Annotated[int | None, Field(ge=1)] = None
    """Asynchronous methods: number of clients that train at a time [default: from fraction]."""
    most_per_minute: Annotated[float, Field(ge=0, le=1e6)] = 20.0
    """Asynchronous methods over a network: maximum number of times per minute that a client is sent
    the model, so that fast clients cannot dominate; 0: no limit."""

    @property
    def has_clock(self) -> bool:
        """Whether virtual seconds are counted."""
        return self.kind not in (None, "none")


class PublicSettings(Settings):
    """Public training images of the server, which validates models on them. Simulations only."""

    size: Annotated[int | None, Field(ge=0)] = None
    """Number of images, at most a tenth of all [default: 1000 for sageflow, otherwise 0]."""


class NetworkSettings(Settings):
    """Timeouts and limits of a federation over a network. Simulations use only `enough`."""

    round_timeout: Annotated[float, Field(gt=0, le=7 * 86_400)] = 600.0
    """Seconds that a round waits for updates; clients without an update by then are missing."""
    enough: Annotated[float, Field(gt=0, le=1)] = 1.0
    """A round ends once this fraction of its clients has replied (simulation: see systems.kind)."""
    patience: Annotated[float, Field(gt=0, le=7 * 86_400)] = 300.0
    """Seconds to wait for clients to connect, at the start and whenever too few are connected."""
    max_images: Annotated[int, Field(ge=1)] = 10_000_000
    """Maximum number of training images that a client may claim, because they are its weight in the
    average and cannot be verified. A client that claims more is rejected."""


class SecureSettings(Settings):
    """Secure aggregation (`--secure-aggregation`)."""

    # With secure aggregation less than 2/3 is rejected; a run without may have recorded less.
    threshold: Annotated[float, Field(ge=0.5, lt=1)] = 2 / 3
    """More than this fraction of a round's clients must remain at its end, otherwise the sum is not
    opened; at least 2/3, so that a lying server that colludes with a third of the clients sees only
    the sum."""
    honest_clients: Annotated[int, Field(ge=1)] = 1
    """With a privacy budget: the number of clients in each sum that are assumed to be honest. Each
    client adds a share of the noise such that the shares of this many clients suffice. A client
    accepts more than 1 only if its own policy file allows it."""


def _describe_error(section: str, model: type[BaseModel], error: ValidationError) -> str:
    """Return the first validation error in one line: field, value and allowed values."""
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in ([section] if section else []) + list(first["loc"]))
    if first["type"] == "extra_forbidden":
        question = did_you_mean(str(first["loc"][-1]), model.model_fields, f"{section}.")
        allowed = f"[{section}] has {', '.join(model.model_fields)}."
        return describe_unknown_setting(field, question, allowed)
    if first["type"] == "model_type":
        given = {"model": "run(..., model=...) takes", "dataset": "run(..., data=...) takes"}
        hint = f"; {given[field]} objects" if field in given else ""
        shown = " ".join(reprlib.repr(first["input"]).split())
        return f"{field} is {shown}; it must be a table of settings{hint}."
    wanted = first["msg"].removeprefix("Input should be ").replace("a finite number", "finite")
    return f"{field} is {first['input']!r}; it must be {wanted}."
