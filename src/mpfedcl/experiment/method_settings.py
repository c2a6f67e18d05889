"""The sections of settings of methods.

Nothing here imports torch, so that help and errors appear at once. A custom method declares its
section when it is imported; until then an experiment holds the section as a plain table.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment.names import is_built_in
from mpfedcl.experiment.settings import Settings

_declared: dict[str, type[Settings]] = {}
"""The settings of custom methods by method; `Settings` if a class has none."""


def built_in_sections() -> dict[str, type[Settings]]:
    """Return the sections of the built-in methods by name, sorted."""
    here = [each for each in Settings.__subclasses__() if each.__module__ == __name__]
    return {each.section: each for each in sorted(here, key=lambda each: each.section)}


def declare(method: str, kind: type[Settings]) -> None:
    """Register the settings of a custom method in this process."""
    others = {name: theirs for name, theirs in _declared.items() if name != method}
    for name, theirs in others.items():
        if kind.section and theirs.section == kind.section and theirs is not kind:
            raise InvalidInput(
                f"method is {method!r}, whose settings have the section {kind.section!r}; it must "
                f"be another one, because {name} has this section already."
            )
    _declared[method] = kind


def find_section(name: str) -> type[Settings] | None:
    """Return the section of a method by name, or None if it is unknown."""
    outside = {kind.section: kind for kind in _declared.values()}
    return built_in_sections().get(name) or outside.get(name)


def sections_of(method: str) -> dict[str, type[Settings]]:
    """Return the sections of an experiment with a method."""
    own = _declared.get(method, Settings)
    return {**built_in_sections(), **({own.section: own} if own.section else {})}


def is_declared(method: str) -> bool:
    """Return whether the section of a method is known."""
    return is_built_in(method) or method in _declared


def read_section(name: str, kind: type[Settings], values: Any) -> Settings:
    """Return a section, given as a table or as settings of an equal class."""
    if not isinstance(values, dict | Settings):
        raise InvalidInput(f"{name} is {values!r}; it must be a table of settings.")
    return values if type(values) is kind else kind(**dict(values))


# Sections of methods


class AfdSettings(Settings):
    """Adaptive Federated Dropout."""

    share: Annotated[float, Field(gt=0, le=1)] = 0.75
    """Fraction of the units of each hidden layer that a client receives; 1: the whole model."""
    scores: Literal["common", "client"] = "common"
    """common: all receive the same submodel, scored by their mean loss; client: each its own."""


class AsoFedSettings(Settings):
    """ASO-Fed."""

    pull: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the proximal term, which pulls towards the model that the client received."""
    beta: Annotated[float, Field(ge=0, le=1)] = 0.001
    """Weight of earlier gradients in a step; 0: plain gradient descent."""
    features: bool = False
    """Rescale the first layer at each arrival: large weights grow, small ones shrink."""


