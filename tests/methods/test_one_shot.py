"""One-shot methods: scikit-learn as an oracle, exact sums, and clients that are odd."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge
from sklearn.neighbors import NearestCentroid
from torch import Tensor

from mpfedcl import run
from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.client_data import ClientData, FederatedData
from mpfedcl.engines import InProcessEngine
from mpfedcl.experiment import Experiment
from mpfedcl.gaussian import random_features
from mpfedcl.gaussian.classifier import SHRINKAGES
from mpfedcl.methods import find_method
from mpfedcl.methods.fedgauss import FedGauss
from mpfedcl.models import GaussianClassifier, make_mlp
from mpfedcl.rounds.assembly import assemble
from mpfedcl.rounds.loop import RoundLoop
from mpfedcl.rounds.record import RoundRecord
from mpfedcl.runs.observer import Observer
from small_experiments import save_vectors, small

SIZE, NUM_CLASSES = 8, 3
RANDOM = 5
WIDTH = SIZE + 1 + RANDOM
"""The number of features of a sample: its values, a constant and random features."""
FAMILY = ("fedgauss", "fedlda", "fedncm", "fedridge", "fedcof")


def features_of(inputs: Tensor) -> Tensor:
    return random_features(inputs, RANDOM)


def draw(count: int, seed: int, *, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    """Draw samples of three classes, moved by a client's own shift."""
    generator = torch.Generator().manual_seed(seed)
    means = 2 * torch.randn(NUM_CLASSES, SIZE, generator=torch.Generator().manual_seed(99))
    labels = torch.arange(count) % NUM_CLASSES
    noise = torch.randn(count, SIZE, generator=generator)
    moved = shift * torch.randn(SIZE, generator=generator)
    return (means[labels] + noise + moved).double(), labels


def federate(
    clients: dict[str, tuple[Tensor, Tensor]], method: str, **changes: Any
) -> tuple[RoundLoop, InProcessEngine, RoundRecord]:
    """Run a method on clients whose test is everybody's, in float64."""
    inputs, labels = draw(60, seed=1000)
    data = FederatedData(
        "vectors",
        tuple("abc"),
        tuple(ClientData(n, x, y, torch.arange(60)) for n, (x, y) in sorted(clients.items())),
        inputs,
        labels,
        {},
        holds_arrays=True,
    )
    wanted = Experiment(method=method, dtype="float64", clients=len(clients)).replace(
        **{
            "dataset__name": "folder",
            "encoder__name": "none",
            "evaluate_predictors": "all",
            "statistics__random_features": RANDOM,
            **changes,
        }
    )
    experiment = wanted.resolved(find_method(method).defaults)
    assembly = assemble(
        experiment,
        make_mlp(SIZE, NUM_CLASSES, (4,), is_encoded=True),
        num_classes=NUM_CLASSES,
        input_size=SIZE,
    )
    engine = InProcessEngine(assembly, data)
    loop = RoundLoop(assembly, engine)
    return loop, engine, loop.run_round(evaluate=True, keep_models=True)


def split(count: int = 60) -> dict[str, tuple[Tensor, Tensor]]:
    """Divide one draw among three clients, unevenly and by label."""
    inputs, labels = draw(count, seed=5)
    first = labels == 0
    second = ~first & (torch.arange(count) % 4 > 0)
    parts = {"a": first, "b": second, "c": ~first & ~second}
    return {name: (inputs[rows], labels[rows]) for name, rows in parts.items()}


def averaged_answers(loop: RoundLoop, inputs: Tensor) -> Tensor:
    model = loop.global_model
    assert model is not None
    return GaussianClassifier(SIZE, NUM_CLASSES, features_of).apply(model, inputs)[1]


def pooled(clients: dict[str, tuple[Tensor, Tensor]]) -> tuple[Any, Any]:
    inputs = torch.cat([x for x, _ in clients.values()])
    return features_of(inputs).numpy(), torch.cat([y for _, y in clients.values()]).numpy()


def test_fedridge_equals_ridge_regression_on_pooled_data() -> None:
    clients = split()
    loop, _, _ = federate(clients, "fedridge")
    features, labels = pooled(clients)
    # tr(M) is the number of samples, because features have length 1.
    oracle = Ridge(alpha=0.1 * len(labels) / WIDTH, fit_intercept=False)
    oracle.fit(features, numpy.eye(NUM_CLASSES)[labels])
    test, _ = draw(30, seed=8)
    found = averaged_answers(loop, test).numpy()
    numpy.testing.assert_allclose(found, oracle.predict(features_of(test).numpy()), atol=1e-10)


