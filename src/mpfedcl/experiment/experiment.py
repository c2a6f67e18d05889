"""An experiment: all settings of a run, validated, read from and written to TOML.

Nothing here imports torch, so that the command line shows help and errors at once.
"""

import json
import re
import tomllib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self

import tomli_w
from pydantic import ConfigDict, Field

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import FORMAT, check_format, read_bounded
from mpfedcl.experiment import settings
from mpfedcl.experiment.data_folder import has_weights, holds_arrays
from mpfedcl.experiment.datasets import DatasetSpecification, find_specification
from mpfedcl.experiment.method_settings import (
    built_in_sections,
    find_section,
    is_declared,
    read_section,
    sections_of,
)
from mpfedcl.experiment.names import (
    IMAGE_MODELS,
    SECTIONS,
    check_method_name,
    check_metric_name,
    describe_unknown_setting,
    did_you_mean,
    did_you_mean_setting,
    name_method_class,
)

PIXELS_PER_SIDE = 32
"""Size of the user's images without an encoder."""
LONGEST_DOCUMENT = 2**22
"""Characters of a TOML document; that of an experiment with 20,000 columns has 500,000."""
_MOST_DOTS = 1000
_QUOTED = re.compile(r"""\"[^\"\n]*\"|'[^'\n]*'""")
_FIXED_BY_METHOD = (
    "rounds",
    "model__name",
    "model__norm",
    "model__embedding",
    "model__train",
    "model__share",
)


RESULT_NEUTRAL_SETTINGS: Mapping[str, Any] = {
    "engine": "auto",
    "workers": "auto",
    "worker_timeout": 1800.0,
    "track": (),
    "track_to": None,
}
"""Settings that do not change the result, with their defaults; a resumed run may change them."""
TUNED_RULE = (
    "tuned is given, so each method has the settings of its file; other settings must be left out, "
    f"except {', '.join(RESULT_NEUTRAL_SETTINGS)}, methods and seeds."
)
"""The error of settings next to those of a tuned method."""
CHOSEN_BY_A_RUN: Mapping[str, Any] = {
    "workers": "auto",
    "evaluate_every": "auto",
    "evaluate_clients": None,
}
"""Values that leave a choice to the run, which records it in experiment.toml."""


