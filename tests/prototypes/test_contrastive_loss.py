"""The contrastive loss: by hand, against a loop over its formula, and under torch.func."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, vmap

from mpfedcl.prototypes import (
    ContrastTargets,
    PoolGrid,
    PrototypePool,
    Prototypes,
    contrastive_loss,
    prepare_contrast,
    prototype_contrastive_loss,
)
from mpfedcl.prototypes.targets import Lists, Table

torch.set_num_threads(1)
quick = settings(deadline=None, max_examples=50)
FORMS = ("slots", "pooled", "literal")
PADDINGS = ("all", "fill")


def make_pool(
    seed: int,
    num_clients: int = 3,
    num_classes: int = 4,
    num_prototypes: int = 2,
    dimension: int = 3,
    scale: float = 1.0,
) -> PrototypePool:
    """A ragged pool: each client has 0 to K prototypes of each class but the last, nobody's."""
    generator = torch.Generator().manual_seed(seed)
    clients = {}
    for client in range(num_clients):
        held = torch.randint(0, num_prototypes + 1, (num_classes,), generator=generator)
        held[-1] = 0
        labels = torch.arange(num_classes).repeat_interleave(held)
        vectors = torch.randn(len(labels), dimension, dtype=torch.float64, generator=generator)
        clients[f"client-{client}"] = Prototypes(vectors * scale, labels, torch.ones_like(labels))
    return PrototypePool.gather(
        clients, num_classes=num_classes, num_prototypes=num_prototypes, dimension=dimension
    )


def make_batch(seed: int, num_classes: int = 4, size: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(size, 3, dtype=torch.float64, generator=generator)
    return z, torch.randint(0, num_classes, (size,), generator=generator)


def loop_over_the_formula(
    z: Tensor, labels: Tensor, pool: PrototypePool, temperature: float, form: str, padding: Any
) -> float:
    """L_R as it stands on paper, one sample, client, slot and class after the other."""
    grid, present = pool.padded(padding)
    here = [label for label in range(pool.num_classes) if present[label]]
    losses = []
    for sample, y in zip(z.tolist(), labels.tolist(), strict=True):
        if y not in here:
            continue

        def power(vector: Tensor, sample: list[float] = sample) -> float:
            product = sum(a * b for a, b in zip(sample, vector.tolist(), strict=True))
            return math.exp(product / temperature)

        if form == "pooled":
            pairs = [(power(u), int(a)) for u, a in zip(pool.vectors, pool.labels, strict=True)]
            own = sum(value for value, a in pairs if a == y)
            losses.append(-math.log(own / sum(value for value, _ in pairs)))
            continue
        terms = []
        for client in grid:
            for slot in client:
                total = sum(power(slot[a]) for a in here)
                aims = [y] if form == "slots" else [a for a in here if a != y]
                logs = [-math.log(power(slot[a]) / total) for a in aims]
                terms.append(sum(logs) / len(logs) if logs else 0.0)
        losses.append(sum(terms) / len(terms))
    return sum(losses) / len(losses) if losses else 0.0


# --- by hand -----------------------------------------------------------------------------------


def one_each(num_classes: int, dimension: int) -> PrototypePool:
    """One client, one prototype a class: the unit vectors."""
    labels = torch.arange(num_classes)
    vectors = torch.eye(num_classes, dimension, dtype=torch.float64)
    return PrototypePool.gather(
        {"a": Prototypes(vectors, labels, torch.ones_like(labels))},
        num_classes=num_classes,
        num_prototypes=1,
    )


def test_orthogonal_prototypes_by_hand() -> None:
    pool = one_each(3, 3)
    z = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    own, other = math.exp(1 / 0.5), 1.0
    for form, label, expected in (
        ("slots", 0, -math.log(own / (own + 2 * other))),
        ("slots", 1, -math.log(other / (own + 2 * other))),
        ("pooled", 0, -math.log(own / (own + 2 * other))),
        ("literal", 0, -math.log(other / (own + 2 * other))),
        (
            "literal",
            1,
            -(math.log(own / (own + 2)) + math.log(other / (own + 2))) / 2,
        ),
    ):
        found = prototype_contrastive_loss(z, torch.tensor([label]), pool, 0.5, form)  # type: ignore[arg-type]
        assert float(found) == pytest.approx(expected, rel=1e-12)


def test_pooled_joins_the_prototypes_of_a_class() -> None:
    labels = torch.tensor([0, 0, 1])
    vectors = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)
    pool = PrototypePool.gather(
        {"a": Prototypes(vectors, labels, torch.ones_like(labels))}, num_classes=2
    )
    z = torch.ones(1, 1, dtype=torch.float64)
    found = prototype_contrastive_loss(z, torch.tensor([0]), pool, 1.0, "pooled")
    e = math.e
    assert float(found) == pytest.approx(-math.log((e + e**2) / (e + e**2 + e**3)))


