"""The contrastive loss where there is little to contrast, numbers are hard, or input is bad."""

import math
from typing import Any

import pytest
import torch
from contrast_cases import FORMS, PADDINGS, make_batch, make_pool

from mpfedcl.prototypes import (
    PrototypePool,
    Prototypes,
    contrastive_loss,
    prepare_contrast,
    prototype_contrastive_loss,
)

torch.set_num_threads(1)


# --- absent classes, empty pools, padded samples -----------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_sample_of_an_absent_class_is_left_out_of_the_mean(form: Any) -> None:
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
def test_loss_without_contrast_is_a_differentiable_zero(form: Any, padding: Any, case: str) -> None:
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
def test_loss_of_a_single_class_is_zero(form: Any) -> None:
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
def test_padded_samples_of_any_value_are_ignored(form: Any) -> None:
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


# --- hard numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("temperature", "size"), [(0.001, 1.0), (0.07, 100.0), (0.001, 100.0)])
def test_small_temperatures_and_large_embeddings_stay_finite(
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


def test_pool_is_cast_to_the_precision_of_the_embeddings() -> None:
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
def test_invalid_input_is_rejected_with_one_sentence(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"z": torch.zeros(2, 3), "labels": torch.tensor([0, 1])} | change
    with pytest.raises(ValueError, match=message) as error:
        prototype_contrastive_loss(given.pop("z"), given.pop("labels"), make_pool(0), **given)
    assert str(error.value).endswith(".")
