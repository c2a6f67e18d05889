"""An experiment as data: every setting of a run, validated, with TOML in and out.

This module imports no torch, so the command line checks its input and shows help at once.
"""

import json
import tomllib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import ConfigDict, Field

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import FORMAT, check_format, read_bounded
from mpfedcl.experiment.data_folder import has_weights, holds_vectors
from mpfedcl.experiment.datasets import DatasetSpecification, find_specification
from mpfedcl.experiment.method_settings import (
    built_in_sections,
    find_section,
    is_declared,
    read_section,
    sections_of,
)
from mpfedcl.experiment.names import METHODS, check_method_name, did_you_mean_setting
from mpfedcl.experiment.settings import (
    AggregationSettings,
    ContrastSettings,
    DatasetSettings,
    EncoderSettings,
    EvaluateEvery,
    ModelSettings,
    NetworkSettings,
    OptionValues,
    PartitionSettings,
    PrivacySettings,
    PrototypeSettings,
    PublicSettings,
    SecureSettings,
    Settings,
    StatisticsSettings,
    SystemsSettings,
    TrainSettings,
    UpdateSettings,
    ValidationSettings,
    Workers,
)

PIXELS_PER_SIDE = 32
"""Of one's own pictures without an encoder."""
_FIXED_BY_METHOD = ("rounds", "model__name", "model__norm")


RESULT_NEUTRAL_SETTINGS: Mapping[str, Any] = {
    "engine": "auto",
    "workers": "auto",
    "worker_timeout": 1800.0,
    "track": (),
    "track_to": None,
}
"""Settings that do not change the result, at their defaults: where clients train, and what is
recorded beside the result. A run may be resumed with others."""
CHOSEN_BY_A_RUN: Mapping[str, Any] = {
    "workers": "auto",
    "evaluate_every": "auto",
    "evaluate_clients": None,
}
"""What leaves the choice to a run, which writes down what it chose."""