def test_the_text_pulls_to_the_own_class_and_the_print_pushes_away() -> None:
    pool = one_each(3, 3)
    z = torch.full((1, 3), 0.5, dtype=torch.float64, requires_grad=True)
    for form, sign in (("slots", -1), ("pooled", -1), ("literal", 1)):
        (slope,) = torch.autograd.grad(
            prototype_contrastive_loss(z, torch.tensor([0]), pool, 0.5, form),  # type: ignore[arg-type]
            z,
        )
        assert slope[0, 0].sign() == sign


def test_the_default_is_the_papers() -> None:
    pool, (z, labels) = make_pool(0), make_batch(0)
    default = prototype_contrastive_loss(z, labels, pool)
    assert default.shape == ()
    assert default == prototype_contrastive_loss(z, labels, pool, 0.07, "slots", "all")
    assert default != prototype_contrastive_loss(z, labels, pool, 0.07, "slots", "fill")


# --- against the formula -----------------------------------------------------------------------


@quick
@given(
    st.integers(0, 2**31),
    st.integers(0, 4),
    st.integers(1, 3),
    st.sampled_from(FORMS),
    st.sampled_from(PADDINGS),
    st.sampled_from([0.3, 1.0]),
)
def test_it_is_the_formula(
    seed: int,
    num_clients: int,
    num_prototypes: int,
    form: Any,
    padding: Any,
    temperature: float,
) -> None:
    pool = make_pool(seed, num_clients, num_prototypes=num_prototypes)
    z, labels = make_batch(seed + 1)
    found = prototype_contrastive_loss(z, labels, pool, temperature, form, padding)
    expected = loop_over_the_formula(z, labels, pool, temperature, form, padding)
    assert float(found) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@quick
@given(st.integers(0, 2**31), st.integers(0, 4), st.sampled_from(PADDINGS))
def test_prepared_slices_are_the_padded_grid(seed: int, num_clients: int, padding: Any) -> None:
    pool = make_pool(seed, num_clients)
    targets = prepare_contrast(pool, padding)
    assert float(targets.weights.sum()) == pytest.approx(1, abs=1e-12)
    assert len(torch.unique(targets.slices, dim=0)) == len(targets.slices)
    assert targets.present.tolist() == pool.present.tolist()
    grid, _ = pool.padded(padding)
    prepared = targets.vectors[targets.slices]
    if not len(pool):
        return
    slices = grid.flatten(0, 1)
    repeats = (targets.weights * len(slices)).round().long()
    assert sorted(prepared.repeat_interleave(repeats, 0).tolist()) == sorted(slices.tolist())
    # Against the grid: log-softmax over the present classes of every (client, slot).
    z, labels = make_batch(seed)
    logits = torch.einsum("bd,skcd->bskc", z, grid) / 0.2
    logits = logits.masked_fill(~pool.present, -torch.inf).log_softmax(-1)
    counted = pool.present[labels]
    losses = -logits[torch.arange(len(z)), :, :, labels].mean((1, 2))
    expected = losses[counted].mean() if counted.any() else torch.tensor(0.0)
    found = contrastive_loss(z, labels, torch.ones(len(z), dtype=torch.bool), targets, 0.2)
    assert float(found) == pytest.approx(float(expected), rel=1e-9)


