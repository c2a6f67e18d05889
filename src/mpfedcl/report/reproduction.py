"""How to get a result again: one command line, tried before it is printed.

Only of methods of this package: to try a command with another's would run their code, and whoever
reads a report of a run has not asked for that.
"""

import shlex
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from mpfedcl.cli.main import parse
from mpfedcl.errors import InvalidInput
from mpfedcl.experiment import INDIFFERENT, Experiment
from mpfedcl.methods import find_method, is_built_in


def run_command(experiment: Experiment) -> str | None:
    """Return the command of a run, with the flags that differ from the defaults.

    None where flags cannot say it; the run's experiment.toml always can.
    """
    return _tried("run", [experiment], leave_out=())


def compare_command(experiments: Sequence[Experiment]) -> str | None:
    """Return the command of a comparison; None where more than method and seed differs."""
    methods = list(dict.fromkeys(each.method for each in experiments))
    seeds = list(dict.fromkeys(each.seed for each in experiments))
    if not experiments or len(experiments) != len(methods) * len(seeds):
        return None
    several = ("--methods", *methods, "--seeds", *(str(seed) for seed in seeds))
    return _tried("compare", experiments, *several, leave_out=("method", "seed"))


def tune_command(bases: Sequence[Experiment], asked: Mapping[str, Any]) -> str | None:
    """Return the command of searches around experiments that differ in their method alone.

    `asked` is what else the command was told, by the names of its flags.
    """
    methods = [each.method for each in bases]
    if len(set(methods)) < len(methods) or not all(map(is_built_in, methods)):
        return None
    usual = parse(["tune"])
    words = ["--methods", *methods]
    for name, value in asked.items():
        if value != getattr(usual, name):
            words += _words(name, value)
    try:
        # A search has seeds of its own; that of its base plays no part.
        complete = [_resolve(each.replace(seed=0)) for each in bases]
    except InvalidInput:
        return None
    return _tried("tune", complete, *words, leave_out=("method", "seed"))


def _tried(
    command: str, experiments: Sequence[Experiment], *first: str, leave_out: Sequence[str]
) -> str | None:
    """Return a command line that means these experiments and no others, if there is one."""
    if not all(is_built_in(each.method) for each in experiments):
        return None
    try:
        words = [command, *first, *_flags(experiments[0], leave_out)]
        settings = _read_settings(*words)
        found = [_resolve(settings.replace(method=e.method, seed=e.seed)) for e in experiments]
    except InvalidInput:
        # A method that is not here any more, or a value no flag can say.
        return None
    return _join(words) if found == list(experiments) else None


@lru_cache(maxsize=64)
def _read_settings(*words: str) -> Experiment:
    """Return the settings that words mean; kept, because reading them takes a tenth of a second."""
    settings: Experiment = parse(list(words)).settings
    return settings


def _flags(experiment: Experiment, leave_out: Sequence[str]) -> list[str]:
    plain = Experiment(
        method=experiment.method,
        dataset={"name": experiment.dataset.name},
        partition={"kind": experiment.partition.kind},
    )
    usual, words = _resolve(plain), []
    # What the defaults hang on is said first, whether or not it is the default of its own.
    for name in ("method", "dataset.name", "partition.kind"):
        if name not in leave_out and _at(experiment, name) != _at(Experiment(), name):
            words += [f"--{name}", str(_at(experiment, name))]
    for name, value in experiment.leaves():
        if value != _at(usual, name) and name not in leave_out:
            words += _words(name, value)
    return words


def _at(settings: Experiment, name: str) -> Any:
    return settings.setting(name.replace(".", "__"))


def _words(name: str, value: Any) -> list[str]:
    section, dot, field = name.replace("_", "-").rpartition(".")
    flag = f"--{section}{dot}{field}"
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag if value else f"--{section}{dot}no-{field}"]
    if isinstance(value, dict):
        return [flag, *(word for pair in value.items() for word in pair)]
    if isinstance(value, tuple):
        return [flag, *(str(each) for each in value)]
    return [flag, str(value)]


def _resolve(experiment: Experiment) -> Experiment:
    return experiment.resolved(find_method(experiment.method).defaults)


def _join(words: Sequence[str]) -> str:
    return f"mpfedcl {shlex.join(words)}"


def file_command(path: Path) -> str:
    """Return the command that takes all settings from a run's own file."""
    return _join(["run", str(path / "experiment.toml")])


def without_places(experiment: Experiment) -> Experiment:
    """Return an experiment that does not tell where somebody keeps what, or how it was run."""
    changes: dict[str, Any] = dict(INDIFFERENT)
    if experiment.dataset.root is not None:
        is_set = experiment.dataset.name == "folder"
        changes["dataset__root"] = Path("PICTURES") if is_set else None
    if experiment.encoder.weights is not None:
        changes["encoder__weights"] = Path(experiment.encoder.weights.name)
    kind, colon, file = str(experiment.encoder.name).partition(":")
    if kind == "onnx":
        changes["encoder__name"] = f"{kind}{colon}{Path(file).name}"
    return experiment.replace(**changes)
