"""Experiments as data: TOML there and back, defaults, and a sentence for each kind of mistake."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpfedcl import Experiment, InvalidInput
from mpfedcl.cli.arguments import Run
from mpfedcl.cli.main import parse
from mpfedcl.core.files import FORMAT
from mpfedcl.experiment.settings import DatasetSettings, PartitionSettings, TrainSettings
from mpfedcl.methods.fedprox import FedProx

NOWHERE = Path("nowhere.toml")


def positive(limit: float = 1e9) -> st.SearchStrategy[float]:
    return st.floats(1e-12, limit)


names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=12)

experiments = st.fixed_dictionaries(
    {},
    optional={
        "method": st.sampled_from(["mp-fedcl", "local"]) | names.map(lambda name: f"{name}:Own"),
        "rounds": st.integers(1, 10**9),
        "clients": st.none() | st.integers(1, 10**9),
        "fraction": st.floats(1e-9, 1),
        "min_clients": st.integers(1, 100),
        "share_model": st.booleans(),
        "seed": st.integers(0, 2**63 - 1),
        "dtype": st.sampled_from(["float32", "float64"]),
        "workers": st.integers(1, 4096) | st.just("auto"),
        "evaluate_every": st.integers(1, 1000) | st.just("auto"),
        "evaluate_predictors": st.sampled_from(["primary", "all"]),
        "dataset__name": names,
        "dataset__root": st.none() | st.sampled_from([Path("/a b/ü"), Path("x\\y"), Path('"q"')]),
        "dataset__train_size": st.none() | st.integers(1, 10**6),
        "dataset__test_fraction": st.floats(0.001, 0.999),
        "dataset__domains": st.lists(names, max_size=3).map(tuple),
        "partition__kind": st.sampled_from(["label", "feature", "iid", "classes", "quantity"]),
        "partition__alpha": positive(1e6),
        "partition__balanced": st.booleans(),
        "partition__min_size": st.none() | st.integers(1, 100),
        "partition__test": st.sampled_from([None, "shared", "matched"]),
        "train__lr": positive(),
        "train__lr_decay": st.floats(1e-9, 1),
        "train__momentum": st.floats(0, 0.999),
        "train__batch_size": st.integers(1, 10**6),
        "prototypes__per_class": st.none() | st.integers(1, 100) | st.just("auto"),
        "prototypes__padding": st.sampled_from([None, "all", "fill"]),
        "prototypes__init": st.sampled_from(["k-means++", "random"]),
        "contrast__form": st.sampled_from(["slots", "pooled", "literal"]),
        "contrast__temperature": positive(),
        "contrast__weight": st.floats(0, 1e9),
        "fedprox__mu": st.floats(0, 1e9),
        "dbscan__eps": st.none() | positive(),
        "validation__max_norm": positive(1e300),
        "model__hidden": st.lists(st.integers(1, 65_536), max_size=4).map(tuple),
        "model__clients": st.none() | st.dictionaries(names, st.sampled_from(["mlp", "a:b"])),
    },
)


@given(experiments)
@settings(max_examples=50, deadline=None)
def test_experiment_is_read_back_from_toml(changes: dict[str, Any]) -> None:
    experiment = Experiment().replace(**changes)
    document = experiment.to_toml()
    assert Experiment.parse_toml(document, NOWHERE) == experiment
    assert tomllib.loads(document)["format"] == FORMAT
    assert Experiment.parse_toml(document, NOWHERE).to_toml() == document


def test_experiment_is_read_back_from_a_file(tmp_path: Path) -> None:
    experiment = Experiment(method="fedavg").replace(partition__alpha=0.3).resolved()
    (tmp_path / "x.toml").write_text(experiment.to_toml())
    assert Experiment.from_toml(tmp_path / "x.toml") == experiment


@pytest.mark.parametrize(("said", "meant"), [("true", "federated"), ("false", "none")])
def test_files_of_earlier_versions_standardize_or_not(
    tmp_path: Path, said: str, meant: str
) -> None:
    (tmp_path / "e.toml").write_text(f"[dataset]\nstandardize = {said}\n")
    found = Experiment.from_toml(tmp_path / "e.toml")
    assert found.dataset.standardize == meant
    assert tomllib.loads(found.to_toml())["dataset"]["standardize"] == meant


def test_omitted_settings_have_defaults() -> None:
    assert Experiment.parse_toml("", NOWHERE) == Experiment()
    assert Experiment.parse_toml("format = 2\n[train]\nlr = 0.5", NOWHERE).train.lr == 0.5


def test_defaults_match_the_paper() -> None:
    experiment = Experiment().resolved()
    assert (experiment.method, experiment.rounds, experiment.clients) == ("mp-fedcl", 60, 5)
    train = experiment.train
    assert (train.epochs, train.batch_size, train.lr, train.lr_decay, train.momentum) == (
        1,
        32,
        0.01,
        0.95,
        0.5,
    )
    # Rounds count from 1, and the first one has the whole rate.
    assert [train.learning_rate(number) for number in (1, 2, 3)] == pytest.approx(
        [0.01, 0.0095, 0.009025]
    )
    partition = experiment.partition
    assert (partition.kind, partition.alpha, partition.balanced) == ("label", 0.05, True)
    assert (partition.min_size, partition.test) == (10, "shared")
    prototypes = experiment.prototypes
    assert (prototypes.per_class, prototypes.padding, prototypes.normalize) == (2, "all", True)
    assert (prototypes.min_cluster_size, prototypes.pool_ttl) == (1, 1)
    contrast = experiment.contrast
    assert (contrast.form, contrast.temperature, contrast.weight) == ("slots", 0.07, 1.0)
    assert (experiment.setting("fedprox__mu"), experiment.setting("fedproto__weight")) == (
        0.01,
        1.0,
    )
    assert experiment.setting("dbscan__min_samples") == 3
    assert experiment.dataset.name == "mnist-sample"


# What was left open is filled in


def test_data_set_provides_defaults_for_open_settings() -> None:
    mnist = Experiment(dataset=DatasetSettings(name="mnist")).resolved()
    assert mnist.dataset.train_size == 2000
    folder = Experiment(dataset=DatasetSettings(name="folder")).resolved()
    assert (folder.prototypes.per_class, folder.partition.test) == (4, "matched")
    assert (folder.partition.min_size, folder.dataset.train_size) == (1, None)


def test_default_precedence_is_user_method_data_set() -> None:
    defaults = {"prototypes__padding": "fill", "prototypes__per_class": 7, "rounds": 9}
    experiment = Experiment().resolved(defaults)
    assert (experiment.prototypes.padding, experiment.prototypes.per_class) == ("fill", 7)
    # A one-shot method has its one round, whoever asks for more.
    assert (experiment.rounds, Experiment(rounds=5).resolved(defaults).rounds) == (9, 9)
    chosen = Experiment().replace(prototypes__per_class="auto").resolved()
    assert (chosen.prototypes.padding, chosen.prototypes.per_class) == ("fill", "auto")
    given_by_user = Experiment().replace(prototypes__padding="all", prototypes__per_class=3)
    assert given_by_user.resolved(defaults) == given_by_user.resolved().replace(rounds=9)


@pytest.mark.parametrize(
    ("dataset", "given_by_user", "encoder"),
    [
        ("mnist-sample", None, "random-filters"),
        ("mnist", None, "random-filters"),
        ("mnist", "none", "none"),
        ("mnist", "random-resnet18", "random-resnet18"),
        ("office10", None, "resnet18"),
        ("digit5", None, "resnet18"),
        ("folder", None, "resnet18"),
        ("folder", "none", "none"),
    ],
)
def test_default_encoder_of_a_method_replaces_pixels_only(
    dataset: str, given_by_user: str | None, encoder: str
) -> None:
    experiment = Experiment().replace(dataset__name=dataset, encoder__name=given_by_user)
    resolved = experiment.resolved({"encoder__name": "random-filters"})
    assert resolved.encoder.name == encoder
    assert resolved.resolved() == resolved


def test_feature_skew_leaves_the_number_of_clients_open() -> None:
    experiment = Experiment().replace(partition__kind="feature").resolved()
    assert experiment.clients is None
    assert experiment.partition.test == "matched"


def test_resolving_twice_changes_nothing() -> None:
    experiment = Experiment().resolved({"prototypes__padding": "fill"})
    assert experiment.resolved() == experiment


def test_unknown_data_set_is_rejected_when_resolved() -> None:
    with pytest.raises(InvalidInput, match=r"dataset\.name is 'nope'; it must be one of"):
        Experiment(dataset=DatasetSettings(name="nope")).resolved()


# Changes


def test_replace_changes_and_validates_settings_of_sections() -> None:
    experiment = Experiment().replace(rounds=3, partition__alpha=0.5, partition__kind="iid")
    assert (experiment.rounds, experiment.partition.alpha) == (3, 0.5)
    assert experiment.setting("partition__kind") == "iid"
    assert experiment.setting("rounds") == 3
    assert Experiment().partition.alpha == 0.05
    with pytest.raises(InvalidInput, match=r"partition\.alpha is -1"):
        experiment.replace(partition__alpha=-1)


def test_experiment_is_frozen() -> None:
    with pytest.raises(InvalidInput, match=r"rounds cannot be .*\.replace\(rounds=3\)\.$"):
        Experiment().rounds = 3  # type: ignore[misc]
    with pytest.raises(InvalidInput, match=r"train\.lr cannot .*\.replace\(train__lr=0\.1\)\.$"):
        Experiment().train.lr = 0.1  # type: ignore[misc]


def test_setting_of_a_section_is_given_with_two_underscores_or_in_a_table() -> None:
    mixed = Experiment(train__lr=0.5, train={"lr": 0.1, "momentum": 0.2})
    assert mixed == Experiment(train={"lr": 0.5, "momentum": 0.2})
    assert mixed == Experiment(train=TrainSettings(momentum=0.2), train__lr=0.5)
    # A table changes its own settings only.
    assert mixed.replace(train={"lr": 0.3}) == mixed.replace(train__lr=0.3)
    assert mixed.replace(train=TrainSettings()) == Experiment()
    with pytest.raises(InvalidInput, match=r"rounds\.few is not a setting; rounds is not a"):
        Experiment(rounds=3).replace(rounds__few=1)


def test_class_of_a_method_is_taken_by_its_name() -> None:
    assert Experiment(method=FedProx).method == "fedprox"
    assert Experiment().replace(method=FedProx) == Experiment(method="fedprox")

    class Local(FedProx):
        pass

    with pytest.raises(InvalidInput, match=r"method is the class .*Local, which cannot be import"):
        Experiment(method=Local)


# One sentence for each kind of mistake


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rounds": 0}, "rounds is 0; it must be greater than or equal to 1."),
        ({"rounds": "many"}, "rounds is 'many'; it must be a valid integer"),
        ({"rounds": 2.5}, "rounds is 2.5; it must be a valid integer"),
        ({"fraction": 0}, "fraction is 0; it must be greater than 0."),
        ({"fraction": 1.5}, "fraction is 1.5; it must be less than or equal to 1."),
        ({"dtype": "int8"}, "dtype is 'int8'; it must be 'float32' or 'float64'."),
        ({"share_model": "perhaps"}, "share_model is 'perhaps'; it must be a valid boolean"),
        ({"partition__alpha": float("nan")}, "partition.alpha is nan; it must be finite."),
        ({"partition__alpha": float("inf")}, "partition.alpha is inf; it must be finite."),
        ({"partition__alpha": None}, "partition.alpha is None; it must be a valid number."),
        ({"partition__kind": "odd"}, "partition.kind is 'odd'; it must be 'classes', 'feature',"),
        ({"dataset__domains": "a"}, "dataset.domains is 'a'; it must be a valid tuple."),
        ({"prototypes__per_class": 0}, "prototypes.per_class is 0; it must be a whole number"),
        (
            {"prototypes__per_class": "all"},
            "prototypes.per_class is 'all'; it must be a whole number from 1 to 65,536, or auto",
        ),
        ({"prototypes__per_class": True}, "prototypes.per_class is True; it must be"),
        ({"nonsense": 1}, "nonsense is not a setting; mpfedcl run --help lists all settings."),
        ({"train__lrr": 1}, "train.lrr is not a setting; did you mean train.lr?"),
        (
            {"train.lr": 0.05},
            'train.lr is not a setting; did you mean train={"lr": 0.05} or train__lr?',
        ),
        ({"train.lrr": 0.05}, "train.lrr is not a setting; did you mean train.lr?"),
        ({"train": 3}, "train is 3; it must be a table of settings."),
        (
            {"train__speed": 1},
            "train.speed is not a setting; [train] has epochs, steps, batch_size,",
        ),
        ({"train__steps": 0}, "train.steps is 0; it must be greater than or equal to 1"),
        (
            {"train__steps": 100, "train__epochs": 3},
            "train.epochs is 3; with train.steps it must be left out",
        ),
    ],
)
def test_invalid_settings_give_a_one_line_error(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Experiment().replace(**changes)
    assert str(caught.value).startswith(sentence)
    assert str(caught.value).endswith((".", "?"))
    assert "\n" not in str(caught.value)


def test_error_of_a_single_section_names_the_section() -> None:
    with pytest.raises(InvalidInput, match=r"partition\.alpha is 0; it must be greater than 0"):
        PartitionSettings(alpha=0)


# Flags


def test_flags_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text('method = "local"\nrounds = 7\n[train]\nlr = 0.5\nmomentum = 0.0\n')
    parsed = parse(["run", str(file), "--rounds", "3", "--train.momentum", "0.9"])
    assert isinstance(parsed, Run)
    used = parsed.settings
    assert (used.method, used.rounds, used.train.lr, used.train.momentum) == ("local", 3, 0.5, 0.9)
    # Even where a flag says what the default is.
    parsed = parse(["run", str(file), "--rounds", "60", "--method", "mp-fedcl"])
    assert isinstance(parsed, Run)
    assert (parsed.settings.rounds, parsed.settings.method) == (60, "mp-fedcl")


def test_flags_and_python_give_the_same_experiment() -> None:
    parsed = parse(
        [
            "run",
            "--method",
            "fedprox",
            "--fedprox.mu",
            "0.5",
            "--partition.kind",
            "iid",
            "--no-share-model",
            "--prototypes.no-normalize",
            "--dataset.domains",
            "a",
            "b",
            "--clients",
            "4",
            "--dbscan.eps",
            "0.5",
            "--prototypes.per-class",
            "3",
        ]
    )
    assert isinstance(parsed, Run)
    assert parsed.settings == Experiment().replace(
        method="fedprox",
        fedprox__mu=0.5,
        partition__kind="iid",
        share_model=False,
        prototypes__normalize=False,
        dataset__domains=("a", "b"),
        clients=4,
        dbscan__eps=0.5,
        prototypes__per_class=3,
    )


def test_every_public_flag_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["run", "--help"])
    shown = capsys.readouterr().out
    for flag in [
        "--method",
        "--rounds",
        "--clients",
        "--fraction",
        "--min-clients",
        "--seed",
        "--device",
        "--dtype",
        "--engine",
        "--evaluate-every",
        "--dataset.name",
        "--dataset.root",
        "--dataset.train-size",
        "--dataset.test-fraction",
        "--dataset.domains",
        "--partition.kind",
        "--partition.alpha",
        "--partition.min-size",
        "--partition.test",
        "--partition.classes-per-client",
        "--train.epochs",
        "--train.batch-size",
        "--train.lr",
        "--train.lr-decay",
        "--train.momentum",
        "--prototypes.per-class",
        "--prototypes.padding",
        "--prototypes.min-cluster-size",
        "--prototypes.init",
        "--prototypes.pool-ttl",
        "--contrast.form",
        "--contrast.temperature",
        "--contrast.weight",
        "--fedprox.mu",
        "--fedproto.weight",
        "--dbscan.eps",
        "--dbscan.min-samples",
        "--validation.max-norm",
        "--share-model",
        "--no-share-model",
        "--partition.balanced",
        "--prototypes.normalize",
        "--resume",
        "--out",
        "--json",
        "--predictors",
    ]:
        assert flag in shown, flag


# Models of clients


def test_model_of_a_client_is_by_name_then_by_pattern_then_that_of_all() -> None:
    clients = {"lab-*": "a:b", "lab-2": "cnn", "*-3": "linear"}
    made = Experiment(model={"name": "mlp", "hidden": (4,), "norm": "group", "clients": clients})
    found = made.model.of_clients(["lab-1", "lab-2", "lab-3", "x-3", "x-4"])
    names = ["a:b", "cnn", "a:b", "linear", "mlp"]
    assert [each.name for each in found.values()] == names
    # Each model has the settings that it takes.
    assert [each.hidden for each in found.values()] == [(), (4,), (), (), (4,)]
    assert [each.norm for each in found.values()] == ["none", "group", "none", "none", "none"]
    assert Experiment().model.of_clients(["lab-1"]) == {}


def test_models_of_clients_are_a_table_or_flags() -> None:
    document = '[model.clients]\nnorth = "resnet8"\n"clinic-*" = "a:b"\n'
    entries = ("north=resnet8", "clinic-*=a:b")
    assert Experiment.parse_toml(document, NOWHERE).model.clients == entries
    parsed = parse(["run", "--model.clients", *entries]).settings.model
    assert parsed.clients == entries
    assert "clients" not in tomllib.loads(Experiment().to_toml())["model"]


@pytest.mark.parametrize(
    ("clients", "reason"),
    [
        (["north"], "model.clients is 'north'; it must be CLIENT=MODEL, such as north=resnet8."),
        (["=mlp"], "model.clients is '=mlp'; it must be CLIENT=MODEL, such as north=resnet8."),
        ({"a": "resnet9"}, "model.clients is 'resnet9'; it must be one of mlp, linear, cnn,"),
        (["a=mlp", "a=cnn"], "model.clients is ('a=mlp', 'a=cnn'); it must name a client once."),
    ],
)
def test_invalid_models_of_clients_are_rejected(clients: Any, reason: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(reason)):
        Experiment(model={"clients": clients})


def test_image_models_of_clients_turn_the_encoder_off() -> None:
    choices = {"dataset__name": "cifar10", "model__clients": {"a": "resnet8"}}
    assert Experiment().replace(**choices).resolved().encoder.name == "none"
    with pytest.raises(InvalidInput, match="'resnet8', which takes images; with encoder"):
        Experiment().replace(encoder__name="resnet18", **choices).resolved()
