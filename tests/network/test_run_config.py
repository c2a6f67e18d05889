"""Every setting can be sent in Flower's run configuration."""

import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest

from mpfedcl.core.errors import InvalidInput
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.method_settings import built_in_sections
from mpfedcl.network.flower.run_config import KEYS, parse_run_config
from mpfedcl.network.setup.folders import write_app

ROOT = Path(__file__).parents[2]

OTHER = {
    "method": "fedproto",
    "device": "cuda:1",
    "dtype": "float64",
    "engine": "loop",
    "dataset.name": "digit5",
    "dataset.root": "/data",
    "dataset.classes": "cat,dog",
    "dataset.domains": "mnist,usps",
    "dataset.test_fraction": "0.25",
    "partition.kind": "iid",
    "partition.test": "matched",
    "partition.validation": "0.5",
    "prototypes.padding": "fill",
    "prototypes.init": "random",
    "contrast.form": "pooled",
    "aggregation.rule": "median",
    "aggregation.attackers": "0.25",
    "validation.bounds": "off",
    "validation.sizes": "hospital:5000,clinic:30",
    "dbscan.eps": "0.5",
    "encoder.name": "onnx:model.onnx",
    "encoder.weights": "/weights",
    "encoder.output": "features",
    "encoder.tokens": "class",
    "encoder.mean": "0.5,0.5,0.5",
    "encoder.deviation": "0.2,0.2,0.2",
    "model.hidden": "32,16",
    "fraction": "0.5",
    "workers": "3",
    "evaluate_every": "7",
    "evaluate_predictors": "all",
    "train.lr_decay": "0.5",
    "train.optimizer": "adam",
    "train.momentum": "0.25",
    "network.enough": "0.5",
    "privacy.delta": "1e-6",
    "privacy.unit": "client",
    "privacy.model": "local",
    "secure.threshold": "0.75",
    "systems.kind": "tiers",
    "systems.follows": "size",
    "statistics.keep": "pooled",
    "track": "tensorboard,own.module:Tracker",
    "track_to": "/logs",
    "model.name": "cnn",
    "model.norm": "group",
    "update.compress": "int8",
}
"""Non-default values of settings for which none can be derived."""

NAMES = [name for name, _ in Experiment().flattened() if name != "options"]


def another(name: str) -> str:
    default = Experiment().setting(name.replace(".", "__"))
    if name in OTHER:
        return OTHER[name]
    if isinstance(default, bool):
        return str(not default).lower()
    section, _, field = name.partition(".")
    choices: tuple[Any, ...] = ()
    if section in built_in_sections():
        choices = get_args(built_in_sections()[section].model_fields[field].annotation)
    if isinstance(default, str):
        return next(str(each) for each in choices if each != default)
    larger, smaller = (3, 0.5) if default is None else (default + 1, default / 2 + 0.125)
    try:
        Experiment().replace(**{name.replace(".", "__"): larger})
    except InvalidInput:
        return str(smaller)
    return str(larger)


def read(settings: str, **config: str) -> Experiment:
    return parse_run_config({"settings": settings, **config}).experiment


def listed(path: Path) -> dict[str, Any]:
    app: dict[str, Any] = tomllib.loads(path.read_text())["tool"]["flwr"]["app"]
    return app


def test_both_apps_list_exactly_the_run_config_keys(tmp_path: Path) -> None:
    wanted = dict.fromkeys(KEYS, "")
    write_app(tmp_path)
    assert listed(ROOT / "pyproject.toml")["config"] == wanted
    assert listed(tmp_path / "pyproject.toml")["config"] == wanted
    components = {
        "serverapp": "mpfedcl.flower_app:server_app",
        "clientapp": "mpfedcl.flower_app:client_app",
    }
    assert listed(ROOT / "pyproject.toml")["components"] == components
    assert listed(tmp_path / "pyproject.toml")["components"] == components


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_can_be_sent_in_a_run_config(name: str) -> None:
    found = read(f"{name}={another(name)}")
    field = name.replace(".", "__")
    value = found.setting(field)
    assert value != Experiment().setting(field)
    assert found == Experiment().replace(**{field: value})
    # With hyphens, as in a flag.
    assert read(f"{name.replace('_', '-')}={another(name)}") == found