class AsyncShareSettings(Settings):
    """async-share."""

    section: ClassVar[str] = "async_share"
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Factor on the earlier update counts of a client at each tick."""
    staleness: Annotated[float, Field(ge=0)] = 0.5
    """Exponent a of the weight (staleness + 1)^-a of a stale model."""


class CmflSettings(Settings):
    """CMFL."""

    threshold: Annotated[float, Field(ge=0)] = 0.8
    """Fraction of signs that must agree with the last global update for a client to upload."""
    schedule: Literal["sqrt", "constant"] = "sqrt"
    """sqrt: the threshold is divided by the square root of the round; constant: it stays."""


class DbscanSettings(Settings):
    """DBSCAN clustering (dp-fedcl)."""

    eps: Annotated[float | None, Field(gt=0)] = None
    """Neighborhood radius [default: the knee of the neighbor distances of each class]."""
    min_samples: Annotated[int, Field(ge=1)] = 3
    """Number of images in a dense neighborhood, including the image itself."""


class DittoSettings(Settings):
    """Ditto."""

    weight: Annotated[float, Field(ge=0)] = 1.0
    """λ, weight of the term that pulls a personalized model towards the global model."""


class FedATSettings(Settings):
    """FedAT."""

    tiers: Annotated[int, Field(ge=1, le=1000)] = 5
    """Number of tiers of clients by speed."""
    pull: Annotated[float, Field(ge=0)] = 0.4
    """Weight of the proximal term, which pulls towards the model that the client received."""
    start: Annotated[int, Field(ge=0)] = 1
    """Initial update count of a tier. With 0, fast tiers have no weight until all have replied."""


class FedAsyncSettings(Settings):
    """FedAsync."""

    mixing: Annotated[float, Field(ge=0, le=1)] = 0.6
    """Weight of a fresh update in the server's next model."""
    staleness: Literal["constant", "polynomial", "hinge"] = "polynomial"
    """Weight of an update that is t versions old: 1 (constant), (t + 1)^-a (polynomial), or 1 / (a
    (t - b) + 1) for t above b (hinge)."""
    a: Annotated[float, Field(ge=0)] = 0.5
    """Decay exponent or slope a of the staleness function."""
    b: Annotated[float, Field(ge=0)] = 4.0
    """hinge: staleness b above which updates lose weight."""
    pull: Annotated[float, Field(ge=0)] = 0.005
    """Weight of the proximal term, which pulls towards the model that the client received."""


class FedDropoutSettings(Settings):
    """Federated Dropout."""

    section: ClassVar[str] = "fed_dropout"
    share: Annotated[float, Field(gt=0, le=1)] = 0.75
    """Fraction of the units of each hidden layer that a client receives; 1: the whole model."""
    fill: Literal["holders", "zero"] = "holders"
    """holders: average each parameter over the clients that trained it; zero: over all clients, as
    if the others had not changed it, which makes steps smaller."""
    scale: bool = False
    """Scale up the activations of a submodel in training, as ordinary dropout does."""


class FedDynSettings(Settings):
    """FedDyn."""

    alpha: Annotated[float, Field(gt=0)] = 0.1
    """Weight of the dynamic regularizer, which pulls towards the global model."""


class FedLCSettings(Settings):
    """FedLC."""

    tau: Annotated[float, Field(ge=0)] = 1.0
    """Size of the calibration margins of the logits."""


class FedMmdSettings(Settings):
    """FedMMD."""

    weight: Annotated[float, Field(ge=0)] = 0.1
    """Weight of the discrepancy between outputs of the local and the received model."""
    form: Literal["mmd", "l2"] = "mmd"
    """mmd: as in the paper; l2: half the squared distance, as in the authors' code, which sets the
    weight to 0.01."""
    outputs: Literal["logits", "embeddings"] = "logits"
    """Outputs of the models that are compared."""


class FedNHSettings(Settings):
    """FedNH."""

    smoothing: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Weight of the earlier class prototypes in the new ones; 1: they never change."""
    scale: Annotated[float, Field(gt=0)] = 20.0
    """Factor s on the cosine similarities in the loss."""


class FedNovaSettings(Settings):
    """FedNova."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum of the server."""


class FedOptSettings(Settings):
    """FedOpt."""

    optimizer: Literal["sgd", "adam", "yogi", "adagrad"] = "adam"
    """Optimizer of the server; the mean change of the clients is its gradient."""
    lr: Annotated[float | None, Field(gt=0)] = None
    """Learning rate of the server [default: 1 for sgd, otherwise 0.01]."""
    momentum: Annotated[float | None, Field(ge=0, lt=1)] = None
    """Momentum (beta1) of the server [default: 0.9; 0 for adagrad]."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """adam, yogi: decay rate of the squared changes."""
    adaptivity: Annotated[float, Field(gt=0)] = 0.001
    """All but sgd: tau, added to the root of the squared changes; smaller values adapt more."""


class FedPclSettings(Settings):
    """FedPCL."""

    temperature: Annotated[float, Field(gt=0)] = 0.07
    """Temperature of the similarities to the prototypes."""


class FedPerSettings(Settings):
    """FedPer."""

    layers: Annotated[int, Field(ge=0)] = 1
    """Number of last layers that stay with each client; 1: only the classifier."""


class FedPlvmSettings(Settings):
    """FedPLVM."""

    weight: Annotated[float, Field(ge=0)] = 1.0
    """λ, weight of both prototype losses; the authors' code has 100."""
    alpha: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Exponent of the cosine similarities; smaller values make the similarities sparser."""
    temperature: Annotated[float, Field(gt=0)] = 0.07
    """Temperature of the powers of the similarities."""


class FedProcSettings(Settings):
    """FedProc."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of the similarities to the prototypes."""
    rounds: Annotated[int | None, Field(ge=1)] = None
    """Rounds over which cross-entropy replaces the contrastive loss [default: the rounds of the run
    at its start; a run resumed with more rounds keeps the value]."""


