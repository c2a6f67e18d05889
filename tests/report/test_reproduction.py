"""The command in a report gives the same experiment."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from mpfedcl.cli.main import parse
from mpfedcl.experiment import Experiment
from mpfedcl.methods import find_method
from mpfedcl.report.reproduction import compare_command, file_command, run_command


def resolved(experiment: Experiment) -> Experiment:
    return experiment.resolved(find_method(experiment.method).defaults)


CHANGES: list[dict[str, Any]] = [
    {},
    {"method": "fedavg", "rounds": 7},
    {"method": "dp-fedcl", "share_model": False},
    {"dataset__name": "office10", "partition__kind": "feature"},
    {"dataset__name": "digit5", "partition__alpha": 0.5, "dataset__domains": ("usps", "svhn")},
    {"partition__balanced": False, "prototypes__normalize": False, "encoder__train": True},
    {"dataset__root": Path("a folder/with 'quotes'"), "options": {"beta": "0.5"}},
    {"train__lr": 1e-05, "seed": 3, "personal_models": False},
]


@pytest.mark.parametrize("changes", CHANGES)
def test_the_command_gives_the_experiment(changes: dict[str, Any]) -> None:
    experiment = resolved(Experiment().replace(**changes))
    command = run_command(experiment)
    assert command is not None
    words = shlex.split(command)
    assert words[:2] == ["mpfedcl", "run"]
    assert resolved(parse(words[1:]).settings) == experiment


def test_defaults_need_no_flags() -> None:
    assert run_command(resolved(Experiment())) == "mpfedcl run"


def test_a_comparison_needs_one_command() -> None:
    experiments = [
        resolved(Experiment(method=method, seed=seed, rounds=9))
        for method in ("dp-fedcl", "local")
        for seed in (4, 5)
    ]
    command = compare_command(experiments)
    assert command == "mpfedcl compare --methods dp-fedcl local --seeds 4 5 --rounds 9"


def test_runs_that_differ_in_more_have_no_common_command() -> None:
    one = resolved(Experiment(method="local"))
    other = resolved(Experiment(method="fedavg", rounds=3))
    assert compare_command([one, other]) is None
    assert compare_command([]) is None


def test_a_path_is_quoted() -> None:
    assert file_command(Path("my runs")) == "mpfedcl run 'my runs/experiment.toml'"
