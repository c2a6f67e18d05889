"""The settings of methods: a section of each method that has any.

They are plain classes in a module without torch, so that help and errors appear at once. A class
from outside the package declares its own section when it is imported; until then an experiment
holds that section as a plain table.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment.names import is_built_in
from mpfedcl.experiment.settings import Settings

_declared: dict[str, type[Settings]] = {}
"""The settings of classes from outside by method; `Settings` if a class has none."""


def built_in_sections() -> dict[str, type[Settings]]:
    """Return the sections of the built-in methods by name, sorted."""
    here = [each for each in Settings.__subclasses__() if each.__module__ == __name__]
    return {each.section: each for each in sorted(here, key=lambda each: each.section)}


def declare(method: str, kind: type[Settings]) -> None:
    """Make the settings of a class from outside known to this process."""
    others = {name: theirs for name, theirs in _declared.items() if name != method}
    for name, theirs in others.items():
        if kind.section and theirs.section == kind.section and theirs is not kind:
            raise InvalidInput(
                f"method is {method!r}, whose settings have the section {kind.section!r}; that is "
                f"the section of {name} already, and it must have one of its own."
            )
    _declared[method] = kind


def find_section(name: str) -> type[Settings] | None:
    """Return a method's section by name, where it is known."""
    outside = {kind.section: kind for kind in _declared.values()}
    return built_in_sections().get(name) or outside.get(name)


def sections_of(method: str) -> dict[str, type[Settings]]:
    """Return the sections that every experiment with a method has."""
    own = _declared.get(method, Settings)
    return {**built_in_sections(), **({own.section: own} if own.section else {})}


def is_declared(method: str) -> bool:
    """Return whether the section of a method is known."""
    return is_built_in(method) or method in _declared


def read_section(name: str, kind: type[Settings], values: Any) -> Settings:
    """Return a section from a table, or from settings of an equal class."""
    if not isinstance(values, dict | Settings):
        raise InvalidInput(f"{name} is {values!r}; it must be a table of settings.")
    return values if type(values) is kind else kind(**dict(values))


# Sections of methods


class AfdSettings(Settings):
    """Adaptive Federated Dropout."""

    section: ClassVar[str] = "afd"
    share: Annotated[float, Field(gt=0, le=1)] = 0.75
    """Share of the units of each hidden layer that a client is sent; 1: the whole model."""
    scores: Literal["common", "client"] = "common"
    """common: all clients have the same part, judged by their mean loss; client: each has scores
    and a part of its own."""


class AsoFedSettings(Settings):
    """ASO-Fed."""

    section: ClassVar[str] = "asofed"
    pull: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the proximal term: pull towards the model that the client was sent."""
    beta: Annotated[float, Field(ge=0, le=1)] = 0.001
    """How much of earlier gradients is left in a step; 0: plain gradient descent."""
    features: bool = False
    """At each arrival let large weights of the first layer grow and small ones shrink."""


class AsyncShareSettings(Settings):
    """async-share."""

    section: ClassVar[str] = "async_share"
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Share of the earlier counts of a client's answers that is kept at each tick."""
    staleness: Annotated[float, Field(ge=0)] = 0.5
    """How much less stale models count: by (staleness + 1)^-power."""


class CmflSettings(Settings):
    """CMFL."""

    section: ClassVar[str] = "cmfl"
    threshold: Annotated[float, Field(ge=0)] = 0.8
    """Share of signs that must agree with the last global update for a client to upload."""
    schedule: Literal["sqrt", "constant"] = "sqrt"
    """sqrt: the threshold is divided by the square root of the round; constant: it stays."""


class DbscanSettings(Settings):
    """Clustering by DBSCAN (dp-fedcl)."""

    section: ClassVar[str] = "dbscan"
    eps: Annotated[float | None, Field(gt=0)] = None
    """Neighborhood radius [default: the knee of each class's neighbor distances]."""
    min_samples: Annotated[int, Field(ge=1)] = 3
    """Images that make a dense neighborhood, the image itself included."""


