"""Settings as Flower's run configuration: every one can travel, and none is forgotten."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from mpfedcl.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.network.flower.run_config import OWN_KEYS, parse_run_config, setting_keys
from mpfedcl.network.setup.folders import write_app

ROOT = Path(__file__).parents[2]

OTHER: dict[str, Any] = {
    "method": "fedproto",
    "device": "cuda:1",
    "dtype": "float64",
    "engine": "loop",
    "diagnostics": "convergence",
    "dataset.name": "digit5",
    "dataset.root": "/data",
    "dataset.classes": "cat dog",
    "dataset.domains": "mnist usps",
    "dataset.test_fraction": 0.25,
    "partition.kind": "iid",
    "partition.test": "matched",
    "partition.validation": 0.5,
    "prototypes.padding": "fill",
    "prototypes.init": "random",
    "contrast.form": "pooled",
    "dbscan.eps": 0.5,
    "encoder.name": "none",
    "encoder.weights": "/weights",
    "fraction": 0.5,
    "train.lr_decay": 0.5,
    "train.momentum": 0.25,
    "network.enough": 0.5,
    "track": "tensorboard own.module:Tracker",
    "track_to": "/logs",
    "options": "beta=0.5 gamma=x",
}
"""A value that is not the default, where none can be made up."""


def another(key: str) -> Any:
    default = Experiment().setting(key.replace(".", "__"))
    if key in OTHER:
        return OTHER[key]
    if isinstance(default, bool):
        return not default
    return 3 if default is None else default + 1


def listed(path: Path) -> dict[str, Any]:
    app: dict[str, Any] = tomllib.loads(path.read_text())["tool"]["flwr"]["app"]
    return app


def test_both_apps_list_all_settings_and_nothing_else(tmp_path: Path) -> None:
    wanted = dict.fromkeys([*OWN_KEYS, *setting_keys()], "")
    write_app(tmp_path)
    assert listed(ROOT / "pyproject.toml")["config"] == wanted
    assert listed(tmp_path / "pyproject.toml")["config"] == wanted
    components = {
        "serverapp": "mpfedcl.flower_app:server_app",
        "clientapp": "mpfedcl.flower_app:client_app",
    }
    assert listed(ROOT / "pyproject.toml")["components"] == components
    assert listed(tmp_path / "pyproject.toml")["components"] == components


@pytest.mark.parametrize("key", setting_keys())
def test_every_setting_can_travel(key: str) -> None:
    value = another(key)
    # Flower's configurations know texts, numbers and truths alone.
    assert type(value) in (str, int, float, bool)
    empty = dict.fromkeys([*OWN_KEYS, *setting_keys()], "")
    order = parse_run_config({**empty, key: value})
    name = key.replace(".", "__")
    found, before = order.experiment.setting(name), Experiment().setting(name)
    assert found != before
    assert order.experiment == Experiment().replace(**{name: found})
    # As text too: that is how a file of settings has it.
    assert parse_run_config({key: str(value)}).experiment == order.experiment


def test_what_is_left_open_stays_open() -> None:
    order = parse_run_config(dict.fromkeys([*OWN_KEYS, *setting_keys()], ""))
    assert order.experiment == Experiment()
    assert (order.rounds, order.out, order.resume, order.status) == (None,) * 4


def test_lists_and_tables() -> None:
    config = {"dataset.classes": "cat dog", "options": "beta=0.5 name=a=b", "diagnostics": ""}
    experiment = parse_run_config(config).experiment
    assert experiment.dataset.classes == ("cat", "dog")
    assert experiment.options == {"beta": "0.5", "name": "a=b"}


def test_a_whole_document_that_others_change() -> None:
    document = Experiment(rounds=7, seed=3).replace(dataset__classes=("a b", "c")).to_toml()
    order = parse_run_config({"experiment": document, "seed": 4, "out": "/x", "status": "/y"})
    assert (order.experiment.rounds, order.experiment.seed) == (7, 4)
    # Names with blanks travel in the document.
    assert order.experiment.dataset.classes == ("a b", "c")
    assert (order.out, order.status, order.rounds) == (Path("/x"), Path("/y"), None)


def test_more_rounds_for_a_run_that_goes_on() -> None:
    order = parse_run_config({"resume": "/run", "rounds": "12"})
    assert (order.resume, order.rounds) == (Path("/run"), 12)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"round": 3}, "round is not a setting; the settings are batch"),
        ({"rounds": "three"}, "rounds is 'three'; it must be a valid integer"),
        ({"rounds": 0}, "rounds is 0; it must be"),
        ({"train.lr": -1.0}, r"train\.lr is -1\.0; it must be"),
        ({"experiment": "rounds = "}, "experiment is not valid TOML"),
        ({"diagnostics": "all"}, "diagnostics"),
    ],
)
def test_bad_values_get_a_sentence(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason.replace("batch", "")):
        parse_run_config(config)
