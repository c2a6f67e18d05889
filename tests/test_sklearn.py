"""`FederatedClassifier`: scikit-learn's own checks, its tools, and oracles for what it predicts."""

import copy
import doctest
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import sklearn
import torch
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.linear_model import Ridge
from sklearn.metrics import accuracy_score
from sklearn.model_selection import (
    GridSearchCV,
    GroupKFold,
    LeaveOneGroupOut,
    StratifiedKFold,
    cross_val_score,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

import mpfedcl.sklearn
from feature_maps import features_of
from mpfedcl import Experiment, InvalidInput, run
from mpfedcl.sklearn import FederatedClassifier

pytestmark = pytest.mark.whole

Array = NDArray[Any]
X, CODES = load_iris(return_X_y=True)
Y = load_iris().target_names[CODES]
"""Labels are words."""
SITES = numpy.array(["St. Mary's/A", "Nord", "Ägypten"] * 50)
"""Clients whose names no file can have."""
SETTINGS: dict[str, Any] = {"train": {"lr": 0.1}}


@parametrize_with_checks(  # type: ignore[untyped-decorator]
    [
        FederatedClassifier(),
        FederatedClassifier("fedavg", rounds=20, model="linear", settings=SETTINGS),
    ]
)
def test_passes_every_check_of_scikit_learn(estimator: Any, check: Callable[[Any], None]) -> None:
    check(estimator)


def test_docstring_example_runs() -> None:
    assert doctest.testmod(mpfedcl.sklearn).attempted
    assert doctest.testmod(mpfedcl.sklearn).failed == 0


# What it predicts


@pytest.mark.parametrize("groups", [None, SITES])
def test_fedridge_equals_ridge_regression_on_all_samples(groups: Array | None) -> None:
    """However samples are split: the pooled classifier would miss any that was held out."""
    fitted = FederatedClassifier("fedridge", clients=7).fit(X, Y, groups)
    features = features_of(X)
    # The norms are 1, so that the trace of the second moment is the number of samples.
    oracle = Ridge(alpha=0.1 * len(X) / features.shape[1], fit_intercept=False, tol=1e-12)
    scores = oracle.fit(features, numpy.eye(3)[CODES]).predict(features)
    shares = numpy.exp(scores) / numpy.exp(scores).sum(axis=1, keepdims=True)
    numpy.testing.assert_allclose(fitted.predict_proba(X), shares, atol=1e-9)
    assert (fitted.predict(X) == fitted.classes_[scores.argmax(axis=1)]).all()


@pytest.mark.parametrize("method", ["fedgauss", "fedavg", "mp-fedcl", "fedper"])
def test_predicts_as_the_run_with_the_same_clients(method: str, tmp_path: Path) -> None:
    fitted = FederatedClassifier(method, rounds=10, random_state=3, settings=SETTINGS)
    fitted.fit(X, Y, SITES)
    data = {}
    for place, site in enumerate(fitted.clients_):
        own = numpy.flatnonzero(site == SITES)
        data[f"client-{place}"] = (X[own], CODES[own]), (X[own[:1]], CODES[own[:1]])
    experiment = Experiment(method=method, rounds=10, seed=3, dtype="float64", **SETTINGS)
    result = run(experiment, tmp_path / "run", data=data)
    for place, site in enumerate(fitted.clients_):
        # FedAvg has one model for all; that of a client is only where its training ended.
        said = result.predictor(None if method == "fedavg" else f"client-{place}").predict(X)
        codes = [int(each.label) for each in said]
        assert fitted.predict(X, groups=site).tolist() == fitted.classes_[codes].tolist()
        if said[0].probabilities is not None:
            shares = [list((each.probabilities or {}).values()) for each in said]
            numpy.testing.assert_allclose(fitted.predict_proba(X, site), shares, rtol=1e-9)
    if method != "fedper":
        codes = [int(each.label) for each in result.predictor().predict(X)]
        assert fitted.predict(X).tolist() == fitted.classes_[codes].tolist()


def test_each_sample_is_predicted_for_its_client() -> None:
    fitted = FederatedClassifier().fit(X, Y, SITES)
    found = fitted.predict_proba(X, groups=SITES)
    assert fitted.clients_.tolist() == sorted(set(SITES))
    for site in fitted.clients_:
        own = fitted.predict_proba(X, groups=site)
        numpy.testing.assert_allclose(own[site == SITES], found[site == SITES])
        assert not numpy.allclose(own[site != SITES], found[site != SITES], rtol=1e-3)


@pytest.mark.parametrize("method", ["fedlda", "fedavg"])
def test_method_without_personalized_models_predicts_with_the_global_one(method: str) -> None:
    fitted = FederatedClassifier(method, settings=SETTINGS).fit(X, Y, SITES)
    numpy.testing.assert_allclose(fitted.predict_proba(X, SITES), fitted.predict_proba(X))


def test_score_is_the_accuracy() -> None:
    fitted = FederatedClassifier(clients=3).fit(X, Y)
    weights = numpy.linspace(0, 1, len(X))
    assert fitted.score(X, Y) == accuracy_score(Y, fitted.predict(X)) > 0.9
    assert fitted.score(X, Y, weights) == accuracy_score(
        Y, fitted.predict(X), sample_weight=weights
    )
    own = numpy.arange(len(X)) % 3
    personal = accuracy_score(Y, fitted.predict(X, groups=own))
    assert fitted.score(X, Y, groups=own) == personal


def test_single_group_is_one_client() -> None:
    alone = FederatedClassifier("fedlda").fit(X, Y, ["home"] * len(X))
    other = FederatedClassifier("fedlda", clients=1).fit(X, Y)
    assert alone.clients_.tolist() == ["home"]
    numpy.testing.assert_array_equal(alone.predict_proba(X), other.predict_proba(X))


def test_random_state_is_the_seed() -> None:
    def fit(state: Any) -> Array:
        skew = {"partition": {"kind": "label", "alpha": 0.3}}
        found = FederatedClassifier(clients=4, random_state=state, settings=skew).fit(X, Y)
        return numpy.asarray(found.predict_proba(X))

    assert numpy.array_equal(fit(5), fit(5))
    assert not numpy.array_equal(fit(5), fit(6))
    assert not numpy.array_equal(fit(None), fit(None))
    random = numpy.random.RandomState
    assert numpy.array_equal(fit(random(5)), fit(random(5)))


# Tools of scikit-learn


def test_cross_validation_by_client_equals_a_loop() -> None:
    """A client that is tested on takes no part in training."""
    groups, scores = numpy.arange(len(X)) % 5, []
    for train, test in LeaveOneGroupOut().split(X, Y, groups):
        fitted = FederatedClassifier().fit(X[train], Y[train], groups[train])
        assert len(fitted.clients_) == 4
        scores.append(fitted.score(X[test], Y[test]))
    given = {"groups": groups}
    found = cross_val_score(
        FederatedClassifier(), X, Y, groups=groups, cv=LeaveOneGroupOut(), params=given
    )
    assert found.tolist() == scores
    assert min(scores) > 0.85


def test_routed_groups_reach_splitter_training_and_score() -> None:
    def validate(estimator: Any, cv: Any) -> list[float]:
        with sklearn.config_context(enable_metadata_routing=True):
            found = cross_val_score(estimator, X, Y, cv=cv, params={"groups": SITES})
        return [float(each) for each in found]

    with sklearn.config_context(enable_metadata_routing=True):
        global_model = FederatedClassifier().set_fit_request(groups=True)
        global_model = global_model.set_score_request(groups=False)
        personal = clone(global_model).set_score_request(groups=True)
    by_client = make_pipeline(StandardScaler(), global_model)
    assert len(validate(by_client, GroupKFold(3))) == 3
    scores = []
    for train, test in StratifiedKFold(3).split(X, Y):
        fitted = FederatedClassifier().fit(X[train], Y[train], SITES[train])
        scores.append(fitted.score(X[test], Y[test], groups=SITES[test]))
    assert validate(personal, StratifiedKFold(3)) == scores


def test_grid_search_takes_settings_and_parameters() -> None:
    search = GridSearchCV(
        FederatedClassifier("fedavg", model="linear", clients=2, rounds=20),
        {"settings": [{"train": {"lr": 1e-6}}, {"train": {"lr": 0.1}}]},
        cv=3,
    )
    assert search.fit(X, Y).best_params_ == {"settings": {"train": {"lr": 0.1}}}


def make_network(num_classes: int, input_shape: tuple[int, int]) -> nn.Module:
    size = 4 * (input_shape[1] - 2)
    return nn.Sequential(
        nn.Conv1d(input_shape[0], 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(size, num_classes)
    )


@pytest.mark.parametrize("is_module", [False, True])
def test_own_model_on_series_is_cloned_and_copied(is_module: bool) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make_network(2, (2, 10)) if is_module else make_network
    series = numpy.random.default_rng(1).normal(size=(60, 2, 10))
    labels = series[:, 0].mean(axis=1) > 0
    unfitted = FederatedClassifier(
        "fedavg", model=model, rounds=30, settings={"train": {"lr": 0.3, "epochs": 3}}
    )
    fitted = clone(unfitted).fit(series, labels)
    assert fitted.predict(series).dtype == bool
    assert fitted.score(series, labels) > 0.8
    copied = copy.deepcopy(fitted)
    numpy.testing.assert_array_equal(copied.predict_proba(series), fitted.predict_proba(series))


def test_nothing_is_left_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    FederatedClassifier().fit(X, Y).predict(X)
    with pytest.raises(InvalidInput):
        FederatedClassifier("fedavgg").fit(X, Y)
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "here", tmp_path / "temporary"]


# What is refused


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"method": "fedavgg"}, "method is 'fedavgg'; it must be one of those that"),
        ({"method": None}, "method is 'None'; it must be one of"),
        ({"rounds": 0}, "rounds is 0; it must be greater than or equal to 1."),
        ({"clients": 151}, "clients is 151; it must be at most 150"),
        ({"random_state": -1}, "seed is -1; it must be greater than or equal to 0."),
        ({"settings": [1]}, "settings is [1]; it must be a dictionary of settings by name,"),
        ({"settings": {1: 2}}, "settings is {1: 2}; it must be a dictionary of settings by name,"),
        ({"settings": {"lr": 1}}, "lr is not a setting; did you mean train.lr?"),
        ({"method": "fedavg", "model": 3}, "model is int 3; it must be a torch.nn.Module, a"),
    ],
)
def test_invalid_parameters_give_one_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        FederatedClassifier(**given).fit(X, Y)
    assert str(refused.value).startswith(sentence)
    assert "\n" not in str(refused.value)


