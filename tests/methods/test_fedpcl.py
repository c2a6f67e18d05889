"""FedPCL: both contrasts by plain loops, the idle classifier, and prediction by own prototypes."""

import math
from pathlib import Path

import numpy
import pytest
import torch
from identities import after_rounds, begin, both_engines, differ, models_of, slopes_of
from tiny_method_inputs import (
    NUM_CLASSES,
    apply,
    make_batch,
    make_broadcast,
    make_context,
    make_method,
    make_params,
    make_pool,
)

from mpfedcl import Predictor, run
from mpfedcl.methods import PREDICTORS
from mpfedcl.prototypes import PrototypePool
from small_experiments import assert_same_tensors, small

TEMPERATURE = 0.5


def contrast(z: list[float], sets: list[dict[int, list[float]]], label: int) -> float:
    """Mean over the sets of -log softmax over the classes that are there."""
    total = 0.0
    for vectors in sets:
        powers = {c: math.exp(numpy.dot(z, u) / TEMPERATURE) for c, u in vectors.items()}
        total -= math.log(powers[label] / sum(powers.values()))
    return total / len(sets)


def sets_of(pool: PrototypePool) -> tuple[dict[int, list[float]], list[dict[int, list[float]]]]:
    """Return the mean over the owners, and each client's set with that where it has nothing."""
    own = [
        {int(c): v.tolist() for c, v in zip(pool.of(n).labels, pool.of(n).vectors, strict=True)}
        for n in pool.names
    ]
    averaged = {}
    for c in range(NUM_CLASSES):
        if held := [each[c] for each in own if c in each]:
            averaged[c] = numpy.mean(held, axis=0).tolist()
    return averaged, [averaged | each for each in own]


def test_loss_matches_a_double_loop() -> None:
    method = make_method("fedpcl", fedpcl__temperature=TEMPERATURE)
    params, batch, pool = make_params(3), make_batch((0, 1, 2, 3, 1)), make_pool(method)
    averaged, each = sets_of(pool)
    losses = []
    for v, label in zip(
        apply(params, batch.inputs)[0].tolist(), batch.labels.tolist(), strict=True
    ):
        if label in averaged:
            z = [number / math.hypot(*v) for number in v]
            losses.append(contrast(z, [averaged], label) + contrast(z, each, label))
    assert len(losses) == 4
    found = method.loss(params, batch, make_context(method, make_broadcast(method, pool)))
    assert float(found) == pytest.approx(numpy.mean(losses), rel=1e-12)


def test_loss_with_one_client_in_the_pool_is_twice_sp_fedcl() -> None:
    method = make_method("fedpcl", fedpcl__temperature=TEMPERATURE)
    pool = make_pool(method).only("b")
    params, batch = make_params(3), make_batch()
    broadcast = make_broadcast(method, pool)
    loss, slopes = slopes_of(method, params, batch, make_context(method, broadcast))
    rival = make_method("sp-fedcl", contrast__temperature=TEMPERATURE)
    theirs, with_contrast = slopes_of(rival, params, batch, make_context(rival, broadcast))
    entropy = make_method("fedavg")
    plain, without = slopes_of(entropy, params, batch, make_context(entropy))
    torch.testing.assert_close(loss, 2 * (theirs - plain), rtol=1e-12, atol=1e-12)
    for name, slope in slopes.items():
        wanted = 2 * (with_contrast[name] - without[name])
        torch.testing.assert_close(slope, wanted, rtol=1e-10, atol=1e-12)


@both_engines
def test_models_do_not_change_in_the_first_round(images: Path, engine: str) -> None:
    federation = begin(images, "fedpcl", engine=engine)
    begun = dict(federation.state.server.params)
    record = federation.run_round(evaluate=False, keep_models=True)
    assert record.loss == 0
    assert record.sent["prototype_floats"] > 0
    assert record.sent["parameters"] == 0
    for params in models_of(federation).values():
        assert_same_tensors(params, begun)


@both_engines
def test_classifier_is_never_trained(images: Path, engine: str) -> None:
    federation = begin(images, "fedpcl", engine=engine, rounds=3)
    begun = dict(federation.state.server.params)
    for _ in range(3):
        federation.run_round(evaluate=False, keep_models=True)
    for params in models_of(federation).values():
        for name, value in params.items():
            assert torch.equal(value, begun[name]) == name.startswith("classifier")


@both_engines
def test_differs_from_fedavg_and_local(images: Path, engine: str) -> None:
    found = models_of(after_rounds(images, "fedpcl", engine=engine))
    for other in ("fedavg", "local"):
        wanted = models_of(after_rounds(images, other, engine=engine))
        assert all(differ(found[name], wanted[name]) for name in found)


SKEWED = {
    "partition__kind": "classes",
    "partition__classes_per_client": 1,
    "partition__test": "matched",
}


@both_engines
def test_clients_predict_by_their_own_prototypes(images: Path, engine: str) -> None:
    federation = begin(images, "fedpcl", engine=engine, **SKEWED)
    record = federation.run_round(evaluate=True)
    assert record.accuracy is not None
    own, union = record.accuracy["local_test"], record.accuracy["global_test"]
    # Each holds one class, so it names no other: right on its local test set, on a third of the
    # union.
    assert own["personal_prototype"] == pytest.approx(100)
    assert union["personal_prototype"] == pytest.approx(100 / 3)


@pytest.mark.whole
def test_loaded_predictor_uses_the_clients_own_prototypes(images: Path, tmp_path: Path) -> None:
    run(small(images, "fedpcl", **SKEWED), tmp_path)
    samples = numpy.zeros((3, 6, 6), dtype=numpy.uint8)
    samples[0, 0], samples[1, 1], samples[2, 2] = 255, 255, 255
    named = set()
    for number in range(3):
        predictor = Predictor.load(tmp_path, f"client-{number}")
        named |= {frozenset(each.label for each in predictor.predict(samples))}
    # Each names its own class, whatever it is shown.
    assert sorted(map(len, named)) == [1, 1, 1]


def test_undefined_predictors_are_null(images: Path) -> None:
    record = begin(images, "fedpcl").run_round(evaluate=True, with_confusion=True)
    assert record.accuracy is not None
    for table in record.accuracy.values():
        known = {predictor for predictor in PREDICTORS if table[predictor] is not None}
        assert known == {"personal_prototype", "personal_prototype_prior"}
    assert record.accuracy_per_client is not None
    assert None not in record.accuracy_per_client.values()


def test_embeddings_are_always_normalized() -> None:
    method = make_method("fedpcl", prototypes__normalize=False)
    (unit,) = method.project(torch.tensor([[3.0, 4.0]])).tolist()
    assert unit == pytest.approx([0.6, 0.8])
    assert method.max_norm == 1.001