class DittoSettings(Settings):
    """Ditto."""

    section: ClassVar[str] = "ditto"
    weight: Annotated[float, Field(ge=0)] = 1.0
    """λ, the pull of a personal model towards the global one."""


class FedATSettings(Settings):
    """FedAT."""

    section: ClassVar[str] = "fedat"
    tiers: Annotated[int, Field(ge=1, le=1000)] = 5
    """Number of tiers that clients are sorted into by their speed."""
    pull: Annotated[float, Field(ge=0)] = 0.4
    """Weight of the proximal term: pull towards the model that the client was sent."""
    start: Annotated[int, Field(ge=0)] = 1
    """Rounds that each tier counts as having done at first. With 0 the fast tiers' work does not
    count until the slowest tier has answered."""


class FedAsyncSettings(Settings):
    """FedAsync."""

    section: ClassVar[str] = "fedasync"
    mixing: Annotated[float, Field(ge=0, le=1)] = 0.6
    """Share of a fresh answer in the server's next model."""
    staleness: Literal["constant", "polynomial", "hinge"] = "polynomial"
    """How a stale answer of t versions counts less: not at all, by (t + 1)^-a, or by 1 / (a (t - b)
    + 1) once t is more than b."""
    a: Annotated[float, Field(ge=0)] = 0.5
    """How fast."""
    b: Annotated[float, Field(ge=0)] = 4.0
    """hinge: b, from where on answers count less."""
    pull: Annotated[float, Field(ge=0)] = 0.005
    """Weight of the proximal term: pull towards the model that the client was sent."""


class FedDropoutSettings(Settings):
    """Federated Dropout."""

    section: ClassVar[str] = "fed_dropout"
    share: Annotated[float, Field(gt=0, le=1)] = 0.75
    """Share of the units of each hidden layer that a client is sent; 1: the whole model."""
    fill: Literal["holders", "zero"] = "holders"
    """A number is averaged over the clients that had it (holders), or over all, as if the others
    had not changed it (zero), which makes steps shorter."""
    scale: bool = False
    """Enlarge a part's activations while it trains, as ordinary dropout does, since the whole model
    has more units."""


class FedDynSettings(Settings):
    """FedDyn."""

    section: ClassVar[str] = "feddyn"
    alpha: Annotated[float, Field(gt=0)] = 0.1
    """Weight of the pull towards the global model, by which clients learn their own gradients."""


class FedLCSettings(Settings):
    """FedLC."""

    section: ClassVar[str] = "fedlc"
    tau: Annotated[float, Field(ge=0)] = 1.0
    """Size of the margins."""


class FedMmdSettings(Settings):
    """FedMMD."""

    section: ClassVar[str] = "fedmmd"
    weight: Annotated[float, Field(ge=0)] = 0.1
    """Weight of the discrepancy between the client's outputs and the received model's."""
    form: Literal["mmd", "l2"] = "mmd"
    """mmd: maximum mean discrepancy, the paper's; l2: half the squared distance, which is what the
    authors' published code trains with, at weight 0.01."""
    outputs: Literal["logits", "embeddings"] = "logits"
    """Which of the models' outputs are compared."""


class FedNovaSettings(Settings):
    """FedNova."""

    section: ClassVar[str] = "fednova"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum of the server's steps."""