class Experiment(settings.Settings):
    """All settings of a run, validated and immutable.

    Settings are keyword arguments, those of a section as a table, `partition={"alpha": 0.1}`, or
    with two underscores, `partition__alpha=0.1`. `mpfedcl run --help` explains them. A setting that
    is left out has a default, or is None until `resolved` sets the default of its method or data
    set. An invalid value raises an `InvalidInput` that names the setting, the value and the allowed
    values.

    Methods have their own sections, `fedprox={"mu": 0.1}`. The section of a custom method is a
    plain table until its class is imported, so that a run can be read without running its code.

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
    section: ClassVar[str] = ""

    method: str = "mp-fedcl"
    """Name of the method, see `mpfedcl methods`, or package.module:Class for a custom one."""
    rounds: Annotated[int, Field(ge=1)] = 60
    """Number of rounds."""
    clients: Annotated[int | None, Field(ge=1)] = None
    """Number of clients [default: the data set's, 5 for mnist; feature skew: one per domain]."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of the clients that train in a round, drawn at random in each round."""
    min_clients: Annotated[int, Field(ge=1)] = 1
    """Minimum number of clients that train in a round."""
    share_model: bool = True
    """FedCL family: average the models; otherwise clients send only prototypes."""
    secure_aggregation: bool = False
    """Use secure aggregation: the server sees only sums over clients, never a single update."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the data split, initial weights, batches and clustering."""
    device: str = "cpu"
    """Device to compute on: cpu, cuda, cuda:1."""
    dtype: Literal["float32", "float64"] = "float32"
    """Floating-point type of training and aggregation."""
    engine: Literal["auto", "loop", "stacked", "factored"] = "auto"
    """loop: train clients one after the other; stacked, factored: train many clients at once; auto:
    choose by the number of clients and samples."""
    workers: settings.Workers = "auto"
    """Number of processes that share the clients, at most one per core and client; auto: one per
    core if the run is long enough to benefit."""
    worker_timeout: Annotated[float, Field(ge=10, le=86_400)] = 1800.0
    """Seconds that a process waits for another one before the run stops; it can be resumed."""
    evaluate_every: settings.EvaluateEvery = "auto"
    """Rounds between two evaluations; auto: chosen so that evaluation takes about a fifth of the
    run. The last round is always evaluated."""
    evaluate_predictors: Literal["primary", "all"] = "primary"
    """Predictors to evaluate before the last round: the primary predictor of the method, or all."""
    evaluate_clients: Annotated[int | None, Field(ge=1)] = None
    """Number of clients, drawn in each evaluated round, whose personalized models are evaluated
    [default: all; with more than 1,000 clients 100]."""
    metric: str = "accuracy"
    """Metric that ranks methods and trials: accuracy, balanced_accuracy, macro_f1, auroc, nll,
    brier, ece, or package.module:function for your own, of (probabilities [n, C], labels [n])."""
    personal_models: bool = True
    """Write the personalized model of each client at the end; a thousand models take gigabytes."""
    most_personal_models: Annotated[int, Field(ge=1)] = 1000
    """Maximum number of personalized models to write: those of the first clients by name."""
    track: tuple[str, ...] = ()
    """Trackers that record each round: tensorboard, mlflow, or a custom package.module:Class."""
    track_to: Path | None = None
    """Folder of the trackers, which runs may share [default: the run directory]."""
    dataset: settings.DatasetSettings = settings.DatasetSettings()
    partition: settings.PartitionSettings = settings.PartitionSettings()
    train: settings.TrainSettings = settings.TrainSettings()
    prototypes: settings.PrototypeSettings = settings.PrototypeSettings()
    contrast: settings.ContrastSettings = settings.ContrastSettings()
    aggregation: settings.AggregationSettings = settings.AggregationSettings()
    update: settings.UpdateSettings = settings.UpdateSettings()
    validation: settings.ValidationSettings = settings.ValidationSettings()
    encoder: settings.EncoderSettings = settings.EncoderSettings()
    model: settings.ModelSettings = settings.ModelSettings()
    statistics: settings.StatisticsSettings = settings.StatisticsSettings()
    privacy: settings.PrivacySettings = settings.PrivacySettings()
    network: settings.NetworkSettings = settings.NetworkSettings()
    secure: settings.SecureSettings = settings.SecureSettings()
    systems: settings.SystemsSettings = settings.SystemsSettings()
    public: settings.PublicSettings = settings.PublicSettings()

    def __init__(self, **values: Any) -> None:
        fields = type(self).model_fields
        values = _change_settings({}, values)
        method = values.get("method", fields["method"].default)
        if isinstance(method, type):
            method = values["method"] = name_method_class(method)
        method = str(method)
        check_method_name(method)
        check_metric_name(str(values.get("metric", fields["metric"].default)))
        expected = sections_of(method)
        sections: dict[str, Any] = {}
        # Sorted, so that equal experiments give equal TOML documents.
        for name in sorted({*expected, *values} - fields.keys()):
            if kind := expected.get(name) or find_section(name):
                sections[name] = read_section(name, kind, values.pop(name, {}))
            elif is_declared(method) or not isinstance(values[name], dict):
                question = _suggest_setting(name, values[name], method)
                everything = "mpfedcl run --help lists all settings."
                raise InvalidInput(describe_unknown_setting(name, question, everything))
            else:
                sections[name] = values.pop(name)
        super().__init__(**values, **sections)

    def __reduce__(self) -> tuple[Any, ...]:
        # As plain values: each process has its own classes of method settings.
        return partial(type(self), **self.model_dump()), ()

    def replace(self, **changes: Any) -> Self:
        """Return a changed copy; `partition__alpha=0.1` changes a setting of a section.

        So does `partition={"alpha": 0.1}`, which keeps the other settings of the section.
        """
        values = self.model_dump()
        if isinstance(changes.get("method"), type):
            changes["method"] = name_method_class(changes["method"])
        if "method" in changes and is_declared(method := str(changes["method"])):
            # The section of another custom method does not apply to this one.
            own = {*type(self).model_fields, *sections_of(method)}
            values = {name: value for name, value in values.items() if name in own}
        return type(self)(**_change_settings(values, changes))

    def resolved(self, method_defaults: Mapping[str, Any] = MappingProxyType({})) -> Self:
        """Return a copy with the defaults of its method and, after these, of its data set.

        The default encoder of a method applies to images that would otherwise be raw pixels.
        """
        spec = find_specification(self.dataset.name)
        if self.dataset.standardize == "client" and self.dataset.name != "table":
            raise InvalidInput(
                "dataset.standardize is 'client'; it must be 'federated' or 'none', because "
                f"dataset.name is {self.dataset.name!r} and only 'table' has columns."
            )
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
            # Photos of full size would need a model of gigabytes.
            defaults["dataset__image_size"] = PIXELS_PER_SIDE
        encoder = self._default_encoder(spec, method_defaults)
        defaults["encoder__name"] = encoder
        if (self.encoder.name or encoder) != "none":
            # The features of an encoder are no images for convolutions.
            defaults["model__name"] = "mlp"
        filled = {
            name: value(self) if callable(value) else value
            for name, value in defaults.items()
            if self.setting(name) in (None, ())
        }
        # A one-shot method always has one round and its own model.
        filled |= {n: value for n, value in method_defaults.items() if n in _FIXED_BY_METHOD}
        found = self.replace(**{"method": self.method, **filled})
        found._check_model(spec)
        return found

    def _check_model(self, spec: DatasetSpecification) -> None:
        """Reject what does not fit the model's inputs, as far as the settings determine them."""
        names, encoder = self.model.names, self.encoder.name
        if self.train.augment != "none" and (encoder != "none" or not spec.holds_images):
            place = f"encoder.name {encoder!r}" if spec.holds_images else f"data set {spec.name!r}"
            raise InvalidInput(
                f"train.augment is {self.train.augment!r}, which takes images; with {place} it "
                "must be none."
            )
        for name in names:
            if name in IMAGE_MODELS and not spec.holds_images:
                raise InvalidInput(
                    f"model.name is {name!r}, which takes images; for dataset.name {spec.name!r} "
                    "it must be mlp, linear or your own."
                )
            if name in IMAGE_MODELS and encoder != "none":
                raise InvalidInput(
                    f"model.name is {name!r}, which takes images; with encoder.name {encoder!r} "
                    "it must be mlp, linear or your own, or encoder.name must be none."
                )
            if self.encoder.train and name != "mlp":
                raise InvalidInput(
                    f"model.name is {name!r}; with encoder.train it must be mlp or left out."
                )

    def _default_encoder(
        self, spec: DatasetSpecification, method_defaults: Mapping[str, Any]
    ) -> str:
        of_method = method_defaults.get("encoder__name")
        if self._takes_samples and "model__name" not in method_defaults:
            return "none"
        own: str = spec.protocol(self.partition.kind)["encoder__name"]
        if self._brings_arrays():
            # Encoders take images.
            return "none"
        if self.lacks_encoder:
            own = "none"
        gets_pixels = own == "none" and spec.holds_images
        return of_method if of_method and gets_pixels else own

    @property
    def _takes_samples(self) -> bool:
        """Whether a model was chosen that takes samples as they are."""
        return not {"mlp", "linear"}.issuperset(self.model.names)

    def _brings_arrays(self) -> bool:
        is_open = self.dataset.name == "folder" and self.encoder.name is None
        root = self.dataset.root if is_open else None
        return root is not None and holds_arrays(root.expanduser(), self.dataset.domains)

    @property
    def lacks_encoder(self) -> bool:
        """Whether the user's images are used as raw pixels, because no encoder weights were found.

        If an encoder is given, missing weights are an error instead.
        """
        asked = self.encoder != settings.EncoderSettings() or self._takes_samples
        root = self.dataset.root
        # A missing folder is an error of its own.
        if self.dataset.name != "folder" or root is None or not root.expanduser().is_dir() or asked:
            return False
        return not self._brings_arrays() and not has_weights(self.dataset)

    def evaluates(self, round_number: int) -> bool:
        """Return whether the models are evaluated after a round."""
        every = 1 if self.evaluate_every == "auto" else self.evaluate_every
        return round_number == self.rounds or round_number % every == 0

    @property
    def asked_workers(self) -> int:
        """The number of processes; 1 if the run chooses it."""
        return 1 if self.workers == "auto" else self.workers

    @property
    def tells_counts(self) -> bool:
        """Whether clients on other machines report their number of samples of each class."""
        return not self.privacy.has_budget and not self.secure_aggregation

    def setting(self, name: str) -> Any:
        """Return a setting by name, such as `partition__alpha`."""
        section, _, field = name.rpartition("__")
        values = getattr(self, section) if section else self
        return values.get(field) if isinstance(values, dict) else getattr(values, field)

    def to_toml(self) -> str:
        """Return the experiment as a TOML document for `from_toml`."""
        values = json.loads(self.model_dump_json(exclude_none=True))
        tables = {name: value for name, value in values.items() if isinstance(value, dict)}
        plain = {name: value for name, value in values.items() if name not in tables}
        own = SECTIONS.get(self.method, self.method.replace("-", "_"))
        # Settings of other methods are recorded only if they were given.
        for name, kind in built_in_sections().items():
            if name != own and getattr(self, name) == kind():
                tables.pop(name)
        return tomli_w.dumps({"format": FORMAT, **plain, **tables})

    @classmethod
    def from_toml(cls, path: Path, *, complete: bool = False) -> Self:
        """Read an experiment; reject unknown names, invalid values and newer formats.

        A `complete` file, as in a run directory, has no open settings.
        """
        try:
            # A run directory may be untrusted; a user's file may be a pipe.
            content = read_bounded(path) if complete else _read_start(path)
            document = content.decode()
        except FileNotFoundError:
            raise InvalidInput(f"{path} does not exist; give a TOML file of settings.") from None
        # A ValueError means an impossible file name, or content that is no text.
        except (OSError, ValueError) as error:
            raise InvalidInput(f"{path} cannot be read: {error}.") from None
        experiment = cls.parse_toml(document, path)
        if complete and experiment.prototypes.per_class is None:
            raise InvalidInput(
                f"{path} is not complete; it must be the file that the run wrote: start the run "
                "again in a new folder."
            )
        return experiment

    @classmethod
    def parse_toml(cls, document: str, path: Path) -> Self:
        """Read an experiment from the text of a TOML document; errors name the path."""
        values = parse_document(document, path)
        check_format(values.pop("format", FORMAT), path)
        try:
            return cls(**values)
        except InvalidInput as error:
            raise InvalidInput(f"{path}: {error}") from None


def _read_start(path: Path) -> bytes:
    """Return the content of a file or pipe, or a beginning that is too long."""
    with path.open("rb") as file:
        return file.read(LONGEST_DOCUMENT + 1)


def parse_document(document: str, path: Path) -> dict[str, Any]:
    """Return the values of a TOML document; reject one that would take the parser minutes.

    A server sends its experiment to clients.
    """
    if len(document) > LONGEST_DOCUMENT:
        raise InvalidInput(f"{path} has more than {LONGEST_DOCUMENT:,} characters.")
    for number, line in enumerate(document.splitlines(), 1):
        # The parser's time grows with the square of the parts of a key, which may be quoted.
        if line.count(".") > _MOST_DOTS and _QUOTED.sub("", line).count(".") > _MOST_DOTS:
            raise InvalidInput(
                f"{path} has a key of more than {_MOST_DOTS:,} parts in line {number}."
            )
    try:
        return tomllib.loads(document)
    # A ValueError also means a number of thousands of digits.
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} is not valid TOML: {error}.") from None


