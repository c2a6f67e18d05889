"""How often a run is evaluated: a rule of counts alone, and what it spares changes no number."""

from pathlib import Path

import pytest
import torch

from mpfedcl import Experiment
from mpfedcl.methods import PREDICTORS, TESTS, PredictorName, find_method
from mpfedcl.rounds.evaluation import WantedPredictors, wanted_predictors
from mpfedcl.rounds.evaluation_plan import Workload, choose_spacing, settle_evaluation
from small_experiments import build_federation, small

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
        # The last evaluation alone is more than the fifth, and others are not cheap.
        (10, 9, 10, 60, 10),
        # Others are: they may take a twentieth of the training.
        (10, 9, 0.5, 60, 1),
        (100, 9, 10, 1000, 20),
        (7, 0, 1, 1, 7),
        (7, 0, 0, 0, 1),
        (10**6, 1, 100, 100, 500),
    ],
)
def test_spacing(rounds: int, training: float, between: float, last: float, every: int) -> None:
    assert choose_spacing(rounds, training, between, last) == every
    spent = (rounds - 1) // every * between
    assert spent <= max(rounds * training / 4 - last, rounds * training / 20)


@pytest.mark.parametrize(
    ("method", "changes", "every"),
    [
        # All are tested on the same images, and by the global model.
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
def test_the_paper_model_on_mnist(method: str, changes: dict[str, object], every: int) -> None:
    found = find_method(method)
    experiment = Experiment(method=method).replace(**changes).resolved(found.defaults)
    settled = settle_evaluation(experiment, found(experiment, 10), MNIST)
    assert settled.evaluate_every == every
    assert settled == experiment.replace(evaluate_every=every)


def test_own_images_are_fewer_than_everybodys() -> None:
    found = find_method("local")
    experiment = Experiment(method="local").resolved()
    method = found(experiment, 10)
    matched = Workload(5, 2000, 10_000, 10_000, 798_474, 0)
    judged: tuple[PredictorName, ...] = ("personal_classifier",)
    own: WantedPredictors = {"local_test": judged, "global_test": ()}
    assert matched.predictor(method, own) * 5 == MNIST.predictor(method, own)
    # On everybody's images each model reads all.
    both = wanted_predictors(method, is_complete=False)
    assert matched.predictor(method, both) == MNIST.predictor(method, both) == 50_000 * 798_474


@pytest.mark.parametrize(
    ("clients", "taking_part", "read"),
    # A model reads 5e7; of 2,000 clients 500 train 2.25e8 a round, a quarter of 60 rounds 3.375e9,
    # of which the global model takes as much as one.
    [(1000, 1000, None), (2000, 500, 66), (2000, 2000, 100), (2000, 20, 10), (2000, 5, None)],
)
def test_of_many_clients_some_personal_models_are_read(
    clients: int, taking_part: int, read: int | None
) -> None:
    found = find_method("fedavg")
    experiment = Experiment(method="fedavg", fraction=taking_part / clients).resolved()
    many = Workload(clients, 40_000, 10_000, 10_000, 5000, 0)
    settled = settle_evaluation(experiment, found(experiment, 10), many)
    assert settled.evaluate_clients == read
    asked = experiment.replace(evaluate_clients=7)
    assert settle_evaluation(asked, found(asked, 10), many).evaluate_clients == 7


def test_the_pool_counts() -> None:
    found = find_method("mp-fedcl")
    counts = torch.tensor([[3, 0, 1], [0, 0, 9]])
    for pool_size, numbers in ((None, 3 * 2 * 4), (1, 3 * 4)):
        experiment = Experiment().replace(prototypes__per_class=2, prototypes__pool_size=pool_size)
        method = found(experiment.resolved(), 3)
        work = Workload.of(method, counts, (7, 9), parameters=50, width=4)
        assert work == Workload(2, 13, 7, 9, 50, numbers)


@pytest.mark.parametrize("test", ["shared", "matched"])
@pytest.mark.parametrize("method", ["mp-fedcl", "fedavg", "local", "fedproto", "ditto"])
def test_what_is_judged_by_is_the_same_beside_other_predictors(
    images: Path, method: str, test: str
) -> None:
    """Between rounds and in the last one, on both tests, to the last bit."""
    changes = {"partition__test": test, "dtype": "float64", "clients": 4}
    everything = build_federation(small(images, method, **changes))
    sparing = build_federation(small(images, method, **changes, evaluate_predictors="judged"))
    judged = {
        each: find_method(method)(everything._experiment, 3).predictor_on(each) for each in TESTS
    }
    for is_last in (False, False, True):
        all_read, some_read = (
            each.run_round(evaluate=True, with_confusion=is_last) for each in (everything, sparing)
        )
        assert all_read.accuracy is not None
        assert some_read.accuracy is not None
        assert some_read.accuracy_per_client == all_read.accuracy_per_client
        for each in TESTS:
            assert list(all_read.accuracy[each]) == list(PREDICTORS)
            # What was not read is not there; null would say that there is no such thing.
            expected = {judged[each]: all_read.accuracy[each][judged[each]]}
            assert some_read.accuracy[each] == (all_read.accuracy[each] if is_last else expected)
        assert some_read.calibration_bins == all_read.calibration_bins
    assert sparing.confusion == everything.confusion
