"""The methods: their losses by hand, safe under vmap, and how they are related."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpfedcl.errors import InvalidInput
from mpfedcl.exchange import Broadcast
from mpfedcl.experiment import Experiment
from mpfedcl.federation import Federation
from mpfedcl.methods import READINGS, Batch, Context, Method, built_in_methods, find_method
from mpfedcl.models import Tensors
from mpfedcl.prototypes import PrototypePool, Prototypes
from small_runs import EXAMPLES, METHODS, assert_same_tensors, build_federation, small

Array = NDArray[numpy.float64]
SCAFFOLD = "custom_method:Scaffold"
ALL_METHODS = (*METHODS, SCAFFOLD)

NUM_CLASSES, DIMENSION = 4, 3
"""Class 3 is one that nobody holds."""


@pytest.fixture(autouse=True)
def _own_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


def make_method(name: str, **changes: Any) -> Method:
    found = find_method(name)
    settings: dict[str, Any] = {"prototypes__per_class": 2, **changes}
    return found(Experiment(method=name).replace(**settings).resolved(found.defaults), NUM_CLASSES)


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def make_params(seed: int = 1) -> Tensors:
    return {"w": draw(seed, 5, DIMENSION), "c": draw(seed + 100, DIMENSION, NUM_CLASSES)}


def apply(params: Tensors, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """A model small enough for paper: v = x W, logits = v C."""
    embeddings = inputs @ params["w"]
    return embeddings, embeddings @ params["c"]


def make_batch(labels: Sequence[int] = (0, 1, 2, 1, 0), seed: int = 2) -> Batch:
    size = len(labels)
    return Batch(draw(seed, size, 5), torch.tensor(labels), torch.ones(size, dtype=torch.bool))


def make_prototypes(labels: Sequence[int], seed: int) -> Prototypes:
    vectors = draw(seed, len(labels), DIMENSION)
    return Prototypes(vectors, torch.tensor(labels), torch.ones(len(labels), dtype=torch.int64))


def make_pool(method: Method) -> PrototypePool:
    """Return a pool in which class 2 is held by one client alone and class 3 by nobody."""
    single = method.num_prototypes == 1
    return PrototypePool.gather(
        {
            "a": make_prototypes([0, 1] if single else [0, 0, 1], 11),
            "b": make_prototypes([0, 1, 2] if single else [0, 0, 1, 1, 2], 12),
        },
        num_classes=NUM_CLASSES,
        num_prototypes=method.num_prototypes,
    )


def make_broadcast(method: Method, pool: PrototypePool | None = None) -> Broadcast:
    params = make_params(5)
    extra = {name: 0.01 * draw(6, *value.shape) for name, value in params.items()}
    return Broadcast(2, params, extra, make_pool(method) if pool is None else pool)


def make_context(method: Method, broadcast: Broadcast | None = None, seed: int = 5) -> Context:
    start = make_params(seed)
    state = {name: 0.1 * draw(seed + 7, *v.shape) for name, v in method.init_client(start).items()}
    received = method.prepare(broadcast or make_broadcast(method))
    return Context(apply, start, received, state)


# By hand


def embed(params: Tensors, batch: Batch) -> tuple[Array, Array]:
    v = batch.inputs.numpy() @ params["w"].numpy()
    return v, v @ params["c"].numpy()


def cross_entropy(logits: Array, labels: Sequence[int]) -> float:
    rows = [numpy.log(numpy.exp(row).sum()) - row[y] for row, y in zip(logits, labels, strict=True)]
    return float(numpy.mean(rows))


@pytest.mark.parametrize("name", ["local", "fedavg", SCAFFOLD])
def test_cross_entropy_alone(name: str) -> None:
    method, params, batch = make_method(name), make_params(), make_batch()
    _, logits = embed(params, batch)
    found = method.loss(params, batch, make_context(method))
    assert float(found) == pytest.approx(cross_entropy(logits, batch.labels.tolist()), rel=1e-12)


def test_fedprox_pulls_to_where_the_round_began() -> None:
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


def test_fedproto_gives_an_owner_one_vote_however_many_samples_it_has() -> None:
    method = make_method("fedproto")
    pool = PrototypePool.gather(
        {
            "a": Prototypes(torch.zeros(1, DIMENSION), torch.tensor([0]), torch.tensor([1000])),
            "b": Prototypes(torch.ones(1, DIMENSION), torch.tensor([0]), torch.tensor([1])),
        },
        num_classes=NUM_CLASSES,
        num_prototypes=1,
    )
    received = method.prepare(make_broadcast(method, pool))
    assert received.vectors[0].tolist() == [0.5] * DIMENSION
    assert received.present.tolist() == [True, False, False, False]


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


def test_sp_fedcl_contrasts_with_one_prototype_a_class() -> None:
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
def test_an_empty_pool_leaves_cross_entropy_alone(name: str) -> None:
    method = make_method(name)
    empty = PrototypePool.empty(NUM_CLASSES, DIMENSION, method.num_prototypes, dtype=torch.float64)
    context = make_context(method, make_broadcast(method, empty))
    params, batch = make_params(), make_batch()
    _, logits = embed(params, batch)
    wanted = cross_entropy(logits, batch.labels.tolist())
    assert float(method.loss(params, batch, context)) == pytest.approx(wanted, rel=1e-12)
    gradients = torch.func.grad(lambda p: method.loss(p, batch, context))(params)
    plain = torch.func.grad(lambda p: make_method("fedavg").loss(p, batch, context))(params)
    for gradient_name, gradient in plain.items():
        torch.testing.assert_close(gradients[gradient_name], gradient)


# Safe in a batched engine


@pytest.mark.parametrize("name", ALL_METHODS)
def test_padded_samples_count_for_nothing(name: str) -> None:
    method, params, batch = make_method(name), make_params(), make_batch()
    context = make_context(method)
    padded = Batch(
        torch.cat([batch.inputs[:2], 50 * draw(9, 3, 5), batch.inputs[2:], torch.zeros(1, 5)]),
        torch.cat([batch.labels[:2], torch.tensor([3, 2, 0]), batch.labels[2:], torch.tensor([0])]),
        torch.tensor([True, True, False, False, False, True, True, True, False]),
    )
    wanted, gradients = torch.func.grad_and_value(lambda p: method.loss(p, batch, context))(params)
    found, others = torch.func.grad_and_value(lambda p: method.loss(p, padded, context))(params)
    for left, right in ((wanted, found), (gradients, others)):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ALL_METHODS)
def test_a_batch_of_padding_alone_is_finite(name: str) -> None:
    method, params, batch = make_method(name), make_params(), make_batch()
    nothing = batch._replace(mask=torch.zeros_like(batch.mask))
    context = make_context(method)
    gradients, loss = torch.func.grad_and_value(lambda p: method.loss(p, nothing, context))(params)
    assert bool(loss.isfinite())
    assert all(bool(gradient.isfinite().all()) for gradient in gradients.values())


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, "slots") for name in ALL_METHODS),
        *((name, form) for name in METHODS[-3:] for form in ("pooled", "literal")),
    ],
)
def test_vmap_of_the_gradient_is_a_loop_of_gradients(name: str, form: str) -> None:
    method = make_method(name, contrast__form=form)
    received = method.prepare(make_broadcast(method))
    clients = [make_params(seed) for seed in (1, 2, 3)]
    contexts = [make_context(method, seed=seed) for seed in (5, 6, 7)]
    batches = [make_batch((0, 1, 2, 3, 1), 21), make_batch((3,) * 5, 22), make_batch(seed=23)]
    masks = torch.tensor([[True] * 5, [True] * 2 + [False] * 3, [False] * 5])
    batches = [each._replace(mask=mask) for each, mask in zip(batches, masks, strict=True)]

    def step(params: Tensors, start: Tensors, state: Tensors, *columns: Tensor) -> Tensors:
        context = Context(apply, start, received, state)
        gradients = torch.func.grad(lambda p: method.loss(p, Batch(*columns), context))(params)
        return method.adjust(gradients, params, context)

    looped = [
        step(params, context.start, context.state, *batch)
        for params, context, batch in zip(clients, contexts, batches, strict=True)
    ]
    stacked = torch.func.vmap(step)(
        stack(clients),
        stack([context.start for context in contexts]),
        stack([context.state for context in contexts]),
        *(torch.stack(column) for column in zip(*batches, strict=True)),
    )
    for parameter, value in stacked.items():
        wanted = torch.stack([gradients[parameter] for gradients in looped])
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-14)
        assert bool(value.isfinite().all())


def stack(trees: Sequence[Tensors]) -> Tensors:
    return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}


# How they are related


def after_rounds(experiment: Experiment, rounds: int = 3) -> Federation:
    federation = build_federation(experiment)
    for _ in range(rounds):
        federation.run_round(evaluate=False)
    return federation


def test_fedprox_without_a_pull_is_fedavg(images: Path) -> None:
    prox = after_rounds(small(images, "fedprox", fedprox__mu=0.0, engine="loop"))
    average = after_rounds(small(images, "fedavg", engine="loop"))
    assert_same_tensors(prox.state.server.params, average.state.server.params)
    pulled = after_rounds(small(images, "fedprox", fedprox__mu=5.0))
    bias = "classifier.bias"
    assert not torch.equal(pulled.state.server.params[bias], prox.state.server.params[bias])


@pytest.mark.parametrize("method", ["mp-fedcl", "sp-fedcl", "dp-fedcl"])
def test_without_contrast_the_model_is_that_of_fedavg(images: Path, method: str) -> None:
    contrast = after_rounds(small(images, method, contrast__weight=0.0))
    average = after_rounds(small(images, "fedavg"))
    assert_same_tensors(contrast.state.server.params, average.state.server.params)
    assert len(contrast.pool) > 0
    assert len(average.pool) == 0


def test_sp_fedcl_is_mp_fedcl_with_one_prototype(images: Path) -> None:
    single = after_rounds(small(images, "sp-fedcl"))
    multiple = after_rounds(small(images, "mp-fedcl", prototypes__per_class=1))
    assert_same_tensors(single.state.server.params, multiple.state.server.params)
    assert torch.equal(single.pool.vectors, multiple.pool.vectors)
    assert torch.equal(single.pool.counts, multiple.pool.counts)


def test_local_models_never_leave(images: Path) -> None:
    federation = build_federation(small(images, "local"))
    before = dict(federation.state.server.params)
    for _ in range(2):
        federation.run_round(evaluate=False)
    assert_same_tensors(federation.state.server.params, before)
    assert federation.averaged_model is None
    models = dict(federation._engine.personal_models({}))
    assert list(models) == ["client-0", "client-1", "client-2"]
    assert not torch.equal(*(models[name]["classifier.bias"] for name in list(models)[:2]))


def test_prototypes_alone_can_be_shared(images: Path) -> None:
    federation = build_federation(small(images, "mp-fedcl", share_model=False))
    record = federation.run_round(evaluate=True)
    assert record.sent["parameters"] == 0
    assert record.sent["prototype_floats"] > 0
    assert federation.averaged_model is None
    assert record.accuracy is not None
    assert record.accuracy["own"]["averaged_classifier"] is None
    assert record.accuracy["own"]["personal_prototype"] is not None


@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
def test_methods_that_have_nothing_but_the_model_to_share(method: str) -> None:
    with pytest.raises(InvalidInput, match=f"share_model is False; {method} has nothing else"):
        make_method(method, share_model=False)


def test_the_built_in_methods() -> None:
    methods = built_in_methods()
    assert sorted(METHODS) == list(methods)
    for name, method in methods.items():
        assert method.name == name
        assert method.summary
        assert method.reading in READINGS
    headlines = {name: method.reading for name, method in methods.items()}
    assert headlines == {
        "local": "personal_classifier",
        "fedavg": "averaged_classifier",
        "fedprox": "averaged_classifier",
        "fedproto": "personal_prototype",
        "sp-fedcl": "personal_prototype",
        "dp-fedcl": "personal_prototype",
        "mp-fedcl": "personal_prototype",
    }