def _change_settings(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Change settings in place, where `train__lr` is one of a section; return them."""
    # Whole sections first: a single setting may be given next to its section.
    for name in sorted(changes, key=lambda each: "__" in each):
        section, _, field = name.rpartition("__")
        table, value = values, changes[name]
        if section:
            table = values.setdefault(section, {})
            if not isinstance(table, dict | settings.Settings):
                raise InvalidInput(
                    f"{section}.{field} is not a setting; {section} is not a section."
                )
            table = values[section] = dict(table)
        before = table.get(field)
        if isinstance(value, dict) and isinstance(before, dict):
            value = before | value
        table[field or name] = value
    return values


def _suggest_setting(name: str, value: Any, method: str) -> str:
    """Return a question that names the setting or section that was probably meant."""
    default = Experiment()
    sections = {n: type(each) for n, each in default if isinstance(each, settings.Settings)}
    sections |= sections_of(method)
    if isinstance(value, dict):
        return did_you_mean(name, sections)
    known = [each for each in Experiment.model_fields if each not in sections]
    known += [f"{each}.{field}" for each, kind in sections.items() for field in kind.model_fields]
    if name in known:
        # As on the command line; in Python a dot is no part of a name.
        section, _, field = name.partition(".")
        return f' (did you mean {section}={{"{field}": {value!r:.60}}} or {section}__{field}?)'
    # The settings of other methods come second.
    others = built_in_sections().keys() - {SECTIONS.get(method, method.replace("-", "_"))}
    applying = [each for each in known if each.partition(".")[0] not in others]
    return did_you_mean_setting(name, applying) or did_you_mean_setting(name, known)


def take_choices(asked: Experiment, run: Experiment) -> Experiment:
    """Return an experiment whose open choices are those that a run has made."""
    left_open = [n for n, value in CHOSEN_BY_A_RUN.items() if asked.setting(n) == value]
    return asked.replace(**{name: run.setting(name) for name in left_open})
