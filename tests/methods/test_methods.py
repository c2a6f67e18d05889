"""The methods: their losses by hand, and how they are related."""

from collections.abc import Sequence
from pathlib import Path

import numpy
import pytest
import torch
from numpy.typing import NDArray
from tiny_method_inputs import (
    DIMENSION,
    NUM_CLASSES,
    SCAFFOLD,
    make_batch,
    make_broadcast,
    make_context,
    make_method,
    make_params,
    make_pool,
)

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment import Experiment
from mpfedcl.methods import PREDICTORS, Batch, built_in_methods, prototype_rule
from mpfedcl.prototypes import PrototypePool, Prototypes
from mpfedcl.rounds.loop import RoundLoop
from small_experiments import METHODS, assert_same_tensors, build_federation, small

pytestmark = pytest.mark.usefixtures("example_methods")

Array = NDArray[numpy.float64]


# By hand


def embed(params: Tensors, batch: Batch) -> tuple[Array, Array]:
    v = batch.inputs.numpy() @ params["w"].numpy()
    return v, v @ params["c"].numpy()


def cross_entropy(logits: Array, labels: Sequence[int]) -> float:
    rows = [numpy.log(numpy.exp(row).sum()) - row[y] for row, y in zip(logits, labels, strict=True)]
    return float(numpy.mean(rows))


@pytest.mark.parametrize("name", ["local", "fedavg", SCAFFOLD])
def test_loss_is_cross_entropy(name: str) -> None:
    method, params, batch = make_method(name), make_params(), make_batch()
    _, logits = embed(params, batch)
    found = method.loss(params, batch, make_context(method))
    assert float(found) == pytest.approx(cross_entropy(logits, batch.labels.tolist()), rel=1e-12)


def test_fedprox_penalizes_distance_to_the_start_of_the_round() -> None:
    method = make_method("fedprox", fedprox__mu=0.3)
    params, batch, context = make_params(), make_batch(), make_context(make_method("fedprox"))
    distance = sum(float((params[n] - context.start[n]).square().sum()) for n in params)
    _, logits = embed(params, batch)
    wanted = cross_entropy(logits, batch.labels.tolist()) + 0.3 / 2 * distance
    assert float(method.loss(params, batch, context)) == pytest.approx(wanted, rel=1e-12)


def test_fedprox_has_a_gradient_through_the_weights() -> None:
    method, plain = make_method("fedprox", fedprox__mu=0.3), make_method("fedavg")
    params, batch, context = make_params(), make_batch(), make_context(method)
    pulled = torch.func.grad(lambda p: method.loss(p, batch, context))(params)
    free = torch.func.grad(lambda p: plain.loss(p, batch, context))(params)
    for name in params:
        wanted = 0.3 * (params[name] - context.start[name])
        torch.testing.assert_close(pulled[name] - free[name], wanted, rtol=1e-9, atol=1e-12)


def test_fedproto_pulls_to_the_mean_of_the_owners_means() -> None:
    method = make_method("fedproto", fedproto__weight=0.7)
    pool = make_pool(method)
    params, batch = make_params(), make_batch((0, 1, 2, 3, 3, 1))
    a, b = pool.of("a").vectors.numpy(), pool.of("b").vectors.numpy()
    aims = {0: (a[0] + b[0]) / 2, 1: (a[1] + b[1]) / 2, 2: b[2]}
    v, logits = embed(params, batch)
    labels = batch.labels.tolist()
    # Class 3 has no prototype: its samples count in the cross-entropy and not in the pull.
    pulls = [((v[i] - aims[y]) ** 2).mean() for i, y in enumerate(labels) if y in aims]
    wanted = cross_entropy(logits, labels) + 0.7 * numpy.mean(pulls)
    found = method.loss(params, batch, make_context(method))
    assert float(found) == pytest.approx(wanted, rel=1e-12)


