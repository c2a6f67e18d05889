"""An experiment as Flower's run configuration: plain values by name; an empty text is left open."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpfedcl.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.settings import Settings

OWN_KEYS = ("experiment", "out", "resume", "status")
"""experiment: a whole TOML document, which the other settings then change; out, resume: the run
directory on the server; status: a file that says what is being done."""


@dataclass(frozen=True)
class RunRequest:
    """What a run configuration requests."""

    experiment: Experiment
    rounds: int | None
    """Only where it was given, for a run that is resumed."""
    out: Path | None
    resume: Path | None
    status: Path | None


def setting_keys() -> list[str]:
    """Return the names of all settings as keys: method, rounds, train.lr and so on."""
    keys = []
    for name, field in Experiment.model_fields.items():
        if isinstance(field.default, Settings):
            keys += [f"{name}.{inner}" for inner in type(field.default).model_fields]
        else:
            keys.append(name)
    return keys


def parse_run_config(config: Mapping[str, Any]) -> RunRequest:
    """Read a run configuration; unknown names and bad values get one sentence."""
    known = {*setting_keys(), *OWN_KEYS}
    for key in config:
        if key not in known:
            raise InvalidInput(
                f"{key} is not a setting; the settings are {', '.join(sorted(known))}."
            )
    given = {key: value for key, value in config.items() if value != ""}
    base = Experiment()
    if "experiment" in given:
        base = Experiment.parse_toml(str(given["experiment"]), Path("experiment"))
    changes = {
        key.replace(".", "__"): _parse(key, value)
        for key, value in given.items()
        if key not in OWN_KEYS
    }
    paths = {key: Path(str(given[key])) if key in given else None for key in OWN_KEYS[1:]}
    experiment = base.replace(**changes)
    return RunRequest(experiment, experiment.rounds if "rounds" in changes else None, **paths)


def _parse(key: str, value: Any) -> Any:
    """Return a value as an experiment has it: Flower knows neither lists nor tables."""
    like = Experiment().setting(key.replace(".", "__"))
    if isinstance(like, tuple) and isinstance(value, str):
        return tuple(value.split())
    if isinstance(like, dict) and isinstance(value, str):
        pairs = [pair.partition("=") for pair in value.split()]
        return {name: text for name, _, text in pairs}
    return value
