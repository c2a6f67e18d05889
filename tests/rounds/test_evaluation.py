"""The evaluation schedule and the confusion counts of the last round."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from sklearn.metrics import confusion_matrix

from mpfedcl import run
from mpfedcl.core.tensors import Tensors
from mpfedcl.data.client_data import FederatedData
from mpfedcl.data.loading import load_data_and_model
from mpfedcl.experiment import Experiment
from mpfedcl.inference.trained_run import read_pool
from mpfedcl.methods import PREDICTORS, TESTS, Method, PredictorName, find_method, prototype_rule
from mpfedcl.prototypes import PrototypePool
from mpfedcl.rounds.evaluation import (
    RoundEvaluation,
    WantedPredictors,
    Workload,
    choose_spacing,
    settle_evaluation,
    wanted_predictors,
)
from mpfedcl.rounds.metrics import count_confusions
from small_experiments import METHODS, MeddledEngine, build_federation, read_records, small

MNIST = Workload(
    num_clients=5,
    train_samples=2000,
    test_images=10_000,
    own_images=50_000,
    parameters=798_474,
    prototype_numbers=50 * 256,
)


@pytest.mark.parametrize(
    ("rounds", "training", "between", "last", "every"),
    [
        (1, 1, 1, 1, 1),
        (60, 100, 1, 6, 1),
        (60, 9, 10, 60, 10),
        (60, 9, 5, 60, 5),
        # The last evaluation takes more than its share, and the others are not cheap.
        (10, 9, 10, 60, 10),
        # Here they are cheap: they may take a twentieth of the training.
        (10, 9, 0.5, 60, 1),
        (100, 9, 10, 1000, 20),
        (7, 0, 1, 1, 7),
        (7, 0, 0, 0, 1),
        (10**6, 1, 100, 100, 500),
    ],
)
def test_evaluation_spacing_stays_within_its_share_of_time(
    rounds: int, training: float, between: float, last: float, every: int
) -> None:
    assert choose_spacing(rounds, training, between, last) == every
    spent = (rounds - 1) // every * between
    assert spent <= max(rounds * training / 4 - last, rounds * training / 20)


@pytest.mark.parametrize(
    ("method", "changes", "every"),
    [
        # All clients are tested on the same images with the global model.
        ("mp-fedcl", {}, 10),
        ("fedavg", {"train__epochs": 5}, 1),
        ("fedavg", {"evaluate_predictors": "all"}, 30),
        # Five models instead of one.
        ("local", {}, 30),
        ("local", {"evaluate_clients": 1}, 5),
        ("fedavg", {"evaluate_every": 7}, 7),
        ("fedavg", {"fraction": 0.2}, 60),
    ],
)
def test_evaluation_spacing_of_the_paper_model_on_mnist(
    method: str, changes: dict[str, object], every: int
) -> None:
    found = find_method(method)
    experiment = Experiment(method=method).replace(**changes).resolved(found.defaults)
    settled = settle_evaluation(experiment, found(experiment, 10), MNIST)
    assert settled.evaluate_every == every
    assert settled == experiment.replace(evaluate_every=every)


def test_local_test_sets_cost_less_than_the_global_one() -> None:
    found = find_method("local")
    experiment = Experiment(method="local").resolved()
    method = found(experiment, 10)
    matched = Workload(5, 2000, 10_000, 10_000, 798_474, 0)
    primary: tuple[PredictorName, ...] = ("personal_classifier",)
    own: WantedPredictors = {"local_test": primary, "global_test": ()}
    assert matched.evaluation(method.experiment, own) * 5 == MNIST.evaluation(
        method.experiment, own
    )
    # On the global test set each model predicts all images.
    both = wanted_predictors(method, is_complete=False)
    assert (
        matched.evaluation(method.experiment, both)
        == MNIST.evaluation(method.experiment, both)
        == 50_000 * 798_474
    )


@pytest.mark.parametrize(
    ("clients", "taking_part", "evaluated"),
    [(1000, 1000, None), (2000, 500, 100), (2000, 2000, 100), (2000, 5, 100)],
)
def test_some_personal_models_of_many_clients_are_evaluated(
    clients: int, taking_part: int, evaluated: int | None
) -> None:
    found = find_method("fedavg")
    experiment = Experiment(method="fedavg", fraction=taking_part / clients).resolved()
    many = Workload(clients, 40_000, 10_000, 10_000, 5000, 0)
    settled = settle_evaluation(experiment, found(experiment, 10), many)
    assert settled.evaluate_clients == evaluated
    asked = experiment.replace(evaluate_clients=7)
    assert settle_evaluation(asked, found(asked, 10), many).evaluate_clients == 7


def test_workload_includes_the_prototype_pool() -> None:
    found = find_method("mp-fedcl")
    counts = torch.tensor([[3, 0, 1], [0, 0, 9]])
    for pool_size, values in ((None, 3 * 2 * 4), (1, 3 * 4)):
        experiment = Experiment().replace(prototypes__per_class=2, prototypes__pool_size=pool_size)
        method = found(experiment.resolved(), 3)
        work = Workload.of(method, counts, (7, 9), parameters=50, width=4)
        assert work == Workload(2, 13, 7, 9, 50, values)


@pytest.mark.parametrize("test", ["shared", "matched"])
@pytest.mark.parametrize("method", ["mp-fedcl", "fedavg", "local", "fedproto", "ditto"])
def test_primary_metrics_do_not_depend_on_other_predictors(
    images: Path, method: str, test: str
) -> None:
    """Compare between rounds and in the last one, on both test sets, bit by bit."""
    changes = {"partition__test": test, "dtype": "float64", "clients": 4}
    everything = build_federation(small(images, method, **changes))
    sparing = build_federation(small(images, method, **changes, evaluate_predictors="primary"))
    primary = {
        each: find_method(method)(everything._experiment, 3).predictor_on(each) for each in TESTS
    }
    for is_last in (False, False, True):
        complete, partial = (
            each.run_round(evaluate=True, with_confusion=is_last) for each in (everything, sparing)
        )
        assert complete.accuracy is not None
        assert partial.accuracy is not None
        assert partial.accuracy_per_client == complete.accuracy_per_client
        for each in TESTS:
            assert list(complete.accuracy[each]) == list(PREDICTORS)
            # Metrics that were not evaluated are absent; null means that the method has none.
            expected = {primary[each]: complete.accuracy[each][primary[each]]}
            assert partial.accuracy[each] == (complete.accuracy[each] if is_last else expected)
    assert sparing.confusion == everything.confusion


Json = dict[str, Any]

pytestmark = pytest.mark.usefixtures("small_models")


def confusion_of(path: Path) -> Json:
    content: Json = json.loads((path / "confusion.json").read_text())
    return content


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-1, 4))))
def test_confusion_counts_equal_scikit_learn(pairs: list[tuple[int, int]]) -> None:
    truth = torch.tensor([true for true, _ in pairs], dtype=torch.int64)
    predicted = torch.tensor([each for _, each in pairs], dtype=torch.int64)
    counts = count_confusions(predicted, truth, 5)
    assert len(counts) == 5
    if pairs:
        labels = [*range(5), -1]
        expected = confusion_matrix(truth.numpy(), predicted.numpy(), labels=labels)[:5]
        assert counts == expected.tolist()


@pytest.mark.parametrize("method", METHODS)
def test_confusion_file_agrees_with_the_saved_models(
    images: Path, tmp_path: Path, method: str
) -> None:
    """Predict again from the files only, one image at a time, and count."""
    experiment = small(images, method, dtype="float64", partition__test="matched", rounds=2)
    run(experiment, tmp_path / "run")
    found = confusion_of(tmp_path / "run")
    resolved = experiment.resolved(find_method(method).defaults)
    data, model = load_data_and_model(resolved, torch.device("cpu"))
    rule = find_method(method)(resolved, data.num_classes)
    expected = {}
    for client in data.clients:
        personal = rule.primary_predictor.startswith("personal")
        file = f"models/{client.name}.safetensors" if personal else "model.safetensors"
        embeddings, logits = model.apply(load_file(tmp_path / "run" / file), data.test_inputs)
        predicted = logits.argmax(1)
        if rule.primary_predictor.endswith("prototype"):
            predicted = nearest_slowly(tmp_path / "run", rule, data, embeddings)
        counts = numpy.zeros((data.num_classes, data.num_classes), dtype=int)
        for place in client.test.tolist():
            counts[int(data.test_labels[place]), int(predicted[place])] += 1
        expected[client.name] = counts.tolist()
    assert found["clients"] == expected
    assert found["classes"] == list(data.class_names)
    assert found["predictor"] == rule.primary_predictor
    assert found["round"] == 2
    assert found["unanswered"] == {}


def nearest_slowly(
    path: Path, method: Method, data: FederatedData, embeddings: torch.Tensor
) -> torch.Tensor:
    pool = prototype_rule(method).reference(read_pool(path / "pool.safetensors", data.num_classes))
    predicted = []
    for vector in prototype_rule(method).project(embeddings):
        distances = [float((vector - prototype).norm()) for prototype in pool.vectors]
        predicted.append(int(pool.labels[numpy.argmin(distances)]))
    return torch.tensor(predicted)


@pytest.mark.parametrize("method", METHODS)
def test_diagonal_of_the_confusions_is_the_accuracy(
    images: Path, tmp_path: Path, method: str
) -> None:
    run(small(images, method, rounds=1), tmp_path / "run")
    accuracy = read_records(tmp_path / "run")[-1]["accuracy_per_client"]
    for name, counts in confusion_of(tmp_path / "run")["clients"].items():
        matrix = numpy.array(counts)
        assert 100 * matrix.trace() / matrix.sum() == pytest.approx(accuracy[name])


def test_confusions_cover_only_evaluated_clients(images: Path, tmp_path: Path) -> None:
    run(small(images, "local", clients=4, evaluate_clients=2), tmp_path / "run")
    accuracy = read_records(tmp_path / "run")[-1]["accuracy_per_client"]
    read = [name for name, value in accuracy.items() if value is not None]
    assert len(read) == 2
    assert list(confusion_of(tmp_path / "run")["clients"]) == read


def test_confusions_are_of_the_last_round(images: Path, tmp_path: Path) -> None:
    asked: list[bool] = []

    class Watched(MeddledEngine):
        def evaluate(
            self,
            averaged: Tensors | None,
            pool: PrototypePool | None,
            names: Sequence[str],
            *,
            with_confusion: bool = False,
        ) -> RoundEvaluation | None:
            asked.append(with_confusion)
            return super().evaluate(averaged, pool, names, with_confusion=with_confusion)

    federation = build_federation(small(images), Watched)
    federation.run_round(evaluate=True)
    assert federation.confusion == {}
    federation.run_round(evaluate=True, with_confusion=True)
    assert len(federation.confusion) == 3
    federation.run_round(evaluate=False, with_confusion=True)
    assert federation.confusion == {}
    assert asked == [False, True]


def test_images_without_a_prediction_are_counted_separately(images: Path, tmp_path: Path) -> None:
    """Use clusters that are too small to be sent: the empty pool predicts nothing."""
    experiment: Experiment = small(images, prototypes__min_cluster_size=10_000)
    run(experiment, tmp_path / "run")
    found = confusion_of(tmp_path / "run")
    counts = {name: numpy.array(each) for name, each in found["clients"].items()}
    assert all(each.sum() == 0 for each in counts.values())
    assert {name: sum(each) for name, each in found["unanswered"].items()} == dict.fromkeys(
        counts, 30
    )