class FedProtoSettings(Settings):
    """FedProto."""

    weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the term that pulls embeddings towards the global prototypes."""


class FedProxSettings(Settings):
    """FedProx."""

    mu: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the proximal term, which pulls towards the global model."""


class FedRSSettings(Settings):
    """FedRS."""

    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Factor on the logits of classes that a client lacks; 1 is FedAvg."""


class FedRepSettings(Settings):
    """FedRep."""

    head_epochs: Annotated[int, Field(ge=0)] = 10
    """Epochs of training of a client's classifier, before those of the layers below."""


class FedTgpSettings(Settings):
    """FedTGP."""

    weight: Annotated[float, Field(ge=0)] = 10.0
    """λ, weight of the term that pulls embeddings towards the trained prototypes."""
    margin: Annotated[float, Field(ge=0)] = 100.0
    """Largest margin; the margin is the largest distance of a class mean to the nearest other."""
    epochs: Annotated[int, Field(ge=1)] = 100
    """Epochs over the clients' prototypes in which the server trains its own."""
    lr: Annotated[float, Field(gt=0)] = 0.01
    """Learning rate of the server."""


class FplSettings(Settings):
    """FPL."""

    temperature: Annotated[float, Field(gt=0)] = 0.02
    """Temperature of the cosine similarities to the cluster prototypes."""
    weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of both prototype losses."""


class MoonSettings(Settings):
    """MOON."""

    mu: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the contrastive loss between the global model and the client's previous model."""
    temperature: Annotated[float, Field(gt=0)] = 0.5
    """Temperature of the cosine similarities; smaller values are sharper."""


class PFedMeSettings(Settings):
    """pFedMe."""

    weight: Annotated[float, Field(ge=0)] = 15.0
    """λ, pull towards the local model; λ times the learning rate should be at most 1."""
    steps: Annotated[int, Field(ge=1)] = 5
    """K, steps of the personalized model on each batch."""
    lr: Annotated[float, Field(gt=0)] = 0.09
    """Learning rate of the personalized model."""
    mixing: Annotated[float, Field(ge=0, le=2)] = 1.0
    """β, weight of the clients' average in the server's next model."""


class ProtoAttentionSettings(Settings):
    """Prototype attention."""

    section: ClassVar[str] = "proto_attention"
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of the margins, in mean distances between class means; large: as FedAvg."""
    prefers: Literal["wide", "narrow"] = "wide"
    """Which margins give a client more weight."""


class SageflowSettings(Settings):
    """Sageflow."""

    entropy: Annotated[float, Field(gt=0)] = 1.0
    """Models of this mean entropy (in nats) or more on the public images are excluded."""
    loss_power: Annotated[float, Field(ge=0)] = 1.0
    """Exponent p of the weight loss^-p of a model, by its loss on the public images."""
    age_power: Annotated[float, Field(ge=0)] = 0.5
    """Exponent p of the weight (staleness + 1)^-p of a stale model."""
    mixing: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Weight of the arrived models in the server's next model."""
    warm_up: Annotated[int, Field(ge=0)] = 10
    """Number of first ticks in which no model is excluded."""


class ScaffoldSettings(Settings):
    """SCAFFOLD."""

    server_lr: Annotated[float, Field(gt=0)] = 1.0
    """Learning rate of the server towards the average of the clients' models."""