def test_padding_is_computed_once_however_many_clients_there_are() -> None:
    labels = torch.tensor([0, 0])
    whole = Prototypes(torch.eye(2), labels, torch.ones_like(labels))
    half = Prototypes(torch.ones(1, 2), labels[:1] + 1, torch.ones_like(labels[:1]))
    clients = {"a": whole} | {f"b{number}": half for number in range(50)}
    targets = prepare_contrast(PrototypePool.gather(clients, num_classes=2, num_prototypes=2))
    assert targets.slices.shape == (3, 2)
    assert sorted(targets.weights.tolist()) == pytest.approx([1 / 102, 1 / 102, 100 / 102])


def test_pooled_does_not_depend_on_the_order_of_slots() -> None:
    pool, (z, labels) = make_pool(3), make_batch(3)
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(0))
    mixed = PrototypePool(
        pool.vectors[order],
        pool.labels[order],
        pool.counts[order],
        pool.owners[order],
        pool.names,
        pool.num_classes,
        pool.num_prototypes,
    )
    left = prototype_contrastive_loss(z, labels, pool, form="pooled")
    assert float(left) == pytest.approx(
        float(prototype_contrastive_loss(z, labels, mixed, form="pooled")), rel=1e-12
    )


# --- absent classes, empty pools, padded samples -----------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_a_sample_of_an_absent_class_is_left_out_of_the_mean(form: Any) -> None:
    pool, (z, _) = make_pool(1), make_batch(1, size=3)
    z.requires_grad_()
    with_absent = prototype_contrastive_loss(z, torch.tensor([0, 3, 1]), pool, 0.5, form)
    without = prototype_contrastive_loss(z[[0, 2]], torch.tensor([0, 1]), pool, 0.5, form)
    assert with_absent.item() == pytest.approx(without.item(), rel=1e-12)
    (slope,) = torch.autograd.grad(with_absent, z)
    assert slope[1].tolist() == [0, 0, 0]
    assert slope[0].abs().sum() > 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("case", ["empty", "empty, any K", "absent", "no samples"])
def test_nothing_to_contrast_is_a_zero_that_can_be_differentiated(
    form: Any, padding: Any, case: str
) -> None:
    pool = {
        "empty": PrototypePool.empty(4, 3, 2, dtype=torch.float64),
        "empty, any K": PrototypePool.empty(4, 3, None, dtype=torch.float64),
    }.get(case, make_pool(0))
    size = 0 if case == "no samples" else 2
    z = torch.ones(size, 3, dtype=torch.float64, requires_grad=True)
    labels = torch.full((size,), 3)
    loss = prototype_contrastive_loss(z, labels, pool, 0.07, form, padding)
    assert loss.item() == 0
    loss.backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    assert z.grad.tolist() == torch.zeros(size, 3).tolist()


@pytest.mark.parametrize("form", FORMS)
def test_one_class_alone_costs_nothing(form: Any) -> None:
    labels = torch.zeros(2, dtype=torch.int64)
    pool = PrototypePool.gather(
        {"a": Prototypes(torch.eye(2, 3), labels, labels + 1)}, num_classes=4, num_prototypes=2
    )
    z = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    loss = prototype_contrastive_loss(z, torch.zeros(5, dtype=torch.int64), pool, 0.07, form)
    assert loss.item() == pytest.approx(0, abs=1e-6)
    (slope,) = torch.autograd.grad(loss, z)
    assert slope.isfinite().all()


@pytest.mark.parametrize("form", FORMS)
def test_padded_samples_count_for_nothing_whatever_they_hold(form: Any) -> None:
    targets = prepare_contrast(make_pool(2))
    z, labels = make_batch(2)
    mask = torch.tensor([True, False, True, False, True])
    spoiled = z.clone()
    spoiled[1], spoiled[3] = torch.nan, torch.inf
    labels = torch.tensor([0, -7, 1, 99, 2])
    found, slope = torch.func.grad_and_value(
        lambda z: contrastive_loss(z, labels, mask, targets, 0.5, form)
    )(spoiled)[::-1]
    expected = contrastive_loss(z[mask], labels[mask], mask[mask], targets, 0.5, form)
    assert float(found) == pytest.approx(float(expected), rel=1e-12)
    assert slope[~mask].abs().sum() == 0
    assert slope[mask].isfinite().all()


# --- gradients and transforms ------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("padding", PADDINGS)
def test_gradients_are_the_slopes(form: Any, padding: Any) -> None:
    pool, (z, labels) = make_pool(4), make_batch(4)
    z.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda z: prototype_contrastive_loss(z, labels, pool, 0.5, form, padding), (z,)
    )