def test_all_settings_can_be_sent_at_once() -> None:
    found = read("  ".join(f"{name}={another(name)}" for name in NAMES))
    assert [name for name in NAMES if found.setting(name.replace(".", "__")) is None] == []
    assert (found.method, found.rounds, found.train.lr_decay) == ("fedproto", 61, 0.5)
    assert found.model.hidden == (32, 16)


def test_empty_config_values_keep_defaults() -> None:
    request = parse_run_config(dict.fromkeys(KEYS, ""))
    assert request.experiment == Experiment()
    assert (request.rounds, request.out, request.resume, request.status) == (None,) * 4


def test_lists_tables_and_blanks_are_parsed() -> None:
    found = read("""dataset.classes='old cat,dog' options.beta=0.5 options.name=a=b""")
    assert found.dataset.classes == ("old cat", "dog")
    assert found.options == {"beta": "0.5", "name": "a=b"}
    assert read("model.hidden=[8,4]").model.hidden == (8, 4)
    assert read("model.hidden=[8]").model.hidden == (8,)
    assert read("dataset.classes=1,2").dataset.classes == ("1", "2")
    assert read("dataset.domains=").dataset.domains == ()


def test_settings_override_an_experiment_document() -> None:
    document = Experiment(rounds=7, seed=3).replace(dataset__classes=("a b", "c")).to_toml()
    request = parse_run_config(
        {"experiment": document, "settings": "seed=4", "out": "/x", "status": "/y"}
    )
    assert (request.experiment.rounds, request.experiment.seed) == (7, 4)
    assert request.experiment.dataset.classes == ("a b", "c")
    assert (request.out, request.status, request.rounds) == (Path("/x"), Path("/y"), None)


def test_rounds_can_be_raised_on_resume() -> None:
    request = parse_run_config({"resume": "/run", "settings": "rounds=12"})
    assert (request.resume, request.rounds) == (Path("/run"), 12)


def test_update_client_and_leave_are_parsed() -> None:
    request = parse_run_config({"update": "/run", "client": "x", "leave": "true"})
    assert (request.update, request.client, request.leave) == (Path("/run"), "x", True)
    assert not parse_run_config({"update": "/run", "client": "x"}).leave


@pytest.mark.usefixtures("example_methods")
def test_settings_of_a_custom_method_are_parsed() -> None:
    found = read("method=custom_method:Scaffold my-scaffold.server-lr=0.5")
    assert found.setting("my_scaffold__server_lr") == 0.5
    document = found.to_toml()
    assert (
        read("my_scaffold.server_lr=2", experiment=document).setting("my_scaffold__server_lr") == 2
    )
    with pytest.raises(
        InvalidInput, match=r"my_scaffold\.server_lr is '0'; it must be greater than"
    ):
        read("method=custom_method:Scaffold my_scaffold.server_lr=0")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            {"rounds": 3},
            r"rounds is not a key of a run configuration; .* given as settings='rounds=\.\.\.'",
        ),
        ({"settings": "round=3"}, "round is not a setting; an experiment has method, rounds"),
        ({"settings": "rounds"}, "settings has 'rounds'; it must be name=value pairs"),
        ({"settings": "device='cpu"}, "its quotes must be closed"),
        ({"settings": "rounds=three"}, "rounds is 'three'; it must be a valid integer"),
        ({"settings": "rounds=0"}, "rounds is '0'; it must be"),
        ({"settings": "train.lr=-1.0"}, r"train\.lr is '-1\.0'; it must be"),
        ({"settings": "train.speed=1"}, r"train\.speed is not a setting; \[train\] has epochs"),
        ({"settings": "method=odd"}, "method is 'odd'; it must be one of "),
        ({"experiment": "rounds = "}, "experiment is not valid TOML"),
        ({"update": "/run"}, "update and client must be given together"),
        ({"client": "x"}, "update and client must be given together"),
        ({"update": "/run", "client": "x", "leave": "yes"}, "leave is 'yes'; it must be true or"),
    ],
)
def test_bad_run_config_values_are_rejected_with_reason(
    config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidInput, match=reason):
        parse_run_config(config)


def test_name_below_a_plain_setting_is_rejected() -> None:
    with pytest.raises(InvalidInput, match=r"rounds\.x is not a setting; rounds is not a section"):
        read("rounds.x=3")
