"""The contrastive loss with every exponential once: the slices' sums as a product."""

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
    contrastive_loss,
    prepare_contrast,
)

torch.set_num_threads(1)
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
            patch.setattr("mpfedcl.prototypes.contrast.LARGEST_TABLE", 0)
        targets = prepare_contrast(pool, padding)
    assert (targets.table is None) == (is_large and len(pool) > 0)
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
def test_product_matches_slices_and_formula(
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
def test_product_is_used_within_the_range_of_exponentials(form: Any) -> None:
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
def test_product_under_vmap_matches_single_clients(
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


def test_pool_has_a_table_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(2)
    table = prepare_contrast(pool).table
    assert table is not None
    monkeypatch.setattr("mpfedcl.prototypes.contrast.LARGEST_TABLE", table.numel())
    assert prepare_contrast(pool).table is not None
    monkeypatch.setattr("mpfedcl.prototypes.contrast.LARGEST_TABLE", table.numel() - 1)
    assert prepare_contrast(pool).table is None


@pytest.mark.parametrize("form", ["slots", "literal"])
def test_large_pool_can_be_differentiated_twice(form: Any) -> None:
    targets = prepare(make_pool(4), True)
    z, labels = make_batch(4)
    real = torch.ones(len(z), dtype=torch.bool)
    reach = find_reach(z, targets) * 1.1
    z = z.requires_grad_()

    def loss(z: Tensor) -> Tensor:
        return contrastive_loss(z, labels, real, targets, reach, form, reach)

    assert torch.autograd.gradcheck(loss, (z,))
    assert torch.autograd.gradgradcheck(loss, (z,))