def test_prototypes_are_constants() -> None:
    vectors = torch.eye(2, requires_grad=True)
    labels = torch.arange(2)
    one = torch.ones_like(labels)
    pool = PrototypePool(vectors, labels, one, one - 1, ("a",), 2, 1)
    z = torch.ones(1, 2, requires_grad=True)
    prototype_contrastive_loss(z, labels[:1], pool).backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    assert vectors.grad is None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_clients", [0, 3])
def test_clients_in_one_vmap_are_each_alone(form: Any, num_clients: int) -> None:
    targets = prepare_contrast(make_pool(5, num_clients).to(dtype=torch.float64))
    generator = torch.Generator().manual_seed(5)
    z = torch.randn(6, 8, 3, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, 4, (6, 8), generator=generator)
    mask = torch.rand(6, 8, generator=generator) < 0.7
    mask[0] = False

    def loss(z: Tensor, labels: Tensor, mask: Tensor, targets: ContrastTargets) -> Tensor:
        return contrastive_loss(z, labels, mask, targets, 0.1, form)

    together = vmap(grad(loss), in_dims=(0, 0, 0, None))(z, labels, mask, targets)
    losses = vmap(loss, in_dims=(0, 0, 0, None))(z, labels, mask, targets)
    closed_over = vmap(grad(lambda z, y, m: loss(z, y, m, targets)))(z, labels, mask)
    torch.testing.assert_close(together, closed_over, rtol=0, atol=0)
    for client in range(6):
        own = (z[client].clone().requires_grad_(), labels[client], mask[client])
        alone = loss(*own, targets)
        (slope,) = torch.autograd.grad(alone, own[0])
        torch.testing.assert_close(losses[client], alone.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(together[client], slope, rtol=1e-10, atol=1e-12)
    assert together[0].abs().sum() == 0


# --- every exponential once: the slices' sums as a product -------------------------------------

CONTRAST = "mpfedcl.prototypes.contrast"


def refuse(*_: object) -> Tensor:
    raise AssertionError("the other form was asked for")


def value_and_slope(
    z: Tensor,
    labels: Tensor,
    mask: Tensor,
    targets: ContrastTargets,
    temperature: float,
    form: Any,
    reach: float,
) -> tuple[float, Tensor]:
    """Return the loss and its gradient; fail where the form is not the one that `reach` allows."""
    is_product = 2 * reach / temperature <= 80
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{CONTRAST}.{'_sum_by_slice' if is_product else '_sum_powers'}", refuse)
        z = z.clone().requires_grad_()
        loss = contrastive_loss(z, labels, mask, targets, temperature, form, reach)
        (slope,) = torch.autograd.grad(loss, z)
    return float(loss.detach()), slope


def prepare(pool: PrototypePool, is_large: bool, padding: Any = "all") -> ContrastTargets:
    """Lay a pool out as a small one, or as if it were large."""
    with pytest.MonkeyPatch.context() as patch:
        if is_large:
            patch.setattr("mpfedcl.prototypes.targets._LARGEST_TABLE", 0)
        targets = prepare_contrast(pool, padding)
    assert isinstance(targets.members, Lists if is_large else Table)
    return targets


def find_reach(z: Tensor, targets: ContrastTargets) -> float:
    """Return the largest |z·u|, and a little for rounding."""
    products = (z @ targets.vectors.T).abs()
    return 1.000001 * float(products.max()) + 1e-9


@quick
@given(
    st.integers(0, 2**31),
    st.integers(0, 4),
    st.integers(1, 3),
    st.sampled_from(FORMS),
    st.sampled_from(PADDINGS),
    st.sampled_from([0.01, 1.0, 20.0, 79.9]),
    st.booleans(),
)
def test_the_product_is_the_slices_and_the_formula(
    seed: int,
    num_clients: int,
    num_prototypes: int,
    form: Any,
    padding: Any,
    span: float,
    is_large: bool,
) -> None:
    pool = make_pool(seed, num_clients, num_prototypes=num_prototypes).to(dtype=torch.float64)
    z, labels = make_batch(seed + 1)
    targets = prepare(pool, is_large, padding)
    reach = find_reach(z, targets)
    # The hardest that is allowed: all logits within `span`, which may be as much as 80.
    temperature = 2 * reach / span
    real = torch.ones(len(z), dtype=torch.bool)
    product, slope = value_and_slope(z, labels, real, targets, temperature, form, reach)
    by_slice, wanted = value_and_slope(z, labels, real, targets, temperature, form, math.inf)
    assert product == pytest.approx(by_slice, rel=1e-9, abs=1e-9)
    torch.testing.assert_close(slope, wanted, rtol=1e-9, atol=1e-9 / temperature)
    formula = loop_over_the_formula(z, labels, pool, temperature, form, padding)
    assert product == pytest.approx(formula, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("form", ["slots", "literal"])
def test_the_product_is_asked_for_as_far_as_exponentials_reach(form: Any) -> None:
    targets = prepare_contrast(make_pool(3))
    z, labels = make_batch(3)
    real = torch.ones(len(z), dtype=torch.bool)
    reach = find_reach(z, targets)
    for span in (79.99, 80.01):
        # It fails in there if the wrong one is asked for.
        value_and_slope(z, labels, real, targets, 2 * reach / span, form, reach)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_clients", [0, 3])
@pytest.mark.parametrize("is_large", [False, True])
def test_the_product_under_vmap_is_each_client_alone(
    form: Any, num_clients: int, is_large: bool
) -> None:
    targets = prepare(make_pool(5, num_clients).to(dtype=torch.float64), is_large, "fill")
    generator = torch.Generator().manual_seed(8)
    z = torch.randn(6, 8, 3, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, 4, (6, 8), generator=generator)
    mask = torch.rand(6, 8, generator=generator) < 0.7
    mask[0] = False
    z[1, ~mask[1]] = torch.nan
    reach = find_reach(z.nan_to_num(), targets)
    temperature = 2 * reach / 60

    def loss(z: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        return contrastive_loss(z, labels, mask, targets, temperature, form, reach)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{CONTRAST}._sum_by_slice", refuse)
        losses = vmap(loss)(z, labels, mask)
        slopes = vmap(grad(loss))(z, labels, mask)
    assert slopes[0].abs().sum() == 0
    for client in range(6):
        own = (z[client], labels[client], mask[client])
        alone, slope = value_and_slope(*own, targets, temperature, form, math.inf)
        assert float(losses[client]) == pytest.approx(alone, rel=1e-9, abs=1e-9)
        torch.testing.assert_close(slopes[client], slope, rtol=1e-9, atol=1e-9)


def test_a_table_up_to_a_size_and_lists_above(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(2)
    members = prepare_contrast(pool).members
    assert isinstance(members, Table)
    monkeypatch.setattr("mpfedcl.prototypes.targets._LARGEST_TABLE", members.counts.numel())
    assert isinstance(prepare_contrast(pool).members, Table)
    monkeypatch.setattr("mpfedcl.prototypes.targets._LARGEST_TABLE", members.counts.numel() - 1)
    assert isinstance(prepare_contrast(pool).members, Lists)


@pytest.mark.parametrize("form", ["slots", "literal"])
def test_lists_can_be_differentiated_twice(form: Any) -> None:
    targets = prepare(make_pool(4), True)
    z, labels = make_batch(4)
    real = torch.ones(len(z), dtype=torch.bool)
    reach = find_reach(z, targets) * 1.1
    z = z.requires_grad_()

    def loss(z: Tensor) -> Tensor:
        return contrastive_loss(z, labels, real, targets, reach, form, reach)

    assert torch.autograd.gradcheck(loss, (z,))
    assert torch.autograd.gradgradcheck(loss, (z,))


# --- some clients of a pool --------------------------------------------------------------------


@quick
@given(
    st.integers(0, 2**31),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from(["slots", "literal"]),
    st.sampled_from(PADDINGS),
    st.booleans(),
)
def test_the_mean_over_single_clients_is_the_whole_pool(
    seed: int, num_clients: int, num_prototypes: int, form: Any, padding: Any, bounded: bool
) -> None:
    pool = make_pool(seed, num_clients, num_prototypes=num_prototypes).to(dtype=torch.float64)
    z, labels = make_batch(seed + 1)
    real = torch.ones(len(z), dtype=torch.bool)
    whole = prepare_contrast(pool, padding)
    reach = find_reach(z, whole) if bounded else math.inf
    wanted, slope = value_and_slope(z, labels, real, whole, 0.5, form, reach)
    parts = [
        value_and_slope(
            z,
            labels,
            real,
            PoolGrid.lay_out(pool, padding).targets(torch.tensor([client])),
            0.5,
            form,
            reach,
        )
        for client in range(pool.num_clients)
    ]
    if not parts:
        assert wanted == 0
        return
    assert sum(loss for loss, _ in parts) / len(parts) == pytest.approx(wanted, rel=1e-9, abs=1e-9)
    mean = torch.stack([slope for _, slope in parts]).mean(0)
    torch.testing.assert_close(mean, slope, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("padding", PADDINGS)
def test_some_clients_are_padded_by_the_means_of_the_whole_pool(padding: Any) -> None:
    pool = make_pool(4)
    grid, _ = pool.padded(padding)
    for chosen in ([1], [0, 2], [0, 1, 2]):
        targets = PoolGrid.lay_out(pool, padding).targets(torch.tensor(chosen))
        wanted = grid[chosen].flatten(0, 1)
        repeats = (targets.weights * len(wanted)).round().long()
        prepared = targets.vectors[targets.slices].repeat_interleave(repeats, 0)
        assert sorted(prepared.tolist()) == sorted(wanted.tolist())
        assert targets.present.tolist() == pool.present.tolist()
        # Nothing is kept that none of them uses.
        assert set(targets.slices.flatten().tolist()) == set(range(len(targets.vectors)))
        assert len(targets.classes) == len(targets.vectors)
        aims = wanted.mean(0)
        torch.testing.assert_close(targets.aims, aims, rtol=1e-12, atol=1e-14)


# --- hard numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("temperature", "size"), [(0.001, 1.0), (0.07, 100.0), (0.001, 100.0)])
def test_tiny_temperatures_and_long_embeddings_stay_finite(
    form: Any, dtype: torch.dtype, temperature: float, size: float
) -> None:
    pool = make_pool(6, scale=size).to(dtype=dtype)
    z, labels = make_batch(6)
    z = (size * z).to(dtype).requires_grad_()
    loss = prototype_contrastive_loss(z, labels, pool, temperature, form)
    (slope,) = torch.autograd.grad(loss, z)
    assert loss.dtype == dtype
    assert loss.isfinite()
    assert loss >= 0
    assert slope.isfinite().all()
    # In float64 from differences to the largest exponent, which cannot overflow.
    double = prototype_contrastive_loss(
        z.detach().double(), labels, pool.to(dtype=torch.float64), temperature, form
    )
    assert loss.item() == pytest.approx(float(double), rel=1e-4)


def test_a_pool_of_another_precision_follows_the_embeddings() -> None:
    pool, (z, labels) = make_pool(7), make_batch(7)
    single = prototype_contrastive_loss(z.float(), labels.int(), pool, 0.5)
    assert single.dtype == torch.float32
    assert float(single) == pytest.approx(
        float(prototype_contrastive_loss(z, labels, pool, 0.5)), rel=1e-5
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"z": torch.zeros(2)}, "embeddings are"),
        ({"z": torch.zeros(2, 5)}, "embeddings are"),
        ({"z": torch.zeros(2, 3, dtype=torch.int64)}, "embeddings are"),
        ({"labels": torch.tensor([0])}, "labels are"),
        ({"labels": torch.tensor([0.0, 1.0])}, "labels are"),
        ({"labels": torch.tensor([0, 4])}, "label 4 is out of range"),
        ({"labels": torch.tensor([-1, 0])}, "label -1 is out of range"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"form": "triplet"}, "form is 'triplet'"),
        ({"padding": "none"}, "padding is 'none'"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"z": torch.zeros(2, 3), "labels": torch.tensor([0, 1])} | change
    with pytest.raises(ValueError, match=message) as error:
        prototype_contrastive_loss(given.pop("z"), given.pop("labels"), make_pool(0), **given)
    assert str(error.value).endswith(".")
