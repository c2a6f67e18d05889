"""How to get a result again: one command line that means the same experiments, and no others.

Only of methods of this package: another's defaults are known to its code alone, and whoever reads
a report of a run has not asked to run that.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import CHOSEN_BY_A_RUN, RESULT_NEUTRAL_SETTINGS, Experiment
from mpfedcl.methods import find_method, is_built_in

_FEDERATION = "lab"
"""What the folder of a federation is called where a run does not say it."""
_MOST_CLIENTS = 10
"""Whose commands are written out."""


def run_command(experiment: Experiment) -> str | None:
    """Return the command of a run, with the flags that differ from the defaults.

    None where flags cannot say it; the run's experiment.toml always can.
    """
    return _write_command("run", {}, [experiment], leave_out=())


def federation_commands(
    experiment: Experiment, clients: Sequence[str], file: str = "RUN/experiment.toml"
) -> str:
    """Return the commands of a run over a network, one a line: on the server and at each client.

    Where flags cannot say the experiment, the run's `file` does.
    """
    init = ["federation", "init", _FEDERATION, "--names", *clients]
    lines = [f"{_join(init)}   # once", _join(["federation", "server", _FEDERATION])]
    for name in clients[:_MOST_CLIENTS]:
        words = ["federation", "client", _FEDERATION, "--name", name, "--data", "FOLDER"]
        lines.append(f"{_join(words)}   # where its data are, or --share NUMBER")
    if len(clients) > _MOST_CLIENTS:
        lines.append(f"# and so on for {len(clients) - _MOST_CLIENTS:,} more")
    start = f"federation start {_FEDERATION}"
    flags = _write_command(start, {}, [experiment], leave_out=())
    return "\n".join([*lines, flags or federation_start(file)])


def federation_start(file: str) -> str:
    """Return the command that starts a run over a network by the settings in a file."""
    return _join(["federation", "start", _FEDERATION, file])


def compare_command(experiments: Sequence[Experiment]) -> str | None:
    """Return the command of a comparison; None where more than method and seed differs."""
    methods = tuple(dict.fromkeys(each.method for each in experiments))
    seeds = tuple(dict.fromkeys(each.seed for each in experiments))
    pairs = {(each.method, each.seed) for each in experiments}
    if not experiments or not len(experiments) == len(pairs) == len(methods) * len(seeds):
        return None
    for name, left_open in CHOSEN_BY_A_RUN.items():
        if len({each.setting(name) for each in experiments}) > 1:
            # Each run has chosen for itself, and would again.
            experiments = [each.replace(**{name: left_open}) for each in experiments]
    several = {"methods": methods, "seeds": seeds}
    return _write_command("compare", several, experiments, leave_out=("method", "seed"))


def tune_command(bases: Sequence[Experiment], asked: Mapping[str, Any]) -> str | None:
    """Return the command of searches around experiments that differ in their method alone.

    `asked` is what else the command was told, by the names of its flags.
    """
    methods = tuple(each.method for each in bases)
    if len(set(methods)) < len(methods) or not all(map(is_built_in, methods)):
        return None
    try:
        # A search has seeds of its own; that of its base plays no part.
        complete = [_resolve(each.replace(seed=0)) for each in bases]
    except InvalidInput:
        return None
    several = {"methods": methods, **asked}
    return _write_command("tune", several, complete, leave_out=("method", "seed"))


def _write_command(
    command: str,
    flags: Mapping[str, Any],
    experiments: Sequence[Experiment],
    leave_out: Sequence[str],
) -> str | None:
    """Return a command line that means these experiments and no others, if there is one."""
    if not all(is_built_in(each.method) for each in experiments):
        return None
    try:
        settings: dict[str, Any] = {}
        for each in {each.method: each for each in experiments}.values():
            settings |= _find_settings(each, leave_out)
        said = Experiment().replace(**{n.replace(".", "__"): v for n, v in settings.items()})
        meant = [_resolve(said.replace(method=e.method, seed=e.seed)) for e in experiments]
    except InvalidInput:
        # A method or data set that is not here any more.
        return None
    several = [_write_flag(name, value) for name, value in {**flags, **settings}.items()]
    if meant != list(experiments) or not all(several):
        return None
    return _join([*command.split(), *(word for words in several for word in words or ())])


def _find_settings(experiment: Experiment, leave_out: Sequence[str]) -> dict[str, Any]:
    """Return the settings that must be said, by dotted name: those that are not the defaults."""
    # What other defaults depend on comes first.
    named = {n: _setting(experiment, n) for n in ("method", "dataset.name", "partition.kind")}
    found = {n: value for n, value in named.items() if value != _setting(Experiment(), n)}
    settings = dict(experiment.flattened())
    for names in (("rounds", "prototypes.per_class"), settings):
        said = {n.replace(".", "__"): value for n, value in {**named, **found}.items()}
        resolved = _resolve(Experiment().replace(**said))
        found |= {n: settings[n] for n in names if settings[n] != _setting(resolved, n)}
    return {name: value for name, value in found.items() if name not in leave_out}


def _setting(experiment: Experiment, name: str) -> Any:
    return experiment.setting(name.replace(".", "__"))


def _write_flag(name: str, value: Any) -> list[str] | None:
    """Return the words of a flag; None where no words would be read as this value."""
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
    """Tell whether a word is read as itself: not as a flag, as nothing, or by no terminal."""
    return not word.startswith("-") and word != "None" and word.isprintable()


def _resolve(experiment: Experiment) -> Experiment:
    return experiment.resolved(find_method(experiment.method).defaults)


def _join(words: Sequence[str]) -> str:
    return f"mpfedcl {shlex.join(words)}"


def file_command(path: Path) -> str:
    """Return the command that takes all settings from a run's own file."""
    return _join(["run", str(path / "experiment.toml")])


def without_local_paths(experiment: Experiment) -> Experiment:
    """Return an experiment that does not tell where somebody keeps what, or how it was run."""
    changes: dict[str, Any] = dict(RESULT_NEUTRAL_SETTINGS)
    if experiment.dataset.root is not None:
        # Of one's own data the root is the set itself; elsewhere it says where all sets are.
        own = {"folder": Path("PICTURES"), "table": Path("TABLE")}
        changes["dataset__root"] = own.get(experiment.dataset.name)
    if experiment.encoder.weights is not None:
        changes["encoder__weights"] = Path(experiment.encoder.weights.name)
    kind, colon, file = str(experiment.encoder.name).partition(":")
    if kind == "onnx":
        changes["encoder__name"] = f"{kind}{colon}{Path(file).name}"
    return experiment.replace(**changes)
