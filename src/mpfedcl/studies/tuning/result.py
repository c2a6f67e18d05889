"""What a search found, as it is written down."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.files import FORMAT, write_atomically
from mpfedcl.experiment import Experiment
from mpfedcl.runs.directory import RunDirectory
from mpfedcl.studies.tuning.grid import Knobs, KnobValues
from mpfedcl.studies.tuning.halving import Rung

FILE = "tuning.json"


@dataclass(frozen=True)
class Trial:
    """One of the settings tried, and how it did."""

    number: int
    """0 are the defaults."""
    values: KnobValues
    changes: KnobValues
    """The search_space whose values are not the defaults."""
    scores: dict[int, float | None]
    """Validation accuracy in % by round, as far as it was run."""
    stopped_after: int | None
    """The round after which it was dropped; None where it was run to the end."""
    runs: list[str]
    """The folders of its runs, one per seed."""


@dataclass(frozen=True)
class TuningResult:
    """The whole search for one method's settings."""

    method: str
    predictor: str
    base: Experiment
    """What was searched around; test images and all, as it is run in the end."""
    search_space_used: Knobs
    budget: int
    seeds: list[int]
    validation: float
    tolerance: float
    rungs: list[Rung]
    trials: list[Trial]
    chosen: int
    within: list[int]
    """The settings whose score is within `tolerance` standard errors of the best."""
    standard_error: float | None
    """Of the best score, in % points."""
    rounds_run: int
    seconds: float

    @property
    def search_space(self) -> KnobValues:
        """The chosen value of each hyperparameter, for `Experiment.replace`."""
        return present_values(self.trials[self.chosen].values)

    @property
    def changes(self) -> KnobValues:
        """The chosen values that are not the defaults."""
        return self.trials[self.chosen].changes

    @property
    def is_fixed(self) -> bool:
        """Whether the method has no search_space: its one setting was run, and nothing chosen."""
        return not self.search_space_used

    @property
    def best(self) -> Experiment:
        """The experiment with the chosen settings, tested on its test images."""
        return self.base.replace(**self.search_space)

    @property
    def score(self) -> float | None:
        """The chosen settings' validation accuracy in the last round, in %."""
        return self.trials[self.chosen].scores[self.rungs[-1].rounds]

    @property
    def default_score(self) -> float | None:
        """The defaults' validation accuracy in the last round, in %."""
        return self.trials[0].scores[self.rungs[-1].rounds]

    def to_json(self) -> dict[str, Any]:
        """Return the search as plain values."""
        content = asdict(self) | {"base": json.loads(self.base.model_dump_json(exclude_none=True))}
        return {"format": FORMAT, **content}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """Return what `to_json` was given."""
        values = {name: value for name, value in content.items() if name != "format"}
        values["base"] = Experiment(**values["base"])
        values["rungs"] = [Rung(**rung) for rung in values["rungs"]]
        values["search_space_used"] = {k: tuple(v) for k, v in values["search_space_used"].items()}
        values["trials"] = [
            Trial(**trial | {"scores": {int(k): v for k, v in trial["scores"].items()}})
            for trial in values["trials"]
        ]
        return cls(**values)

    def write(self, folder: Path) -> None:
        """Write tuning.json, and the chosen settings as a file that `mpfedcl run` takes."""
        RunDirectory(folder).write_json(FILE, self.to_json())
        self.write_best(folder)

    def write_best(self, folder: Path) -> None:
        """Write the chosen settings as a file that `mpfedcl run` and `mpfedcl compare` take."""
        name = f"best-{self.method.replace(':', '.')}.toml"
        write_atomically(folder / name, self.best.to_toml().encode())


def load_tuning(folder: Path) -> TuningResult | None:
    """Return what a search in this folder found, or None where it is not complete."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        return TuningResult.from_json(json.loads(path.read_bytes()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidInput(
            f"{path} cannot be read ({type(error).__name__}: {error}); remove it, and the same "
            "command writes it again from the runs."
        ) from None


def describe_changes(changes: KnobValues) -> list[str]:
    """Return what differs from the defaults in short, one text per hyperparameter."""
    return [f"{name.rpartition('__')[2]} {value}" for name, value in changes.items()]


def present_values(values: KnobValues) -> KnobValues:
    """Return the values without options of a user's method that are not given at all."""
    return {
        name: value
        for name, value in values.items()
        if value is not None or not name.startswith("options__")
    }