def test_fedproto_weighs_owners_equally() -> None:
    method = make_method("fedproto")
    pool = PrototypePool.gather(
        {
            "a": Prototypes(torch.zeros(1, DIMENSION), torch.tensor([0]), torch.tensor([1000])),
            "b": Prototypes(torch.ones(1, DIMENSION), torch.tensor([0]), torch.tensor([1])),
        },
        num_classes=NUM_CLASSES,
        num_prototypes=1,
    )
    vectors, present = method.prepare(make_broadcast(method, pool))
    assert vectors[0].tolist() == [0.5] * DIMENSION
    assert present.tolist() == [True, False, False, False]


def contrast_by_hand(v: Array, labels: Sequence[int], grid: Array, present: Sequence[int]) -> float:
    """L_R term by term, as the equation is written."""
    terms = []
    for row, y in zip(v, labels, strict=True):
        if y not in present:
            continue
        z = row / max(float(numpy.linalg.norm(row)), 1e-12)
        for client in grid:
            for slot in client:
                shares = {a: numpy.exp(z @ slot[a] / 0.07) for a in present}
                terms.append(-numpy.log(shares[y] / sum(shares.values())))
    return float(numpy.mean(terms)) if terms else 0.0


@pytest.mark.parametrize("padding", ["all", "fill"])
def test_mp_fedcl_contrasts_with_the_padded_grid(padding: str) -> None:
    method = make_method("mp-fedcl", contrast__weight=0.5, prototypes__padding=padding)
    pool = make_pool(method)
    a, b = pool.of("a").vectors.numpy(), pool.of("b").vectors.numpy()
    mean_1 = (a[2] + b[2] + b[3]) / 3
    absent = numpy.zeros(DIMENSION)
    # Rows: clients; then slots; then classes. Client a holds one prototype of class 1 and none of
    # class 2, client b one of class 2: those slots are padded with the mean of all of the class.
    keep = padding == "fill"
    grid = numpy.array(
        [
            [[a[0], a[2] if keep else mean_1, b[4], absent], [a[1], mean_1, b[4], absent]],
            [[b[0], b[2], b[4], absent], [b[1], b[3], b[4], absent]],
        ]
    )
    params, batch = make_params(), make_batch((0, 1, 2, 3, 1))
    v, logits = embed(params, batch)
    labels = batch.labels.tolist()
    contrast = contrast_by_hand(v, labels, grid, (0, 1, 2))
    assert contrast > 0.1
    found = method.loss(params, batch, make_context(method))
    wanted = cross_entropy(logits, labels) + 0.5 * contrast
    assert float(found) == pytest.approx(wanted, rel=1e-10)


def test_sp_fedcl_contrasts_with_one_prototype_per_class() -> None:
    method = make_method("sp-fedcl")
    pool = make_pool(method)
    a, b = pool.of("a").vectors.numpy(), pool.of("b").vectors.numpy()
    absent = numpy.zeros(DIMENSION)
    grid = numpy.array([[[a[0], a[1], b[2], absent]], [[b[0], b[1], b[2], absent]]])
    params, batch = make_params(), make_batch()
    v, logits = embed(params, batch)
    labels = batch.labels.tolist()
    wanted = cross_entropy(logits, labels) + contrast_by_hand(v, labels, grid, (0, 1, 2))
    assert float(method.loss(params, batch, make_context(method))) == pytest.approx(wanted)


@pytest.mark.parametrize("name", ["fedproto", "sp-fedcl", "dp-fedcl", "mp-fedcl"])
def test_empty_pool_leaves_only_cross_entropy(name: str) -> None:
    method = make_method(name)
    empty = PrototypePool.empty(
        NUM_CLASSES, DIMENSION, prototype_rule(method).num_prototypes, dtype=torch.float64
    )
    context = make_context(method, make_broadcast(method, empty))
    params, batch = make_params(), make_batch()
    _, logits = embed(params, batch)
    wanted = cross_entropy(logits, batch.labels.tolist())
    assert float(method.loss(params, batch, context)) == pytest.approx(wanted, rel=1e-12)
    gradients = torch.func.grad(lambda p: method.loss(p, batch, context))(params)
    plain = torch.func.grad(lambda p: make_method("fedavg").loss(p, batch, context))(params)
    for gradient_name, gradient in plain.items():
        torch.testing.assert_close(gradients[gradient_name], gradient)


