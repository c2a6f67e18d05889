"""MOON: the contrast by a plain loop, and where it is FedAvg."""

import math
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from identities import (
    after_rounds,
    assert_close_tensors,
    assert_same_model,
    begin,
    both_engines,
    differ,
    models_of,
    server_of,
    slopes_of,
)
from tiny_method_inputs import apply, make_batch, make_context, make_method, make_params

from mpfedcl.core.tensors import Tensors
from mpfedcl.methods import Batch
from small_experiments import assert_same_tensors


def cosine(left: list[float], right: list[float]) -> float:
    product = sum(a * b for a, b in zip(left, right, strict=True))
    return product / math.hypot(*left) / math.hypot(*right)


def plain_loss(params: Tensors, start: Tensors, last: Tensors, batch: Batch, mu: float) -> float:
    """The paper's fractions, sample by sample, at temperature 0.5."""
    embeddings, logits = apply(params, batch.inputs)
    near, far = (apply(model, batch.inputs)[0].tolist() for model in (start, last))
    total = 0.0
    for number, (z, scores) in enumerate(zip(embeddings.tolist(), logits.tolist(), strict=True)):
        shares = numpy.exp(scores) / numpy.exp(scores).sum()
        to_global = math.exp(cosine(z, near[number]) / 0.5)
        to_last = math.exp(cosine(z, far[number]) / 0.5)
        total -= math.log(shares[batch.labels[number]])
        total -= mu * math.log(to_global / (to_global + to_last))
    return total / len(batch.labels)


def test_loss_matches_the_formula_of_the_paper() -> None:
    method, batch, params = make_method("moon", moon__mu=0.7), make_batch(), make_params(3)
    context = make_context(method)
    wanted = plain_loss(params, context.start, context.state, batch, 0.7)
    assert float(method.loss(params, batch, context)) == pytest.approx(wanted, rel=1e-12)


@both_engines
def test_zero_weight_equals_fedavg(images: Path, engine: str) -> None:
    found = after_rounds(images, "moon", engine=engine, moon__mu=0.0)
    wanted = after_rounds(images, "fedavg", engine=engine)
    assert_same_model(found, wanted, engine)


@both_engines
def test_only_the_first_round_equals_fedavg(images: Path, engine: str) -> None:
    for rounds, is_same in ((1, True), (2, False)):
        found = server_of(after_rounds(images, "moon", rounds, engine=engine, train__lr=0.3))
        wanted = server_of(after_rounds(images, "fedavg", rounds, engine=engine, train__lr=0.3))
        if is_same:
            assert_close_tensors(found, wanted)
        assert differ(found, wanted) != is_same


@both_engines
def test_clients_keep_their_last_model_across_skipped_rounds(images: Path, engine: str) -> None:
    federation = begin(images, "moon", engine=engine, clients=4, fraction=0.5, rounds=4)
    kept: dict[str, Tensors] = {}
    for _ in range(4):
        federation.run_round(evaluate=False, keep_models=True)
        kept |= models_of(federation)
        state = federation.engine.state()
        for client, params in kept.items():
            own = {name: state[f"own/{client}/{name}"] for name in params}
            assert_same_tensors(own, params)
    assert len(kept) > 2


def test_zero_embeddings_and_padding_give_no_nan() -> None:
    """A padding row of zeros, and an embedding that is exactly zero."""
    method, params = make_method("moon"), make_params(3)
    context = make_context(method)
    full = make_batch([0, 1, 2])
    inputs = full.inputs.clone()
    inputs[1] = 0.0
    real = Batch(inputs, full.labels, full.mask)
    padded = Batch(
        torch.cat([inputs, torch.zeros(2, 5).double()]),
        torch.cat([full.labels, torch.zeros(2, dtype=torch.int64)]),
        torch.tensor([True, True, True, False, False]),
    )
    _, wanted = slopes_of(method, params, real, context)
    _, found = slopes_of(method, params, padded, context)
    for name, value in found.items():
        assert value.isfinite().all()
        torch.testing.assert_close(value, wanted[name], rtol=1e-12, atol=1e-12)


def test_small_temperature_does_not_overflow() -> None:
    method = make_method("moon", moon__temperature=1e-4)
    context = make_context(method)
    context = replace(context, state={name: -value for name, value in make_params(3).items()})
    loss, slopes = slopes_of(method, make_params(3), make_batch(), context)
    assert slopes["w"].isfinite().all()
    assert loss.isfinite()
