"""An experiment as Flower's run configuration: a few texts by name; an empty one is left open."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment

KEYS = ("experiment", "settings", "out", "resume", "status", "update", "client", "leave")
"""experiment: a whole TOML document; settings: what to change of it, or of the defaults, as
`rounds=20 train.lr=0.1`; out, resume: the run directory on the server; status: a file that says
what is being done; update: a finished run of one exchange, which the client named `client` joins,
or leaves where `leave` is true."""


@dataclass(frozen=True)
class RunRequest:
    """What a run configuration requests."""

    experiment: Experiment
    rounds: int | None
    """Only where it was given, for a run that is resumed."""
    out: Path | None
    resume: Path | None
    status: Path | None
    update: Path | None
    client: str
    leave: bool


def parse_run_config(config: Mapping[str, Any]) -> RunRequest:
    """Read a run configuration; unknown names and bad values get one sentence."""
    # Only now: whoever lists the keys must not wait for torch.
    from mpfedcl.methods import find_method

    for key in config:
        if key not in KEYS:
            raise InvalidInput(
                f"{key} is not a key of a run; the keys are {', '.join(KEYS)}, and settings are "
                f"given as settings='{key}=...'."
            )
    given = {key: str(config.get(key, "")) for key in KEYS}
    base = Experiment()
    if given["experiment"]:
        base = Experiment.parse_toml(given["experiment"], Path("experiment"))
    changes = _split_pairs(given["settings"])
    method = changes.get("method", base.method)
    # A class from outside is known once it is imported, and with it its settings.
    find_method(method)
    base = base.replace(method=method)
    experiment = base.replace(**{n: _parse(n, text, base) for n, text in changes.items()})
    places = ("out", "resume", "status", "update")
    paths = {key: Path(given[key]) if given[key] else None for key in places}
    if given["leave"] not in ("", "true", "false"):
        raise InvalidInput(f"leave is {given['leave']!r}; it must be true or false.")
    if bool(given["client"]) != bool(given["update"]):
        raise InvalidInput("update and client must be given together: a run, and who changes it.")
    rounds = experiment.rounds if "rounds" in changes else None
    leave = given["leave"] == "true"
    return RunRequest(experiment, rounds, **paths, client=given["client"], leave=leave)


def _split_pairs(text: str) -> dict[str, str]:
    """Return settings as texts, by name as `Experiment.replace` has it; quotes hold blanks."""
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
    """Return a value as an experiment takes it; numbers and truths are read from their texts."""
    section, _, field = name.rpartition("__")
    try:
        declared = type(getattr(base, section) if section else base).model_fields[field].annotation
    except (AttributeError, KeyError):
        return text  # of a table of options, or a name that is refused
    if any(get_origin(kind) is tuple for kind in (declared, *get_args(declared))):
        return tuple(filter(None, text.removeprefix("[").removesuffix("]").split(",")))
    return text
