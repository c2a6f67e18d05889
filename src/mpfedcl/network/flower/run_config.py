"""Flower's run configuration of an experiment: strings by name; empty means default."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment

KEYS = ("experiment", "settings", "out", "resume", "status", "update", "client", "leave")
"""experiment: a TOML document. settings: changes to it or to the defaults, such as `rounds=20
train.lr=0.1`. out, resume: the run directory on the server. status: the status file. update: a
finished one-shot run that the client named `client` joins, or leaves if `leave` is true."""


@dataclass(frozen=True)
class RunRequest:
    """The parsed run configuration."""

    experiment: Experiment
    rounds: int | None
    """Set only if given, for a run that is resumed."""
    out: Path | None
    resume: Path | None
    status: Path | None
    update: Path | None
    client: str
    leave: bool


def parse_run_config(config: Mapping[str, Any]) -> RunRequest:
    """Parse a run configuration; reject unknown names and bad values."""
    # Imported here, because it loads torch and KEYS is needed without it.
    from mpfedcl.methods import find_method

    for key in config:
        if key not in KEYS:
            raise InvalidInput(
                f"{key} is not a key of a run configuration; the keys are {', '.join(KEYS)}, and "
                f"settings are given as settings='{key}=...'."
            )
    given = {key: str(config.get(key, "")) for key in KEYS}
    base = Experiment()
    if given["experiment"]:
        base = Experiment.parse_toml(given["experiment"], Path("experiment"))
    changes = _split_pairs(given["settings"])
    method = changes.get("method", base.method)
    # Importing a method from another package registers its settings.
    find_method(method)
    base = base.replace(method=method)
    experiment = base.replace(**{n: _parse(n, text, base) for n, text in changes.items()})
    places = ("out", "resume", "status", "update")
    paths = {key: Path(given[key]) if given[key] else None for key in places}
    if given["leave"] not in ("", "true", "false"):
        raise InvalidInput(f"leave is {given['leave']!r}; it must be true or false.")
    if bool(given["client"]) != bool(given["update"]):
        raise InvalidInput(
            "update and client must be given together: a run, and the client that joins or leaves."
        )
    rounds = experiment.rounds if "rounds" in changes else None
    leave = given["leave"] == "true"
    return RunRequest(experiment, rounds, **paths, client=given["client"], leave=leave)


def _split_pairs(text: str) -> dict[str, str]:
    """Return settings as strings under the names of `Experiment.replace`; quotes allow blanks."""
    try:
        pairs = [word.partition("=") for word in shlex.split(text)]
    except ValueError as error:
        raise InvalidInput(f"settings is {text!r}; its quotes must be closed ({error}).") from None
    for name, equals, _ in pairs:
        if not equals:
            raise InvalidInput(
                f"settings has {name!r}; it must be name=value pairs with blanks between them, "
                "such as rounds=20 train.lr=0.1."
            )
    return {name.replace("-", "_").replace(".", "__"): value for name, _, value in pairs}


def _parse(name: str, text: str, base: Experiment) -> str | tuple[str, ...]:
    """Return a value for `Experiment.replace`, which parses numbers and booleans itself."""
    section, _, field = name.rpartition("__")
    try:
        declared = type(getattr(base, section) if section else base).model_fields[field].annotation
    except (AttributeError, KeyError):
        return text  # an entry of a table, or an unknown name
    if any(get_origin(kind) is tuple for kind in (declared, *get_args(declared))):
        return tuple(filter(None, text.removeprefix("[").removesuffix("]").split(",")))
    return text