class FedOptSettings(Settings):
    """FedOpt."""

    section: ClassVar[str] = "fedopt"
    optimizer: Literal["sgd", "adam", "yogi", "adagrad"] = "adam"
    """The server's optimizer; the clients' mean change is its gradient."""
    lr: Annotated[float | None, Field(gt=0)] = None
    """The server's learning rate [default: 1 for sgd, else 0.01]."""
    momentum: Annotated[float | None, Field(ge=0, lt=1)] = None
    """The server's momentum, also called beta1 [default: 0.9, for adagrad 0]."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """adam, yogi: how slowly the squares of changes are forgotten."""
    adaptivity: Annotated[float, Field(gt=0)] = 0.001
    """All but sgd: tau, added to the root of the squares; smaller adapts more."""


class FedPclSettings(Settings):
    """FedPCL."""

    section: ClassVar[str] = "fedpcl"
    temperature: Annotated[float, Field(gt=0)] = 0.07
    """What similarities to the prototypes are divided by."""


class FedPerSettings(Settings):
    """FedPer."""

    section: ClassVar[str] = "fedper"
    layers: Annotated[int, Field(ge=0)] = 1
    """How many of the last layers stay with each client; 1: the classifier alone."""


class FedProcSettings(Settings):
    """FedProc."""

    section: ClassVar[str] = "fedproc"
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """What similarities to the prototypes are divided by."""
    rounds: Annotated[int | None, Field(ge=1)] = None
    """Rounds over which cross-entropy replaces the contrastive loss [default: those of the run when
    it starts; a run resumed with more rounds keeps them]."""


class FedProtoSettings(Settings):
    """FedProto."""

    section: ClassVar[str] = "fedproto"
    weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the pull towards the global prototypes."""


class FedProxSettings(Settings):
    """FedProx."""

    section: ClassVar[str] = "fedprox"
    mu: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the proximal term: pull towards the global model."""


class FedRSSettings(Settings):
    """FedRS."""

    section: ClassVar[str] = "fedrs"
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Scale of the logits of classes that a client lacks; 1 is FedAvg."""


class FedRepSettings(Settings):
    """FedRep."""

    section: ClassVar[str] = "fedrep"
    head_epochs: Annotated[int, Field(ge=0)] = 10
    """Passes over a client's samples for its own classifier, before those for the layers below."""


class MoonSettings(Settings):
    """MOON."""

    section: ClassVar[str] = "moon"
    mu: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the contrastive loss between the global model and the client's own last one."""
    temperature: Annotated[float, Field(gt=0)] = 0.5
    """What the cosines are divided by; smaller is sharper."""


class PFedMeSettings(Settings):
    """pFedMe."""

    section: ClassVar[str] = "pfedme"
    weight: Annotated[float, Field(ge=0)] = 15.0
    """λ, how near a personal model stays; multiplied by the learning rate it should be at most
    1."""
    steps: Annotated[int, Field(ge=1)] = 5
    """K, steps of the personal model on each batch."""
    lr: Annotated[float, Field(gt=0)] = 0.09
    """Learning rate of the personal model."""
    mixing: Annotated[float, Field(ge=0, le=2)] = 1.0
    """β, how far the server goes towards the clients' average."""


class ProtoAttentionSettings(Settings):
    """Prototype attention."""

    section: ClassVar[str] = "proto_attention"
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """What margins are divided by, in units of the mean distance between class means; larger is
    nearer to FedAvg."""
    prefers: Literal["wide", "narrow"] = "wide"
    """Which margins make a client count more."""


class SageflowSettings(Settings):
    """Sageflow."""

    section: ClassVar[str] = "sageflow"
    entropy: Annotated[float, Field(gt=0)] = 1.0
    """Models whose answers to the public images have this entropy or more are left out; in nats, so
    that log(classes) is the largest possible."""
    loss_power: Annotated[float, Field(ge=0)] = 1.0
    """How much less a model counts by its loss on the public images: by loss^-power."""
    age_power: Annotated[float, Field(ge=0)] = 0.5
    """How much less stale models count: by (staleness + 1)^-power."""
    mixing: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the arrived models in the server's next model."""
    warm_up: Annotated[int, Field(ge=0)] = 10
    """Ticks at the beginning in which no model is left out: the first ones are all uncertain."""


class ScaffoldSettings(Settings):
    """SCAFFOLD."""

    section: ClassVar[str] = "scaffold"
    server_lr: Annotated[float, Field(gt=0)] = 1.0
    """Length of the server's step towards the average of the clients' models."""