def test_fedncm_equals_nearest_centroid_on_pooled_data() -> None:
    clients = split()
    loop, _, record = federate(clients, "fedncm")
    oracle = NearestCentroid().fit(*pooled(clients))
    test, _ = draw(200, seed=8)
    said = averaged_answers(loop, test).argmax(dim=1).numpy()
    numpy.testing.assert_array_equal(said, oracle.predict(features_of(test).numpy()))
    assert record.accuracy is not None
    union = record.accuracy["global_test"]
    assert union["global_classifier"] == union["global_prototype"]


def test_fedlda_equals_linear_discriminant_analysis() -> None:
    """Of one client, so that the scatter within clients is the scatter within classes."""
    clients = {"a": draw(60, seed=5)}
    loop, _, _ = federate(clients, "fedlda")
    test, _ = draw(40, seed=8)
    scores = averaged_answers(loop, test).numpy()
    features, labels = pooled(clients)
    found = []
    for weight in SHRINKAGES:
        # Its covariance is divided by n, which no order of classes depends on.
        oracle = LinearDiscriminantAnalysis(
            solver="lsqr", shrinkage=weight, priors=[1 / NUM_CLASSES] * NUM_CLASSES
        ).fit(features, labels)
        theirs = oracle.decision_function(features_of(test).numpy())
        ratio = (theirs - theirs[:, :1])[:, 1:] / (scores - scores[:, :1])[:, 1:]
        found.append(ratio.std() / abs(ratio.mean()))
    # For the lambda that was chosen, all score differences have the same ratio, T (n - K) / n.
    assert min(found) < 1e-8
    assert sorted(found)[1] > 1e-3


@pytest.mark.parametrize("method", FAMILY)
def test_one_shot_method_has_one_round(method: str) -> None:
    experiment = Experiment(method=method, rounds=60).resolved(find_method(method).defaults)
    assert experiment.rounds == 1


@pytest.mark.whole
def test_requested_rounds_give_a_warning(tmp_path: Path) -> None:
    save_vectors(tmp_path / "data" / "one.npz")
    told: list[str] = []
    observer = Observer(on_warning=told.append)
    experiment = small(tmp_path / "data", "fedgauss")
    run(experiment.replace(rounds=10), tmp_path / "ten", observer)
    assert told == ["rounds is 10, but fedgauss is a one-shot method: one round is run."]
    run(experiment.replace(rounds=60), tmp_path / "sixty", observer)
    assert len(told) == 1


@pytest.mark.parametrize("method", ["fedlda", "fedncm", "fedridge"])
def test_partition_does_not_change_the_model(method: str) -> None:
    """Federated = centralised; FedLDA's scatter is within clients, so there by class only."""
    divided = split()
    inputs, labels = (torch.cat(parts) for parts in zip(*divided.values(), strict=True))
    if method == "fedlda":
        divided = {str(c): (inputs[labels == c], labels[labels == c]) for c in range(3)}
    loop, _, _ = federate(divided, method)
    whole, _, _ = federate({"all": (inputs, labels)}, method)
    for name, value in loop.state.server.params.items():
        torch.testing.assert_close(value, whole.state.server.params[name], rtol=1e-10, atol=1e-10)


def test_identical_clients_share_their_prototypes() -> None:
    clients = {str(number): draw(90, seed=number) for number in range(4)}
    loop, _, record = federate(clients, "fedgauss")
    fit = record.remarks["fit"]
    assert fit["shift"] + fit["class_effect"] < 0.02
    assert loop.state.server.params["weight"].shape[1] in (1, 4)


def test_shifted_clients_have_their_own_prototypes() -> None:
    clients = {str(number): draw(90, seed=number, shift=3.0) for number in range(4)}
    loop, engine, record = federate(clients, "fedgauss")
    assert record.remarks["fit"]["shift"] > 0.1
    assert loop.state.server.params["weight"].shape == (NUM_CLASSES, 4, WIDTH)
    models = dict(engine.personal_models({}))
    assert not torch.allclose(models["0"]["weight"], models["1"]["weight"], rtol=0.05)


def test_personal_predictor_uses_the_clients_class_prior() -> None:
    inputs, labels = draw(90, seed=3)
    clients = {"a": (inputs[labels < 2], labels[labels < 2]), "b": (inputs, labels)}
    _, engine, _ = federate(clients, "fedgauss")
    own = engine.evaluate(None, None, ["a", "b"], with_confusion=True).columns["local_test"]
    assert engine._method.primary_predictor == "personal_classifier_prior"
    # a holds no class 2: with its prior it says it less often, and is wrong on that third.
    assert own["personal_classifier_prior"][0] != own["personal_classifier"][0]


@pytest.mark.parametrize("method", [*FAMILY, "local-gauss"])
@pytest.mark.parametrize(
    "sizes",
    [{"a": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 4}, {"a": 2, "b": 40}],
    ids=["one sample", "a sample each", "one beside few", "two beside many"],
)
def test_tiny_clients_give_finite_models(method: str, sizes: dict[str, int]) -> None:
    clients = {name: draw(count, seed=7) for name, count in sizes.items()}
    loop, engine, _ = federate(clients, method)
    for params in [loop.state.server.params, *dict(engine.personal_models({})).values()]:
        assert all(bool(value.isfinite().all()) for value in params.values())


