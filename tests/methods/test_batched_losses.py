"""Losses that are safe in a batched engine: padding counts for nothing, vmap is a loop."""

from collections.abc import Sequence

import pytest
import torch
from tiny_method_inputs import (
    ALL_METHODS,
    apply,
    draw,
    make_batch,
    make_broadcast,
    make_context,
    make_method,
    make_params,
)
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.methods import Batch, Context
from small_experiments import METHODS

pytestmark = pytest.mark.usefixtures("example_methods")


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
def test_batch_of_only_padding_is_finite(name: str) -> None:
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
def test_vmap_of_the_gradient_matches_a_loop(name: str, form: str) -> None:
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
        adjusted: Tensors = method.adjust(gradients, params, context)[0]
        return adjusted

    looped = [
        step(params, context.start, context.state, *batch[:3])
        for params, context, batch in zip(clients, contexts, batches, strict=True)
    ]
    stacked = torch.func.vmap(step)(
        stack(clients),
        stack([context.start for context in contexts]),
        stack([context.state for context in contexts]),
        *(torch.stack(column) for column in zip(*(batch[:3] for batch in batches), strict=True)),
    )
    for parameter, value in stacked.items():
        wanted = torch.stack([gradients[parameter] for gradients in looped])
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-14)
        assert bool(value.isfinite().all())


def stack(trees: Sequence[Tensors]) -> Tensors:
    return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}
