"""Settings that a class from outside brings along."""

import re
from pathlib import Path

import pytest

from mpfedcl import Experiment, InvalidInput, Method, resume, run, tune
from mpfedcl.experiment.method_settings import FedProxSettings
from mpfedcl.methods import find_method
from mpfedcl.methods.fedprox import FedProx
from mpfedcl.studies.comparison import Comparison
from pull_method import GentlePull, Pull, PullSettings
from small_experiments import assert_same_results, assert_same_run, small

PULL = "pull_method:Pull"
NOWHERE = Path("x.toml")


class OwnFedProx(FedProx):
    """A built-in method's settings are inherited."""


def test_methods_package_exports_all_that_a_method_needs() -> None:
    import mpfedcl.methods as methods

    needed = "Batch Broadcast Context Field Method PredictorName Server Settings Tensors Update"
    assert set(needed.split()) <= set(methods.__all__)
    assert all(hasattr(methods, name) for name in methods.__all__)


def test_settings_of_a_method_are_of_its_declared_class() -> None:
    experiment = Experiment(fedprox={"mu": 0.5}).resolved()
    assert type(FedProx(experiment, 3).settings) is FedProxSettings
    assert FedProx(experiment, 3).settings.mu == 0.5
    assert OwnFedProx(experiment, 3).settings.mu == 0.5
    assert type(Method(experiment, 3).settings).model_fields == {}
    find_method(PULL)
    own = Experiment(method=PULL, pull={"beta": 2, "layers": ["hidden"]}).resolved()
    assert Pull(own, 3).settings == PullSettings(beta=2.0, layers=("hidden",))
    assert GentlePull(own, 3).settings.beta == 2.0


def test_settings_are_parsed_once_the_class_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpfedcl.experiment.method_settings._declared", {})
    early = Experiment(method=PULL, pull={"beta": "2"})
    assert early.setting("pull__beta") == "2"
    assert Pull(early.resolved(), 3).settings == PullSettings(beta=2.0)
    find_method(PULL)
    assert early.resolved().setting("pull__beta") == 2.0
    wrong = early.model_copy(update={"pull": {"beta": -1}})
    for use in (wrong.resolved, lambda: Pull(wrong, 3)):
        with pytest.raises(InvalidInput, match=r"pull\.beta is -1; it must be greater than"):
            use()


def test_defaults_are_filled_in_and_unknown_names_rejected() -> None:
    find_method(PULL)
    experiment = Experiment(method=PULL)
    assert experiment.setting("pull__norm") == "square"
    assert "[pull]\nbeta = 0.01\n" in experiment.to_toml()
    assert Experiment.parse_toml(experiment.to_toml(), NOWHERE) == experiment
    with pytest.raises(InvalidInput, match=r"pull\.gamma is not a setting; \[pull\] has beta, nor"):
        experiment.replace(pull__gamma=1)
    with pytest.raises(InvalidInput, match="pul is not a setting; did you mean pull"):
        experiment.replace(pul__beta=1)
    with pytest.raises(InvalidInput, match=r"beta is not a setting; did you mean pull\.beta"):
        experiment.replace(beta=1)
    # Other methods' experiments do not speak of it.
    assert "[pull]" not in Experiment().to_toml()
    assert "[pull]" not in experiment.replace(method="fedavg").to_toml()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Careless", "whose settings have the section 'train'; it must be a name, and none of"),
        ("Nameless", "whose settings have the section ''; it must be a name, and none of"),
        (
            "Untyped",
            "whose settings are <class 'dict'>; they must be a subclass of mpfedcl.methods",
        ),
        ("Unknown", "whose annotations cannot be read (name 'Missing' is not defined)"),
        ("Copy", "the section 'pull'; it must be another one, because pull_method:Pull has this"),
    ],
)
def test_invalid_sections_are_rejected(name: str, reason: str) -> None:
    find_method(PULL)
    with pytest.raises(InvalidInput, match=re.escape(reason)):
        find_method(f"pull_method:{name}")
    find_method("pull_method:GentlePull")


@pytest.mark.whole
def test_run_trains_with_the_declared_settings(images: Path, tmp_path: Path) -> None:
    changes = {
        "dtype": "float64",
        "engine": "loop",
        "model__hidden": (8,),
        "pull__beta": 0.3,
        "pull__norm": "absolute",
    }
    experiment = small(images, PULL, **changes)
    run(experiment, tmp_path / "one")
    run(experiment.replace(rounds=1), tmp_path / "more")
    resume(tmp_path / "more", rounds=2)
    assert_same_run(tmp_path / "more", tmp_path / "one")
    run(experiment.replace(pull__beta=0.0), tmp_path / "fedavg-like")
    run(experiment.replace(method="fedavg"), tmp_path / "fedavg")
    assert_same_results(tmp_path / "fedavg-like", tmp_path / "fedavg")
    with pytest.raises(AssertionError):
        assert_same_results(tmp_path / "one", tmp_path / "fedavg")


@pytest.mark.whole
def test_tuning_searches_the_declared_settings(images: Path, tmp_path: Path) -> None:
    found = tune(small(images, rounds=2), PULL, tmp_path / "search", budget=5)
    assert found is not None
    assert found.search_space_used["pull__beta"] == (0.0, 0.01, 1.0)
    assert len({trial.values["pull__beta"] for trial in found.trials}) > 1
    assert found.trials[0].values["pull__beta"] == 0.01
    best = Experiment.from_toml(tmp_path / "search" / f"best-{PULL.replace(':', '.')}.toml")
    assert best.setting("pull__beta") == found.chosen_values["pull__beta"]


def test_comparison_gives_each_method_its_own_sections(images: Path, tmp_path: Path) -> None:
    find_method(PULL)
    base = Experiment(pull={"beta": 0.5}).replace(dataset__root=images, dataset__name="folder")
    planned = Comparison.prepare(base, [PULL, "fedavg"], [0], tmp_path).planned_runs
    assert planned[0].experiment.setting("pull__beta") == 0.5
    assert "[pull]" not in planned[1].experiment.to_toml()
