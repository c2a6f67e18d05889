"""Commands that reproduce a result: one command line for exactly these experiments.

There are none for methods from outside this package: their defaults are known only to their code,
which a report does not execute.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import CHOSEN_BY_A_RUN, RESULT_NEUTRAL_SETTINGS, Experiment
from mpfedcl.methods import is_built_in
from mpfedcl.runs.plan import resolve

_FEDERATION = "lab"
"""Name of a federation's folder, which a run does not record."""
_MOST_CLIENTS = 10
"""Clients whose commands are listed."""


def run_command(experiment: Experiment) -> str | None:
    """Return the command of a run, with the flags that differ from the defaults.

    None if flags cannot express it; the run's experiment.toml always does.
    """
    return _write_command("run", [experiment])


def federation_commands(
    experiment: Experiment, clients: Sequence[str], file: str = "RUN/experiment.toml"
) -> str:
    """Return the commands of a run over a network, one per line: of the server and each client.

    `file` has the experiment if flags cannot express it.
    """
    init = ["federation", "init", _FEDERATION, "--names", *clients]
    lines = [f"{_join(init)}   # once", _join(["federation", "server", _FEDERATION])]
    for name in clients[:_MOST_CLIENTS]:
        words = ["federation", "client", _FEDERATION, "--name", name, "--data", "FOLDER"]
        lines.append(f"{_join(words)}   # where its data are, or --share NUMBER")
    if len(clients) > _MOST_CLIENTS:
        lines.append(f"# and so on for {len(clients) - _MOST_CLIENTS:,} more")
    start = f"federation start {_FEDERATION}"
    flags = _write_command(start, [experiment])
    return "\n".join([*lines, flags or federation_start(file)])


def federation_start(file: str) -> str:
    """Return the command that starts a run over a network by the settings in a file."""
    return _join(["federation", "start", _FEDERATION, file])


def compare_command(experiments: Sequence[Experiment]) -> str | None:
    """Return the command of a comparison; None if more than method and seed differ."""
    methods = tuple(dict.fromkeys(each.method for each in experiments))
    seeds = tuple(dict.fromkeys(each.seed for each in experiments))
    pairs = {(each.method, each.seed) for each in experiments}
    if not experiments or not len(experiments) == len(pairs) == len(methods) * len(seeds):
        return None
    for name, left_open in CHOSEN_BY_A_RUN.items():
        if len({each.setting(name) for each in experiments}) > 1:
            # Each run has made its own choice, and would make it again.
            experiments = [each.replace(**{name: left_open}) for each in experiments]
    return _write_command("compare", experiments, methods=methods, seeds=seeds)


def _write_command(
    command: str, experiments: Sequence[Experiment], **several: tuple[str | int, ...]
) -> str | None:
    """Return the command line of exactly these experiments; None if there is none.

    `several` has the methods and seeds of more than one experiment.
    """
    if not all(is_built_in(each.method) for each in experiments):
        return None
    try:
        settings: dict[str, Any] = {}
        for each in {each.method: each for each in experiments}.values():
            settings |= _find_settings(each)
        if several:
            settings = {n: v for n, v in settings.items() if n not in ("method", "seed")}
        given = Experiment().replace(**{n.replace(".", "__"): v for n, v in settings.items()})
        meant = [resolve(given.replace(method=e.method, seed=e.seed)) for e in experiments]
    except InvalidInput:
        # A method or data set that no longer exists.
        return None
    flags = [_write_flag(name, value) for name, value in {**several, **settings}.items()]
    if meant != list(experiments) or not all(flags):
        return None
    return _join([*command.split(), *(word for words in flags for word in words or ())])


def _find_settings(experiment: Experiment) -> dict[str, Any]:
    """Return the settings that are not the defaults, by dotted name."""
    # Other defaults depend on these.
    named = {n: _setting(experiment, n) for n in ("method", "dataset.name", "partition.kind")}
    found = {n: value for n, value in named.items() if value != _setting(Experiment(), n)}
    settings = dict(experiment.flattened())
    for names in (("rounds", "prototypes.per_class"), settings):
        known = {n.replace(".", "__"): value for n, value in {**named, **found}.items()}
        resolved = resolve(Experiment().replace(**known))
        found |= {n: settings[n] for n in names if settings[n] != _setting(resolved, n)}
    return found


def _setting(experiment: Experiment, name: str) -> Any:
    return experiment.setting(name.replace(".", "__"))


def _write_flag(name: str, value: Any) -> list[str] | None:
    """Return the words of a flag; None if no words would be parsed as this value."""
    section, dot, field = name.replace("_", "-").rpartition(".")
    flag = f"--{section}{dot}{field}"
    if isinstance(value, bool):
        return [flag if value else f"--{section}{dot}no-{field}"]
    if isinstance(value, dict):
        words = [word for pair in value.items() for word in pair]
    else:
        words = [str(each) for each in (value if isinstance(value, tuple) else (value,))]
    return [flag, *words] if words and all(map(_is_readable, words)) else None


def _is_readable(word: str) -> bool:
    """Return whether a word is printable and parsed as itself, not as a flag or as None."""
    return not word.startswith("-") and word != "None" and word.isprintable()


def _join(words: Sequence[str]) -> str:
    return f"mpfedcl {shlex.join(words)}"


def file_command(path: Path) -> str:
    """Return the command that takes all settings from the file of a run."""
    return _join(["run", str(path / "experiment.toml")])


def without_local_paths(experiment: Experiment) -> Experiment:
    """Return an experiment without local paths and settings that do not change the result."""
    changes: dict[str, Any] = dict(RESULT_NEUTRAL_SETTINGS)
    if experiment.dataset.root is not None:
        # The root of a user's own data is the data set itself, otherwise the folder of all sets.
        own = {"folder": Path("DATA"), "table": Path("TABLE")}
        changes["dataset__root"] = own.get(experiment.dataset.name)
    if experiment.encoder.weights is not None:
        changes["encoder__weights"] = Path(experiment.encoder.weights.name)
    kind, colon, file = str(experiment.encoder.name).partition(":")
    if kind == "onnx":
        changes["encoder__name"] = f"{kind}{colon}{Path(file).name}"
    return experiment.replace(**changes)