class Experiment(Settings):
    """All settings of a run, checked when it is made; it cannot be changed afterwards.

    Settings are keyword arguments, those of a section as a table: `partition={"alpha": 0.1}`. Each
    is explained below its name, and by `mpfedcl run --help`. What is left out has a default, or
    stays open (None) until `resolved` fills it in. A bad value is refused by an `InvalidInput`
    that names the setting, the value and what is allowed.

    Methods bring sections of their own, `fedprox={"mu": 0.1}`. That of a class from outside is a
    plain table until the class is imported, so that whoever reads a run need not run its code.

    Example:
        >>> from mpfedcl import Experiment
        >>> experiment = Experiment(method="fedavg", partition={"alpha": 0.1})
        >>> experiment.rounds, experiment.clients
        (60, None)
        >>> longer = experiment.replace(rounds=100, partition__alpha=0.5)
        >>> longer.rounds, longer.partition.alpha, longer.resolved().clients
        (100, 0.5, 5)
    """

    model_config = ConfigDict(extra="allow")

    method: str = "mp-fedcl"
    """Method; `mpfedcl methods` names them all, and package.module:Class brings your own."""
    rounds: Annotated[int, Field(ge=1)] = 60
    """Rounds of training."""
    clients: Annotated[int | None, Field(ge=1)] = None
    """Clients [default: the data set's; mnist 5; under feature skew one per domain]."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the clients that train per round, drawn at random each round."""
    min_clients: Annotated[int, Field(ge=1)] = 1
    """At least this many clients train per round."""
    share_model: bool = True
    """FedCL family: average the models (else only prototypes are sent)."""
    secure_aggregation: bool = False
    """Let the server see only sums over clients, never a single client's update."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Fixes data split, initial weights, batches and clustering."""
    device: str = "cpu"
    """Device to compute on: cpu, cuda, cuda:1."""
    dtype: Literal["float32", "float64"] = "float32"
    """Precision of the arithmetic."""
    engine: Literal["auto", "loop", "stacked", "factored"] = "auto"
    """How clients are trained: loop, one after the other; stacked or factored, many at once; auto
    chooses by the number of clients and samples."""
    workers: Workers = "auto"
    """Processes that share the clients, at most one per core and client; auto: one per core if the
    run is long enough to gain."""
    worker_timeout: Annotated[float, Field(ge=10, le=86_400)] = 1800.0
    """Seconds that a process of the run waits for another one before the run ends, resumable."""
    evaluate_every: EvaluateEvery = "auto"
    """Rounds between two evaluations; auto: so many that they take about a fifth of the run, at
    most. The last round is always evaluated."""
    evaluate_predictors: Literal["judged", "all"] = "judged"
    """What rounds before the last one read: only what the method is judged by, or everything."""
    evaluate_clients: Annotated[int | None, Field(ge=1)] = None
    """Evaluate the personal models of only this many clients, drawn in each evaluated round
    [default: all; of more than 1,000 clients 10 to 100, by what they cost]."""
    personal_models: bool = True
    """Write each client's personal model at the end; a thousand of them take gigabytes."""
    most_personal_models: Annotated[int, Field(ge=1)] = 1000
    """Write at most so many of them, those of the first clients by name."""
    track: tuple[str, ...] = ()
    """Report each round to trackers: tensorboard, mlflow, or package.module:Class for your own."""
    track_to: Path | None = None
    """Folder for what trackers write, which runs may share [default: the run's own folder]."""
    dataset: DatasetSettings = DatasetSettings()
    partition: PartitionSettings = PartitionSettings()
    train: TrainSettings = TrainSettings()
    prototypes: PrototypeSettings = PrototypeSettings()
    contrast: ContrastSettings = ContrastSettings()
    aggregation: AggregationSettings = AggregationSettings()
    update: UpdateSettings = UpdateSettings()
    validation: ValidationSettings = ValidationSettings()
    encoder: EncoderSettings = EncoderSettings()
    model: ModelSettings = ModelSettings()
    statistics: StatisticsSettings = StatisticsSettings()
    privacy: PrivacySettings = PrivacySettings()
    network: NetworkSettings = NetworkSettings()
    secure: SecureSettings = SecureSettings()
    systems: SystemsSettings = SystemsSettings()
    public: PublicSettings = PublicSettings()
    options: OptionValues = Field(default_factory=dict)
    """What your own method or tracker reads: `--options beta 0.5`, or a table [options]."""

    def __init__(self, **values: Any) -> None:
        fields = type(self).model_fields
        method = str(values.get("method", fields["method"].default))
        check_method_name(method)
        expected = sections_of(method)
        sections: dict[str, Any] = {}
        # Sorted, so that equal experiments are equal documents.
        for name in sorted({*expected, *values} - fields.keys()):
            if kind := expected.get(name) or find_section(name):
                sections[name] = read_section(name, kind, values.pop(name, {}))
            elif is_declared(method) or not isinstance(values[name], dict):
                allowed = ", ".join([*fields, *expected])
                known = [each for each, _ in Experiment().flattened()]
                raise InvalidInput(
                    f"{name} is not a setting; an experiment has {allowed}"
                    f"{did_you_mean_setting(name, known)}."
                )
            else:
                sections[name] = values.pop(name)
        super().__init__(**values, **sections)

    def __reduce__(self) -> tuple[Any, ...]:
        # As plain values: the classes of methods' sections are made anew by each process.
        return partial(type(self), **self.model_dump()), ()

    def replace(self, **changes: Any) -> Self:
        """Return a new experiment with changes; `partition__alpha=0.1` reaches into a section."""
        values = self.model_dump()
        if "method" in changes and is_declared(method := str(changes["method"])):
            # The section of another class from outside says nothing to this method.
            own = {*type(self).model_fields, *sections_of(method)}
            values = {name: value for name, value in values.items() if name in own}
        for name, value in changes.items():
            section, _, field = name.rpartition("__")
            table = values.setdefault(section, {}) if section else values
            if not isinstance(table, dict):
                raise InvalidInput(
                    f"{section}.{field} is not a setting; {section} is not a section."
                )
            table[field] = value
        return type(self)(**values)

    def resolved(self, method_defaults: Mapping[str, Any] = MappingProxyType({})) -> Self:
        """Return a new experiment with what was left open filled in.

        First by the method's own defaults, then by the data set's. An encoder that a method brings
        along is for images that the data set would give it as pixels.
        """
        spec = find_specification(self.dataset.name)
        defaults = {
            "dataset__test_fraction": 0.5,
            "prototypes__padding": "fill" if self.prototypes.per_class == "auto" else "all",
            "model__name": "mlp",
            "systems__kind": "none",
            "public__size": 0,
            **spec.protocol(self.partition.kind),
            **method_defaults,
        }
        if self.lacks_encoder:
            # Photos as they are would make a model of gigabytes.
            defaults["dataset__image_size"] = PIXELS_PER_SIDE
        encoder = self._default_encoder(spec, method_defaults)
        defaults["encoder__name"] = encoder
        if (self.encoder.name or encoder) != "none":
            # Convolutions are for images, and what an encoder gives is none.
            defaults["model__name"] = "mlp"
        filled = {
            name: value(self) if callable(value) else value
            for name, value in defaults.items()
            if self.setting(name) in (None, ())
        }
        # A one-shot method has one round and its own model, whatever is asked for.
        filled |= {n: value for n, value in method_defaults.items() if n in _FIXED_BY_METHOD}
        found = self.replace(**{"method": self.method, **filled})
        found._check_model(spec)
        return found

    def _check_model(self, spec: DatasetSpecification) -> None:
        """Refuse a network that does not fit what it would be given, as far as settings tell."""
        name, encoder = self.model.name, self.encoder.name
        if name == "cnn" and not spec.holds_images:
            raise InvalidInput(
                f"model.name is 'cnn', which takes images; for dataset.name {spec.name!r} it must "
                "be mlp."
            )
        if name == "cnn" and encoder != "none":
            raise InvalidInput(
                f"model.name is 'cnn', which takes images as they are; behind encoder.name "
                f"{encoder!r} it must be mlp, or encoder.name must be none."
            )
        if name != "cnn" and self.model.norm != "none":
            raise InvalidInput(
                f"model.norm is {self.model.norm!r}; it must be none, because model.name is "
                f"{name!r} and only cnn has such layers."
            )

    def _default_encoder(
        self, spec: DatasetSpecification, method_defaults: Mapping[str, Any]
    ) -> str:
        of_method = method_defaults.get("encoder__name")
        if self.model.name == "cnn" and "model__name" not in method_defaults:
            return "none"
        own: str = spec.protocol(self.partition.kind)["encoder__name"]
        if self._brings_vectors():
            # An encoder is for images; vectors are features already.
            return "none"
        if self.lacks_encoder:
            own = "none"
        gets_pixels = own == "none" and spec.holds_images
        return of_method if of_method and gets_pixels else own

    def _brings_vectors(self) -> bool:
        is_open = self.dataset.name == "folder" and self.encoder.name is None
        root = self.dataset.root if is_open else None
        return root is not None and holds_vectors(root.expanduser(), self.dataset.domains)

    @property
    def lacks_encoder(self) -> bool:
        """Whether one's own pictures are used as pixels because there are no weights for them.

        Only where nothing is said of an encoder: what is asked for is used, or missed.
        """
        asked = self.encoder != EncoderSettings() or self.model.name == "cnn"
        if self.dataset.name != "folder" or self.dataset.root is None or asked:
            return False
        return not self._brings_vectors() and not has_weights(self.dataset)

    def evaluates(self, round_number: int) -> bool:
        """Tell whether the models are evaluated after a round."""
        every = 1 if self.evaluate_every == "auto" else self.evaluate_every
        return round_number == self.rounds or round_number % every == 0

    @property
    def asked_workers(self) -> int:
        """Processes that were asked for; 1 where a run chooses."""
        return 1 if self.workers == "auto" else self.workers

    @property
    def tells_counts(self) -> bool:
        """Whether clients on other machines say how many samples they have of each class."""
        return not self.privacy.has_budget and not self.secure_aggregation

    def setting(self, name: str) -> Any:
        """Return a setting by name; `partition__alpha` reaches into a section."""
        section, _, field = name.rpartition("__")
        values = getattr(self, section) if section else self
        return values.get(field) if isinstance(values, dict) else getattr(values, field)

    def to_toml(self) -> str:
        """Return the experiment as a TOML document that `from_toml` reads back."""
        values = json.loads(self.model_dump_json(exclude_none=True))
        tables = {name: value for name, value in values.items() if isinstance(value, dict)}
        plain = {name: value for name, value in values.items() if name not in tables}
        own = METHODS.get(self.method, "")
        # Settings of other methods are recorded only if they were given.
        for name, kind in built_in_sections().items():
            if name != own and getattr(self, name) == kind():
                tables.pop(name)
        # An empty table, mostly [options], is left out.
        return tomli_w.dumps({"format": FORMAT, **plain, **{k: v for k, v in tables.items() if v}})

    @classmethod
    def from_toml(cls, path: Path, *, complete: bool = False) -> Self:
        """Read an experiment; unknown names, bad values and newer formats are refused.

        A `complete` one, such as a run directory's, says its format and leaves nothing open.
        """
        try:
            # A run directory may come from a stranger; a user's own file may well be a pipe.
            content = read_bounded(path) if complete else path.read_bytes()
            document = content.decode()
        except FileNotFoundError:
            raise InvalidInput(f"{path} does not exist; give a TOML file of settings.") from None
        # A ValueError is a name that no file can have, or no text.
        except (OSError, ValueError) as error:
            raise InvalidInput(f"{path} cannot be read: {error}.") from None
        experiment = cls.parse_toml(document, path)
        if complete and experiment.prototypes.per_class is None:
            raise InvalidInput(
                f"{path} is not complete; it must be as the run wrote it: start the run again in a "
                "new folder."
            )
        return experiment

    @classmethod
    def parse_toml(cls, document: str, path: Path) -> Self:
        """Read an experiment from the text of a TOML document; errors name the path."""
        try:
            values = tomllib.loads(document)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise InvalidInput(f"{path} is not valid TOML: {error}.") from None
        check_format(values.pop("format", FORMAT), path)
        try:
            return cls(**values)
        except InvalidInput as error:
            raise InvalidInput(f"{path}: {error}") from None


def take_choices(asked: Experiment, run: Experiment) -> Experiment:
    """Return an experiment with what it leaves to a run as that run has chosen it."""
    left_open = [n for n, value in CHOSEN_BY_A_RUN.items() if asked.setting(n) == value]
    return asked.replace(**{name: run.setting(name) for name in left_open})