@pytest.mark.parametrize("method", FAMILY)
def test_class_without_samples_is_never_predicted(method: str) -> None:
    inputs, labels = draw(40, seed=3)
    known = labels < 2
    loop, engine, _ = federate({"a": (inputs[known], labels[known])}, method)
    test, _ = draw(60, seed=4)
    assert averaged_answers(loop, test).argmax(dim=1).max() < 2
    for params in dict(engine.personal_models({})).values():
        assert engine._model.apply(params, test)[1].argmax(dim=1).max() < 2


def test_single_samples_per_class_give_the_nearest_mean() -> None:
    inputs, labels = draw(3, seed=3)
    clients = {str(c): (inputs[c : c + 1], labels[c : c + 1]) for c in range(3)}
    loop, _, _ = federate(clients, "fedgauss")
    test, _ = draw(60, seed=4)
    said = averaged_answers(loop, test).argmax(dim=1)
    nearest = torch.cdist(features_of(test), features_of(inputs)).argmin(dim=1)
    assert torch.equal(said, labels[nearest])


def test_classes_with_few_samples_are_not_sent() -> None:
    inputs, labels = draw(30, seed=3)
    rare = torch.cat([(labels < 2).nonzero().squeeze(1), (labels == 2).nonzero().squeeze(1)[:2]])
    own = {"a": (inputs[rare], labels[rare])}
    changes = {"prototypes__min_cluster_size": 3}
    loop, engine, record = federate(own, "fedgauss", **changes)
    assert loop.pool.labels.tolist() == [0, 1]
    assert record.clients.answered == ["a"]
    # At home all classes are known.
    assert "a" in dict(engine.personal_models({}))


def test_client_with_a_nan_sample_is_rejected() -> None:
    clients = split()
    inputs, labels = clients["b"]
    broken = inputs.clone()
    broken[0, 0] = torch.nan
    loop, _, record = federate({**clients, "b": (broken, labels)}, "fedgauss")
    assert "not finite" in record.clients.rejected["b"]
    without, _, _ = federate({n: each for n, each in clients.items() if n != "b"}, "fedgauss")
    for name, value in loop.state.server.params.items():
        torch.testing.assert_close(value, without.state.server.params[name])


def test_fedcof_warns_about_few_clients() -> None:
    _, _, record = federate(split(), "fedcof")
    assert "degrees of freedom" in record.remarks["warnings"][0]


@pytest.mark.parametrize("method", FAMILY)
def test_warning_if_no_client_sends_a_class(method: str) -> None:
    loop, _, record = federate(split(), method, prototypes__min_cluster_size=1000)
    assert "No client has sent a class" in record.remarks["warnings"][0]
    assert not len(loop.pool)


def test_training_the_encoder_is_rejected() -> None:
    with pytest.raises(InvalidInput, match=r"encoder.train is True; fedgauss trains nothing"):
        federate(split(), "fedgauss", encoder__name="resnet18", encoder__train=True)


def test_order_and_seed_do_not_change_the_model() -> None:
    """The order of samples and the seed change nothing."""
    clients = split()
    turned = {n: (x.flip(0), y.flip(0)) for n, (x, y) in clients.items()}
    one, _, _ = federate(clients, "fedgauss")
    other, _, _ = federate(turned, "fedgauss", seed=3)
    for name, value in one.state.server.params.items():
        torch.testing.assert_close(value, other.state.server.params[name])


def test_remarks_report_the_estimates() -> None:
    _, _, record = federate(split(), "fedgauss")
    assert set(record.remarks["fit"]) == {
        "shrinkage",
        "temperature",
        "shift",
        "class_effect",
        "own_covariance",
    }


def test_sharpness_is_found_again_from_statistics() -> None:
    """So a client's classifier keeps it if others join or leave."""
    clients = {str(number): draw(90, seed=number, shift=3.0) for number in range(3)}
    clients["few"] = draw(9, seed=9)
    loop, engine, _ = federate(clients, "fedgauss")
    method = engine._method
    assert isinstance(method, FedGauss)
    received, found = method.prepare(loop.broadcast()), []
    for name, personal in engine.personal_models({}):
        own = method.own_statistics(method.collect(*clients[name]))
        sharpness = method.sharpness_of(received, own, personal)
        again = method.personalize_from(received, own, sharpness)
        assert again is not None
        torch.testing.assert_close(again["weight"], personal["weight"], rtol=1e-6, atol=1e-6)
        found.append(sharpness)
    assert min(found) < max(found)
