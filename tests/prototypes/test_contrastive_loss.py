"""The contrastive loss: by hand, against a loop over its formula, and under torch.func."""

import math
from typing import Any

import pytest
import torch
from contrast_cases import FORMS, PADDINGS, loop_over_the_formula, make_batch, make_pool, quick
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, vmap

from mpfedcl.prototypes import (
    ContrastTargets,
    PrototypePool,
    Prototypes,
    contrastive_loss,
    prepare_contrast,
    prototype_contrastive_loss,
)

torch.set_num_threads(1)


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


def test_orthogonal_prototypes_match_hand_computed_losses() -> None:
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


def test_only_the_literal_form_pushes_away_from_the_own_class() -> None:
    pool = one_each(3, 3)
    z = torch.full((1, 3), 0.5, dtype=torch.float64, requires_grad=True)
    for form, sign in (("slots", -1), ("pooled", -1), ("literal", 1)):
        (slope,) = torch.autograd.grad(
            prototype_contrastive_loss(z, torch.tensor([0]), pool, 0.5, form),  # type: ignore[arg-type]
            z,
        )
        assert slope[0, 0].sign() == sign


def test_defaults_are_those_of_the_paper() -> None:
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
def test_loss_matches_a_loop_over_the_formula(
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
def test_prepared_slices_match_the_padded_grid(seed: int, num_clients: int, padding: Any) -> None:
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


# --- gradients and transforms ------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("padding", PADDINGS)
def test_gradients_match_finite_differences(form: Any, padding: Any) -> None:
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
def test_vmap_over_clients_matches_single_clients(form: Any, num_clients: int) -> None:
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