def test_missing_and_unknown_clients_are_refused() -> None:
    missing = [*SITES[:-1], None]
    with pytest.raises(InvalidInput, match=r"^groups has a missing value; it must name the clie"):
        FederatedClassifier().fit(X, Y, missing)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        FederatedClassifier().fit(X, Y, SITES[1:])
    fitted = FederatedClassifier().fit(X, Y, SITES)
    with pytest.raises(InvalidInput) as refused:
        fitted.predict(X, groups="Süd")
    assert str(refused.value) == (
        "groups has Süd, for which fit kept no model; it must be left out or have "
        "Nord, St. Mary's/A, Ägypten."
    )
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        fitted.predict(X, groups=SITES[1:])
    settings = {"most_personal_models": 1}
    limited = FederatedClassifier(settings=settings).fit(X, Y, SITES)
    with pytest.raises(InvalidInput, match=r"left out or have Nord\.$"):
        limited.predict(X, groups=SITES)
    without = FederatedClassifier(settings={"personal_models": False}).fit(X, Y, SITES)
    with pytest.raises(InvalidInput, match=r"Nord, for which fit kept no model; .* left out\.$"):
        without.predict(X, groups="Nord")


def test_privacy_budget_leaves_the_global_model() -> None:
    fitted = FederatedClassifier(settings={"privacy": {"epsilon": 5.0}}).fit(X, Y, SITES)
    numpy.testing.assert_allclose(fitted.predict_proba(X, SITES), fitted.predict_proba(X))


def test_method_without_global_model_needs_the_clients() -> None:
    fitted = FederatedClassifier("local", rounds=10, settings=SETTINGS).fit(X, Y, SITES)
    assert fitted.score(X, Y, groups=SITES) > 0.6
    with pytest.raises(InvalidInput, match=r"^groups is not given, and local has no global model"):
        fitted.predict(X)
