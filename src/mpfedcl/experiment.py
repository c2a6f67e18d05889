"""An experiment as data: every setting of a run, validated, with TOML in and out.

This module imports no torch, so the command line can check its input and teach before it loads it.
"""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self

import tomli_w
import tyro
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mpfedcl.data.catalogue import specification
from mpfedcl.errors import InvalidInput

FORMAT = 1
"""The version of the run directory's files; a newer one is refused, an older one is read."""

# Settings that a data set or method fills in: the text says by what, so no "(default: None)".
_Int = tyro.conf.arg(metavar="INT", help_behavior_hint="")
_Float = tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")
_Text = tyro.conf.arg(metavar="NAME", help_behavior_hint="")
_Path = tyro.conf.arg(metavar="PATH", help_behavior_hint="")


class Settings(BaseModel):
    """A group of settings: frozen, no unknown names, errors as one sentence."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    section: ClassVar[str] = ""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InvalidInput(_sentence(self.section, type(self), error)) from None


class DatasetSettings(Settings):
    """Which data, and how much of it."""

    section: ClassVar[str] = "dataset"
    name: str = "mnist-sample"
    """Data set; `mpfedcl data list` names them all."""
    root: Annotated[Path | None, _Path] = None
    """Data folder; else $MPFEDCL_DATA, else the cache folder. For `folder`, the set itself."""
    train_size: Annotated[int | None, Field(ge=1), _Int] = None
    """Training images drawn in all [default: the data set's; mnist 2000]."""
    test_fraction: Annotated[float | None, Field(gt=0, lt=1), _Float] = None
    """Share of the images kept for testing where a test set is not given [default: the data
    set's, mostly 0.5]."""
    domains: tuple[str, ...] = ()
    """Only these domains of a set that has several [default: the data set's; all under feature
    skew]."""
    per_class: Annotated[int | None, Field(ge=1), _Int] = None
    """At most so many images of a class: in all, or under feature skew for training in each
    domain [default: the data set's]."""
    test_per_class: Annotated[int | None, Field(ge=1), _Int] = None
    """Feature skew: at most so many test images of a class in each domain [default: the data
    set's]."""
    standardize: bool = True
    """Bring pixels to about mean 0 and deviation 1 by constants of the set; else 0 to 1."""
    image_size: Annotated[int | None, Field(ge=1, le=1024), _Int] = None
    """Resize images to this many pixels a side [default: as they are; 28 where sizes differ]."""


class PartitionSettings(Settings):
    """How the images are dealt out to the clients."""

    section: ClassVar[str] = "partition"
    kind: Literal["label", "feature", "iid", "classes", "quantity"] = "label"
    """label: Dirichlet shares of each class; feature: a domain a client; iid: equal shares at
    random; classes: a few classes each; quantity: Dirichlet shares of the whole."""
    alpha: Annotated[float, Field(gt=0, le=1e6)] = 0.05
    """Dirichlet concentration; smaller is more skewed."""
    balanced: bool = True
    """Label skew: a client that holds its fair share gets none of the next class."""
    min_size: Annotated[int | None, Field(ge=1), _Int] = None
    """Redraw until each client has this many training images [default: the data set's]."""
    test: Annotated[
        Literal["shared", "matched"] | None,
        tyro.conf.arg(metavar="{shared,matched}", help_behavior_hint=""),
    ] = None
    """shared: everyone is tested on the whole test set; matched: each on images dealt out as its
    training images are [default: the data set's]."""
    classes_per_client: Annotated[int, Field(ge=1)] = 2
    """Classes that each client holds under `--partition.kind classes`."""


class TrainSettings(Settings):
    """Local training by stochastic gradient descent."""

    section: ClassVar[str] = "train"
    epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over a client's data each round."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Images a step; the last, smaller batch is kept."""
    lr: Annotated[float, Field(gt=0)] = 0.01
    """Learning rate of the first round."""
    lr_decay: Annotated[float, Field(gt=0, le=1)] = 0.95
    """The learning rate is multiplied by this after each round."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Momentum, fresh each round."""


class PrototypeSettings(Settings):
    """What a client's prototypes are."""

    section: ClassVar[str] = "prototypes"
    per_class: Annotated[int | None, Field(ge=1, le=65_536), _Int] = None
    """K, prototypes a class (mp-fedcl) [default: the data set's; mnist 2]."""
    normalize: bool = True
    """Scale embeddings to length 1 for the loss, for clustering and for distances."""
    padding: Annotated[
        Literal["all", "fill"] | None,
        tyro.conf.arg(metavar="{all,fill}", help_behavior_hint=""),
    ] = None
    """Where a client has fewer than K prototypes of a class: `all` K slots hold the class mean, or
    only the missing ones are filled [default: all; fill for dp-fedcl]."""
    min_cluster_size: Annotated[int, Field(ge=1)] = 1
    """Prototypes that stand for fewer images are never sent."""
    init: Literal["k-means++", "random"] = "k-means++"
    """How k-means starts."""
    pool_ttl: Annotated[int, Field(ge=1)] = 1
    """Broadcasts that a client's prototypes serve; more than 1 matters when clients are sampled."""


class ContrastSettings(Settings):
    """The contrastive loss."""

    section: ClassVar[str] = "contrast"
    form: Literal["slots", "pooled", "literal"] = "slots"
    """slots: the paper's text; pooled: free of slot order; literal: the paper's printed formula,
    here only to show that it hurts."""
    temperature: Annotated[float, Field(gt=0)] = 0.07
    """Smaller looks harder at the nearest wrong class."""
    weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight beside the cross-entropy."""
    sample: Annotated[int | None, Field(ge=1), _Int] = None
    """Large pools: contrast each step with the prototypes of so many clients, drawn anew; the loss
    is right on average [default: with all of them]."""


class FedProxSettings(Settings):
    """FedProx."""

    section: ClassVar[str] = "fedprox"
    mu: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the pull to the global model."""


class FedProtoSettings(Settings):
    """FedProto."""

    section: ClassVar[str] = "fedproto"
    weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the pull to the global prototypes."""


class DbscanSettings(Settings):
    """Clustering by DBSCAN (dp-fedcl)."""

    section: ClassVar[str] = "dbscan"
    eps: Annotated[float | None, Field(gt=0), _Float] = None
    """Neighbourhood radius [default: the knee of each class's neighbour distances]."""
    min_samples: Annotated[int, Field(ge=1)] = 3
    """Images that make a dense neighbourhood, the image itself included."""


class EncoderSettings(Settings):
    """The frozen encoder that turns pictures into features."""

    section: ClassVar[str] = "encoder"
    name: Annotated[str | None, _Text] = None
    """none (pixels as they are), resnet18, onnx:PATH, torchvision:NAME, or random-resnet18
    [default: the data set's; mnist none, others resnet18]."""
    weights: Annotated[Path | None, _Path] = None
    """Weights file; else $MPFEDCL_WEIGHTS, else the folder weights in or beside the data folder."""
    train: bool = False
    """Train the encoder too (resnet18): each client runs the full network."""


class GuardSettings(Settings):
    """What an update from a client may look like."""

    section: ClassVar[str] = "guard"
    max_norm: Annotated[float, Field(gt=0)] = 1e6
    """Largest length of a client's change to the model, and of a prototype."""


class Experiment(Settings):
    """All settings of a run."""

    method: str = "mp-fedcl"
    """Method; `mpfedcl methods` names them all, and package.module:Class brings your own."""
    rounds: Annotated[int, Field(ge=1)] = 60
    """Rounds of training."""
    clients: Annotated[int | None, Field(ge=1), _Int] = None
    """Clients [default: the data set's; mnist 5; under feature skew one a domain]."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the clients that train in a round, drawn anew each round."""
    min_clients: Annotated[int, Field(ge=1)] = 1
    """At least this many clients train in a round."""
    share_model: bool = True
    """FedCL family: average the models (else only prototypes travel)."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Fixes data split, initial weights, batches and clustering."""
    device: str = "cpu"
    """Where tensors live: cpu, cuda, cuda:1, mps."""
    dtype: Literal["float32", "float64"] = "float32"
    """Precision of the arithmetic."""
    engine: Literal["auto", "loop", "stacked"] = "auto"
    """How clients are run: one after the other, or many at once; auto takes what is faster."""
    workers: Annotated[int, Field(ge=1, le=4096)] = 1
    """Processes that share the clients, on this machine; with torchrun it says how many."""
    evaluate_every: Annotated[int, Field(ge=1)] = 1
    """Rounds between two evaluations; the last round is always evaluated."""
    evaluate_clients: Annotated[int | None, Field(ge=1), _Int] = None
    """Personal models are read of so many clients, drawn in each evaluated round [default: of all];
    with thousands of clients all of them take longer than the training."""
    personal_models: bool = True
    """Write each client's own model at the end; a thousand clients' take gigabytes."""
    dataset: DatasetSettings = DatasetSettings()
    partition: PartitionSettings = PartitionSettings()
    train: TrainSettings = TrainSettings()
    prototypes: PrototypeSettings = PrototypeSettings()
    contrast: ContrastSettings = ContrastSettings()
    fedprox: FedProxSettings = FedProxSettings()
    fedproto: FedProtoSettings = FedProtoSettings()
    dbscan: DbscanSettings = DbscanSettings()
    guard: GuardSettings = GuardSettings()
    encoder: EncoderSettings = EncoderSettings()
    options: dict[str, str] = {}
    """Settings of your own method: `--options beta 0.5` or a table [options]."""

    def replace(self, **changes: Any) -> Self:
        """Return a copy with changes; `partition__alpha=0.1` reaches into a section."""
        values = self.model_dump()
        for name, value in changes.items():
            section, _, field = name.rpartition("__")
            (values[section] if section else values)[field] = value
        return type(self)(**values)

    def resolved(self, method_defaults: Mapping[str, Any] = MappingProxyType({})) -> Self:
        """Return the experiment with what was left open filled in.

        First by the method's own defaults, then by the data set's.
        """
        spec = specification(self.dataset.name)
        defaults = {
            "dataset__test_fraction": 0.5,
            "prototypes__padding": "all",
            **spec.protocol(self.partition.kind),
            **method_defaults,
        }
        still_open = {n: value for n, value in defaults.items() if self.setting(n) in (None, ())}
        return self.replace(**still_open)

    def setting(self, name: str) -> Any:
        """Return a setting by name; `partition__alpha` reaches into a section."""
        section, _, field = name.rpartition("__")
        return getattr(getattr(self, section) if section else self, field)

    def to_toml(self) -> str:
        """Return the experiment as a TOML document that `from_toml` reads back."""
        values = json.loads(self.model_dump_json(exclude_none=True))
        tables = {name: value for name, value in values.items() if isinstance(value, dict)}
        plain = {name: value for name, value in values.items() if name not in tables}
        # An empty table ([options], mostly) says nothing; a complete file need not carry it.
        return tomli_w.dumps({"format": FORMAT, **plain, **{k: v for k, v in tables.items() if v}})

    @classmethod
    def from_toml(cls, path: Path, *, complete: bool = False) -> Self:
        """Read an experiment; unknown names, bad values and newer formats are refused.

        A `complete` one, such as a run directory's, says its format and leaves nothing open.
        """
        try:
            document = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise InvalidInput(f"{path} does not exist; give a TOML file of settings.") from None
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"{path} cannot be read: {error}.") from None
        experiment = cls.parse_toml(document, path)
        if complete and experiment.prototypes.per_class is None:
            raise InvalidInput(
                f"{path} is not complete; it must be as the run wrote it: begin the run anew."
            )
        return experiment

    @classmethod
    def parse_toml(cls, document: str, path: Path) -> Self:
        """Read an experiment from the text of a TOML document; errors name the path."""
        try:
            values = tomllib.loads(document)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise InvalidInput(f"{path} is not valid TOML: {error}.") from None
        found = values.pop("format", FORMAT)
        if type(found) is not int or found > FORMAT:
            raise InvalidInput(
                f"{path} has format {found!r}; this mpfedcl reads formats up to {FORMAT}: "
                "a newer version wrote it."
            )
        try:
            return cls(**values)
        except InvalidInput as error:
            raise InvalidInput(f"{path}: {error}") from None


def _sentence(section: str, model: type[BaseModel], error: ValidationError) -> str:
    """Say the first validation error in one sentence: field, value, what is allowed."""
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in ([section] if section else []) + list(first["loc"]))
    if first["type"] == "extra_forbidden":
        allowed = ", ".join(model.model_fields)
        place = f"[{section}]" if section else "an experiment"
        return f"{field} is not a setting; {place} has {allowed}."
    wanted = first["msg"].removeprefix("Input should be ").replace("a finite number", "finite")
    return f"{field} is {first['input']!r}; it must be {wanted}."