# How they are related


def after_rounds(experiment: Experiment, rounds: int = 3) -> RoundLoop:
    federation = build_federation(experiment)
    for _ in range(rounds):
        federation.run_round(evaluate=False)
    return federation


def test_fedprox_with_mu_0_equals_fedavg(images: Path) -> None:
    prox = after_rounds(small(images, "fedprox", fedprox__mu=0.0, engine="loop"))
    average = after_rounds(small(images, "fedavg", engine="loop"))
    assert_same_tensors(prox.state.server.params, average.state.server.params)
    pulled = after_rounds(small(images, "fedprox", fedprox__mu=5.0))
    bias = "classifier.bias"
    assert not torch.equal(pulled.state.server.params[bias], prox.state.server.params[bias])


@pytest.mark.parametrize("method", ["mp-fedcl", "sp-fedcl", "dp-fedcl"])
def test_zero_contrast_weight_equals_fedavg(images: Path, method: str) -> None:
    contrast = after_rounds(small(images, method, contrast__weight=0.0))
    average = after_rounds(small(images, "fedavg"))
    assert_same_tensors(contrast.state.server.params, average.state.server.params)
    assert len(contrast.pool) > 0
    assert len(average.pool) == 0


def test_sp_fedcl_equals_mp_fedcl_with_one_prototype(images: Path) -> None:
    single = after_rounds(small(images, "sp-fedcl"))
    multiple = after_rounds(small(images, "mp-fedcl", prototypes__per_class=1))
    assert_same_tensors(single.state.server.params, multiple.state.server.params)
    assert torch.equal(single.pool.vectors, multiple.pool.vectors)
    assert torch.equal(single.pool.counts, multiple.pool.counts)


def test_local_models_are_never_sent(images: Path) -> None:
    federation = build_federation(small(images, "local"))
    before = dict(federation.state.server.params)
    for _ in range(2):
        federation.run_round(evaluate=False)
    assert_same_tensors(federation.state.server.params, before)
    assert federation.global_model is None
    models = dict(federation.engine.personal_models({}))
    assert list(models) == ["client-0", "client-1", "client-2"]
    assert not torch.equal(*(models[name]["classifier.bias"] for name in list(models)[:2]))


def test_prototypes_can_be_shared_without_the_model(images: Path) -> None:
    federation = build_federation(small(images, "mp-fedcl", share_model=False))
    record = federation.run_round(evaluate=True)
    assert record.sent["parameters"] == 0
    assert record.sent["prototype_floats"] > 0
    assert federation.global_model is None
    assert record.accuracy is not None
    assert record.accuracy["local_test"]["global_classifier"] is None
    assert record.accuracy["local_test"]["personal_prototype"] is not None


@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
def test_methods_that_share_only_the_model_must_share_it(method: str) -> None:
    with pytest.raises(InvalidInput, match=f"share_model is False; {method} averages models"):
        make_method(method, share_model=False)


def test_built_in_methods_are_complete_and_sorted() -> None:
    methods = built_in_methods()
    assert {*METHODS} <= {*methods}
    assert list(methods) == sorted(methods)
    for name, method in methods.items():
        assert method.name == name
        assert method.summary
        assert {
            method.primary_predictor,
            method.primary_predictor_global or method.primary_predictor,
        } <= {*PREDICTORS}
    prototype = ("personal_prototype", "global_prototype")
    headlines = {
        name: (each.primary_predictor, each.primary_predictor_global)
        for name, each in methods.items()
    }
    assert {name: headlines[name] for name in (*METHODS, "fedgauss", "local-gauss")} == {
        "local": ("personal_classifier", None),
        "fedavg": ("global_classifier", None),
        "fedprox": ("global_classifier", None),
        "fedproto": ("personal_prototype", None),
        "sp-fedcl": prototype,
        "dp-fedcl": prototype,
        "mp-fedcl": prototype,
        "fedgauss": ("personal_classifier_prior", "global_classifier"),
        "local-gauss": ("personal_classifier_prior", "personal_classifier"),
    }
