"""An experiment as data: every setting of a run, validated, with TOML in and out.

This module imports no torch, so the command line can check its input and teach before it loads it.
"""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import Field

from mpfedcl.errors import InvalidInput
from mpfedcl.experiment.datasets import specification
from mpfedcl.experiment.settings import (
    ContrastSettings,
    DatasetSettings,
    DbscanSettings,
    EncoderSettings,
    FedProtoSettings,
    FedProxSettings,
    GuardSettings,
    NetworkSettings,
    OpenInt,
    OpenPath,
    PartitionSettings,
    PrototypeSettings,
    Settings,
    TrainSettings,
)

FORMAT = 1
"""The version of the run directory's files; a newer one is refused, an older one is read."""
INDIFFERENT: Mapping[str, Any] = {
    "engine": "auto",
    "workers": 1,
    "track": (),
    "track_to": None,
    "trail": True,
}
"""Settings that make no difference to a result, at their defaults: where clients are run and who
looks on. A run may be gone on with under others."""


class Experiment(Settings):
    """All settings of a run."""

    method: str = "mp-fedcl"
    """Method; `mpfedcl methods` names them all, and package.module:Class brings your own."""
    rounds: Annotated[int, Field(ge=1)] = 60
    """Rounds of training."""
    clients: Annotated[int | None, Field(ge=1), OpenInt] = None
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
    """Where tensors live: cpu, cuda, cuda:1."""
    dtype: Literal["float32", "float64"] = "float32"
    """Precision of the arithmetic."""
    engine: Literal["auto", "loop", "stacked"] = "auto"
    """How clients are run: one after the other, or many at once; auto takes what is faster."""
    workers: Annotated[int, Field(ge=1, le=4096)] = 1
    """Processes that share the clients, on this machine; with torchrun it says how many."""
    evaluate_every: Annotated[int, Field(ge=1)] = 1
    """Rounds between two evaluations; the last round is always evaluated."""
    evaluate_clients: Annotated[int | None, Field(ge=1), OpenInt] = None
    """Personal models are read of so many clients, drawn in each evaluated round [default: of all];
    with thousands of clients all of them take longer than the training."""
    personal_models: bool = True
    """Write each client's own model at the end; a thousand clients' take gigabytes."""
    trail: bool = True
    """Keep the prototypes of up to 33 rounds, for the moving map of `mpfedcl watch`."""
    diagnostics: tuple[Literal["convergence"], ...] = ()
    """Measure more: convergence holds rounds to the paper's bounds, at several times the cost."""
    track: tuple[str, ...] = ()
    """Tell trackers of each round: tensorboard, mlflow, or package.module:Class for your own."""
    track_to: Annotated[Path | None, OpenPath] = None
    """Folder for what trackers write, which runs may share [default: the run's own folder]."""
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
    network: NetworkSettings = NetworkSettings()
    options: dict[str, str] = Field(default_factory=dict)
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

    def reads(self, round_number: int) -> bool:
        """Tell whether a round's models are read."""
        return round_number == self.rounds or round_number % self.evaluate_every == 0

    def setting(self, name: str) -> Any:
        """Return a setting by name; `partition__alpha` reaches into a section."""
        section, _, field = name.rpartition("__")
        if section == "options":
            return self.options.get(field)
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
