"""The groups of settings that make up an experiment, validated one by one.

This module imports no torch, so the command line checks its input and shows help at once.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.plugins import entry_points
from mpfedcl.experiment.names import AGGREGATION_RULES, PARTITIONS, describe, did_you_mean

if TYPE_CHECKING:
    PartitionKind = str
    RuleName = str
else:
    # Names of an index and of entry points, which no type checker knows.
    PartitionKind = Literal[(*PARTITIONS, *entry_points("mpfedcl.partitions"))]
    RuleName = Literal[(*AGGREGATION_RULES, *entry_points("mpfedcl.aggregators"))]


_MOST_PER_CLASS = 65_536
_Positive = Annotated[float, Field(gt=0)]


class Settings(BaseModel):
    """A group of settings: frozen, no unknown names, errors as one sentence."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )
    section: ClassVar[str] = ""
    """Its name in a file and before its flags: `section = "fedprox"` makes --fedprox.mu."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InvalidInput(_sentence(self.section, type(self), error)) from None

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
    """Which data, and how much of it."""

    section: ClassVar[str] = "dataset"
    name: str = "mnist-sample"
    """Data set; `mpfedcl data list` names them all."""
    root: Path | None = None
    """Data folder; else $MPFEDCL_DATA, else the cache folder. For `folder`, the set itself; for
    `table`, a CSV or Parquet file or a folder of them."""
    label: str | None = None
    """Tables: the column that holds the class."""
    client: str | None = None
    """Tables: the column that names the owner of each row; its values are the domains [default:
    each file is one]."""
    train_size: Annotated[int | None, Field(ge=1)] = None
    """Training images drawn in all [default: the data set's; mnist 2000]."""
    test_fraction: Annotated[float | None, Field(gt=0, lt=1)] = None
    """Share of the images kept for testing if there is no test set [default: the data
    set's, mostly 0.5]."""
    classes: tuple[str, ...] = ()
    """The classes, in order; a set that has others is refused [default: the set's own, and over a
    network those of all clients that are connected at the start]."""
    domains: tuple[str, ...] = ()
    """Only these domains of a set that has several [default: the data set's; all under feature
    skew]."""
    per_class: Annotated[int | None, Field(ge=1)] = None
    """At most this many images per class: in all, or under feature skew for training in each
    domain [default: the data set's]."""
    test_per_class: Annotated[int | None, Field(ge=1)] = None
    """Feature skew: at most this many test images per class in each domain [default: the data
    set's]."""
    standardize: bool = True
    """Scale pixels to about mean 0 and deviation 1 with constants of the set; else to 0 to 1."""
    image_size: Annotated[int | None, Field(ge=1, le=1024)] = None
    """Resize images to this many pixels per side [default: as they are; 28 where sizes differ; 32
    for your own pictures without an encoder]."""


class PartitionSettings(Settings):
    """How the images are split among the clients."""

    section: ClassVar[str] = "partition"
    kind: Annotated[PartitionKind, Field(description=describe(PARTITIONS))] = "label"
    alpha: Annotated[float, Field(gt=0, le=1e6)] = 0.05
    """Dirichlet concentration; smaller is more skewed."""
    balanced: bool = True
    """Label skew: a client that already has its fair share of images gets none of the next
    class."""
    min_size: Annotated[int | None, Field(ge=1)] = None
    """Redraw until each client has this many training images [default: the data set's]."""
    test: Literal["shared", "matched"] | None = None
    """shared: everyone is tested on the whole test set; matched: each on images split as its
    training images are [default: the data set's]."""
    classes_per_client: Annotated[int, Field(ge=1)] = 2
    """Classes that each client holds under `--partition.kind classes`."""
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of each client's training images to hold out and test on instead of the test images,
    which are then not used; 0: none. For choosing settings, as `mpfedcl tune` does."""


class TrainSettings(Settings):
    """Local training."""

    section: ClassVar[str] = "train"
    epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over a client's data each round."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Images per step; the last, smaller batch is kept."""
    lr: Annotated[float, Field(gt=0)] = 0.01
    """Learning rate of the first round."""
    lr_decay: Annotated[float, Field(gt=0, le=1)] = 0.95
    """The learning rate is multiplied by this after each round."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Momentum of sgd, reset each round."""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """sgd: gradient descent with momentum; adam: Adam, its averages reset each round."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay: this many times a weight is added to its gradient."""

    def learning_rate(self, round_number: int) -> float:
        """Return the learning rate of a round; rounds count from 1."""
        return self.lr * self.lr_decay ** (round_number - 1)

    def num_steps(self, num_samples: int) -> int:
        """Return the steps of a client in a round; the last, smaller batch of an epoch is one."""
        return self.epochs * -(-num_samples // self.batch_size)

    def effective_steps(self, num_steps: int) -> float:
        """Return how far steps go along a constant gradient, in learning rates.

        Momentum is fresh, so that the first step has length 1, the second 1 + momentum, the third
        1 + momentum + momentum²; without momentum it is the number of steps.
        """
        lost = self.momentum * (1 - self.momentum**num_steps) / (1 - self.momentum)
        return (num_steps - lost) / (1 - self.momentum)


def _check_per_class(value: Any) -> Any:
    """Say all that is allowed at once; a union would name its first kind alone."""
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    is_count = type(value) is int and 1 <= value <= _MOST_PER_CLASS
    if value is not None and value != "auto" and not is_count:
        allowed = f"a whole number from 1 to {_MOST_PER_CLASS:,}, or auto"
        raise PydanticCustomError("per_class", "Input should be {allowed}", {"allowed": allowed})
    return value


class PrototypeSettings(Settings):
    """What a client's prototypes are."""

    section: ClassVar[str] = "prototypes"
    per_class: Annotated[int | Literal["auto"] | None, BeforeValidator(_check_per_class)] = None
    """K, prototypes per class (mp-fedcl); auto: each client chooses 1 to 8 for each class, by how
    many clusters its embeddings form [default: the data set's; mnist 2]."""
    normalize: bool = True
    """Scale embeddings to length 1 for the loss, for clustering and for distances."""
    padding: Literal["all", "fill"] | None = None
    """Where a client has fewer than K prototypes of a class: `all` K slots hold the class mean, or
    only the missing ones are filled [default: all; fill for dp-fedcl and where K is auto]."""
    min_cluster_size: Annotated[int, Field(ge=1)] = 1
    """Prototypes of fewer images than this are never sent."""
    init: Literal["k-means++", "random"] = "k-means++"
    """How k-means starts."""
    pool_ttl: Annotated[int, Field(ge=1)] = 1
    """Broadcasts in which a client's prototypes are used; more than 1 matters when clients are
    sampled."""
    pool_size: Annotated[int | None, Field(ge=1, le=_MOST_PER_CLASS)] = None
    """Many clients: the server sends at most this many prototypes per class, those of all clients
    merged by k-means; their owners are then groups [default: all of them]."""


class ContrastSettings(Settings):
    """The contrastive loss."""

    section: ClassVar[str] = "contrast"
    form: Literal["slots", "pooled", "literal"] = "slots"
    """slots: as the paper's text says; pooled: independent of the order of slots; literal: the
    paper's printed formula, only to show that it hurts."""
    temperature: Annotated[float, Field(gt=0)] = 0.07
    """Smaller values weigh the nearest wrong class more."""
    weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of this loss beside the cross-entropy."""
    sample: Annotated[int | None, Field(ge=1)] = None
    """Large pools: contrast each step with the prototypes of this many clients, drawn anew; the
    loss stays unbiased [default: with all of them]."""


class EncoderSettings(Settings):
    """The frozen encoder that turns images into features."""

    section: ClassVar[str] = "encoder"
    name: str | None = None
    """none (pixels as they are), resnet18, onnx:PATH, torchvision:NAME, random-filters (small
    images, no weights) or random-resnet18; the last two also with a seed, random-filters:7
    [default: the data set's: resnet18, none for vectors, for mnist none or the method's]."""
    weights: Path | None = None
    """Weights file; else $MPFEDCL_WEIGHTS, else the folder weights in or beside the data folder."""
    train: bool = False
    """Train the encoder too (resnet18): each client runs the full network."""
    output: Annotated[str | None, Field(min_length=1)] = None
    """onnx: name of the output to use as features [default: the only one]."""
    tokens: Literal["mean", "class", "patches"] | None = None
    """onnx, where the output is [batch, tokens, features]: the mean of all tokens, the class token
    (the first one), or the mean of the patches (all but the first) [default: mean]."""
    mean: tuple[float, float, float] | None = None
    """onnx: subtracted from red, green and blue in 0 to 1 [default: the model's metadata, else
    0]."""
    deviation: tuple[_Positive, _Positive, _Positive] | None = None
    """onnx: red, green and blue are then divided by it [default: the model's metadata, else 1]."""
    image_size: Annotated[int | None, Field(ge=1, le=1024)] = None
    """onnx: pixels per side, where the model takes any size [default: the model's metadata, else
    64]."""

    @property
    def onnx_choices(self) -> dict[str, Any]:
        """Return the settings above that are given, all of which are for ONNX models alone."""
        names = ("output", "tokens", "mean", "deviation", "image_size")
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    @model_validator(mode="after")
    def _refuse_onnx_choices(self) -> Self:
        # While the name is open, the data set may still fill it in.
        if self.name is not None and not self.name.startswith("onnx:"):
            for name, value in self.onnx_choices.items():
                raise InvalidInput(
                    f"encoder.{name} is {value!r}; it must be left out, because encoder.name is "
                    f"{self.name!r} and only onnx:FILE takes it."
                )
        return self


class AggregationSettings(Settings):
    """How the clients' models become one."""

    section: ClassVar[str] = "aggregation"
    rule: RuleName = Field(default="mean", description=describe(AGGREGATION_RULES))
    attackers: Annotated[float, Field(ge=0, lt=0.5)] = 0.2
    """Share of a round's clients that may be hostile, for rules other than the mean: this many are
    trimmed at each end, or left out by Krum."""
    bucket: Annotated[int, Field(ge=1, le=1024)] = 1
    """Clients per bucket, drawn anew in each round; such a rule sees only the mean of each bucket.
    2 helps where clients differ much, and halves how many hostile clients are withstood."""


class ModelSettings(Settings):
    """The network that clients train, on pixels or behind the encoder."""

    section: ClassVar[str] = "model"
    name: Literal["mlp", "cnn"] | None = None
    """mlp: fully connected layers; cnn: two 5 x 5 convolutions before them, only for images
    [default: the data set's, mostly mlp]."""
    hidden: tuple[Annotated[int, Field(ge=1, le=65_536)], ...] = ()
    """Sizes of the hidden layers; the last one is the embedding [default: 512 512 256 on pixels,
    256 behind an encoder, 512 in a cnn]."""
    norm: Literal["none", "group"] = "none"
    """cnn: what normalizes each convolution's output."""


class ValidationSettings(Settings):
    """What an update from a client may look like."""

    section: ClassVar[str] = "validation"
    max_norm: Annotated[float, Field(gt=0)] = 1e6
    """Largest length of a client's change to the model, and of a prototype."""
    bounds: Literal["auto", "on", "off"] = "auto"
    """Bound what a client sends by what the others send; auto: over a network, where clients are
    strangers, and not in a simulation."""
    share_cap: Annotated[float, Field(ge=1)] = 3.0
    """Bounds: a client weighs at most as much as this many clients of median size."""
    sizes: tuple[Annotated[str, Field(pattern=r".:[1-9][0-9]{0,11}$")], ...] = ()
    """Bounds: clients whose number of samples you know, as hospital:5000; each weighs up to that,
    whatever the median."""
    clip_factor: Annotated[float, Field(gt=0)] = 1.5
    """Bounds: a change is clipped to this many times the median length of the round before."""
    strictness: Annotated[float, Field(ge=1)] = 2.0
    """Bounds: a client whose changes lie this many deviations farther from the others' direction
    than usual, round after round, counts less; half a deviation more, and it does not count at
    all."""
    odd_factor: Annotated[float, Field(gt=1)] = 4.0
    """Bounds, where clients send sums: a client whose class means differ from the others' by this
    many times what chance explains is rejected; so are prototypes this many times as long."""

    @property
    def stated_sizes(self) -> dict[str, int]:
        """Return `sizes` by client."""
        pairs = (each.rpartition(":") for each in self.sizes)
        return {name: int(size) for name, _, size in pairs}


class StatisticsSettings(Settings):
    """Which of the clients' sums one-shot methods keep."""

    section: ClassVar[str] = "statistics"
    keep: Literal["auto", "clients", "pooled"] = "auto"
    """clients: each client's sums, so that any client can leave later; pooled: only their total,
    from which nobody can be taken out; auto: clients, as long as they are up to 10,000 and take up
    to 1 GB in all."""


class UpdateSettings(Settings):
    """Processing of an update on its way to the server."""

    section: ClassVar[str] = "update"
    clip: Annotated[float | None, Field(gt=0)] = None
    """Largest L2 norm of a client's change of the model; a larger change is scaled down [default:
    no limit]."""
    compress: Literal["none", "half", "int8", "topk"] | None = None
    """Compression of uploads. half: half precision; int8: one byte per value, rounded at random so
    that the mean is unbiased; topk: only the largest changes of the model, and the rest is added to
    the next change. Prototypes are sent in half precision with topk, sufficient statistics with
    int8 and topk [default: none]."""
    keep: Annotated[float | None, Field(gt=0, le=1)] = None
    """topk: the share of a tensor's values that is sent [default: 0.05]."""


class PrivacySettings(Settings):
    """Differential privacy: how much anybody may learn about one image, or about one client."""

    section: ClassVar[str] = "privacy"
    epsilon: Annotated[float | None, Field(gt=0, le=100)] = None
    """The budget: smaller protects more, and costs more accuracy; `mpfedcl privacy plan` says how
    much [default: no budget, no noise and no guarantee]."""
    delta: Annotated[float, Field(gt=0, lt=0.1)] = 1e-5
    """The probability with which the guarantee may fail; well below one over the number of images,
    or of clients."""
    unit: Literal["record", "client"] | None = None
    """What the guarantee is about: one training image (one-shot methods), or all images of a
    client [default: record with one exchange, client with rounds]."""
    model: Literal["central", "local"] = "central"
    """Who adds the noise: the server, which then sees the bare numbers, or each client before
    anything leaves it (one-shot methods), which costs more accuracy."""
    clip: Annotated[float | None, Field(gt=0)] = None
    """Unit client: the greatest length of what one client adds [default: 1 for the change of a
    model, 10 for sums]."""
    dimensions: Annotated[int, Field(ge=1)] = 64
    """One exchange: project features to this many dimensions, by a matrix that everybody knows;
    fewer dimensions need less noise. As many as features have, or more: no projection."""
    moments: bool = False
    """One exchange (fedgauss, fedlda): send second moments too; worth it from thousands of images.
    fedridge always does."""
    release_every: Annotated[int, Field(ge=1)] = 1
    """Methods with prototypes: rounds between two releases of them; fewer releases leave more of
    the budget to the model."""
    noise: Annotated[float | None, Field(gt=0)] = None
    """Rounds: noise multiplier, the noise's deviation divided by the clip [default: as much as the
    budget needs over all rounds]. If given, the run ends before a round that the budget does not
    cover."""

    @property
    def has_budget(self) -> bool:
        """Whether there is a promise to keep."""
        return self.epsilon is not None

    def unit_for(self, *, trains: bool) -> Literal["record", "client"]:
        """Return what the promise is about, with a method that trains in rounds or not."""
        return self.unit or ("client" if trains else "record")


class SystemsSettings(Settings):
    """How fast clients are, on a virtual clock: the same on every machine. Only in simulations,
    except for tick, concurrency and most_per_minute."""

    section: ClassVar[str] = "systems"
    kind: Literal["none", "lognormal", "tiers"] | None = None
    """lognormal: each client has speeds of its own, drawn once; tiers: five equal groups wait 0, 0
    to 5, 6 to 10, 11 to 15 and 20 to 30 seconds before each answer; none: no clock [default:
    lognormal with asynchronous methods, else none]."""
    spread: Annotated[float, Field(ge=0, le=5)] = 0.8
    """lognormal: deviation of the logarithm of a client's speeds; 0: all are equally fast."""
    follows: Literal["none", "size", "label"] = "none"
    """Who is slow: anybody; clients with many samples; or those that hold the last classes, which
    is where asynchronous methods are biased."""
    seconds_a_sample: Annotated[float, Field(gt=0, le=1e6)] = 0.001
    """Seconds that a client of median speed needs per sample and epoch."""
    jitter: Annotated[float, Field(ge=0, le=5)] = 0.1
    """How much a client's training time varies: deviation of its logarithm."""
    down: Annotated[float, Field(gt=0)] = 1e6
    """Bytes per second from the server to a client of median speed."""
    up: Annotated[float, Field(gt=0)] = 1e6
    """Bytes per second from a client of median speed to the server."""
    latency: Annotated[float, Field(ge=0, le=1e6)] = 0.1
    """Additional seconds per message, in each direction."""
    drop: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the answers that are lost on the way."""
    patience: Annotated[float, Field(ge=1, le=1000)] = 2.0
    """An answer is given up after this many times the seconds that its client usually needs."""
    tick: Annotated[float | None, Field(gt=0, le=1e9)] = None
    """Methods that collect answers at fixed intervals: seconds between them [default: the median of
    what clients usually need]."""
    concurrency: Annotated[int | None, Field(ge=1)] = None
    """Asynchronous methods: clients that train at the same time [default: as many as in a round,
    see fraction]."""
    most_per_minute: Annotated[float, Field(ge=0, le=1e6)] = 20.0
    """Asynchronous methods over a network: how often a client is sent the model in a minute at
    most, lest a fast one, or one that does not train at all, take the model over; 0: as often as
    it can."""

    @property
    def has_clock(self) -> bool:
        """Whether virtual seconds are counted."""
        return self.kind not in (None, "none")


class PublicSettings(Settings):
    """Training images that no client gets: the server judges models on them. Simulations only."""

    section: ClassVar[str] = "public"
    size: Annotated[int | None, Field(ge=0)] = None
    """How many are held out before the rest is split among clients; at most a tenth of all
    [default: 1000 with sageflow, else 0]."""


class NetworkSettings(Settings):
    """A federation over a network: how long to wait, and for whom. Only `enough` is used in a
    simulation."""

    section: ClassVar[str] = "network"
    round_timeout: Annotated[float, Field(gt=0, le=7 * 86_400)] = 600.0
    """Seconds that a round waits for answers; a client that has not answered by then is missing."""
    enough: Annotated[float, Field(gt=0, le=1)] = 1.0
    """A round ends early once this share of the clients asked have answered. In a simulation it
    needs a virtual clock (systems.kind)."""
    patience: Annotated[float, Field(gt=0, le=7 * 86_400)] = 300.0
    """Seconds to wait for clients to connect, at the start and whenever too few are left."""
    max_images: Annotated[int, Field(ge=1)] = 10_000_000
    """Most training images that a client may claim: they are its weight in the average, and nobody
    can check them. A client that claims more may not take part."""


class SecureSettings(Settings):
    """Secure aggregation (`--secure-aggregation`): when a sum is opened."""

    section: ClassVar[str] = "secure"
    threshold: Annotated[float, Field(ge=0.5, lt=1)] = 0.5
    """More than this share of a round's clients must be left at its end, or nothing is opened. With
    more than two thirds, a server that cheats together with a third of the clients learns no more
    than an honest one."""


def _number_or_auto(most: int) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        """Say all that is allowed at once; a union would name its first kind alone."""
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
        is_count = type(value) is int and 1 <= value <= most
        if value != "auto" and not is_count:
            allowed = f"a whole number from 1 to {most:,}, or auto"
            raise PydanticCustomError("chosen", "Input should be {allowed}", {"allowed": allowed})
        return value

    return check


Workers = Annotated[int | Literal["auto"], BeforeValidator(_number_or_auto(4096))]
EvaluateEvery = Annotated[int | Literal["auto"], BeforeValidator(_number_or_auto(10**9))]


def _take_numbers(given: Any) -> Any:
    """Take numbers and truths of a file as the texts that a command line would give."""
    if not isinstance(given, dict):
        return given
    return {name: _as_text(value) for name, value in given.items()}


def _as_text(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    is_number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return str(value) if is_number else value


OptionValues = Annotated[dict[str, str], BeforeValidator(_take_numbers)]


def _sentence(section: str, model: type[BaseModel], error: ValidationError) -> str:
    """Say the first validation error in one sentence: field, value, what is allowed."""
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in ([section] if section else []) + list(first["loc"]))
    if first["type"] == "extra_forbidden":
        allowed = ", ".join(model.model_fields)
        place = f"[{section}]" if section else "an experiment"
        question = did_you_mean(str(first["loc"][-1]), model.model_fields)
        return f"{field} is not a setting; {place} has {allowed}{question}."
    wanted = first["msg"].removeprefix("Input should be ").replace("a finite number", "finite")
    return f"{field} is {first['input']!r}; it must be {wanted}."
