"""FedMMD: the discrepancy by plain loops, and where the method is FedAvg."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from identities import (
    after_rounds,
    assert_close_tensors,
    assert_same_model,
    both_engines,
    differ,
    server_of,
    slopes_of,
)
from tiny_method_inputs import apply, draw, make_batch, make_context, make_method, make_params
from torch import Tensor

from mpfedcl.methods.fedmmd import VARIANCES, discrepancy
from mpfedcl.rounds.loop import RoundLoop

Points = list[list[float]]


def kernel(left: list[float], right: list[float]) -> float:
    square = sum((a - b) ** 2 for a, b in zip(left, right, strict=True))
    return sum(math.exp(-square / (2 * variance)) for variance in VARIANCES)


def mean_kernel(left: Points, right: Points) -> float:
    return sum(kernel(a, b) for a in left for b in right) / (len(left) * len(right))


def everything(points: Tensor) -> Tensor:
    return torch.ones(len(points), dtype=torch.bool)


def test_kernels_are_those_of_the_authors() -> None:
    tens = [10.0**power for power in range(-6, 7) if power != 1]
    assert pytest.approx(sorted([*tens, *range(5, 36, 5)])) == VARIANCES
    assert len(VARIANCES) == 19


@given(size=st.integers(1, 6), width=st.integers(1, 4), padding=st.integers(0, 3))
def test_discrepancy_matches_double_loops(size: int, width: int, padding: int) -> None:
    left, right = draw(size, size, width), 0.7 * draw(size + 50, size, width) + 0.1
    wanted = mean_kernel(left.tolist(), left.tolist()) + mean_kernel(right.tolist(), right.tolist())
    wanted -= 2 * mean_kernel(left.tolist(), right.tolist())
    odd = torch.full((padding, width), math.nan, dtype=torch.float64)
    mask = torch.tensor([True] * size + [False] * padding)
    found = discrepancy(torch.cat([left, odd]), torch.cat([right, odd]), mask)
    assert float(found) == pytest.approx(wanted, rel=1e-10, abs=1e-12)


def test_discrepancy_of_equal_sets_and_of_two_points() -> None:
    points = draw(1, 7, 3)
    assert float(discrepancy(points, points, everything(points))) == pytest.approx(0, abs=1e-14)
    one, other = torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0]])
    # 2 k(a, a) - 2 k(a, b) with |a - b|² = 25.
    wanted = 2 * 19 - 2 * kernel([0.0, 0.0], [3.0, 4.0])
    assert float(discrepancy(one, other, everything(one))) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("outputs", ["embeddings", "logits"])
@pytest.mark.parametrize("form", ["mmd", "l2"])
def test_loss_adds_the_weighted_discrepancy(form: str, outputs: str) -> None:
    settings = {"fedmmd__weight": 0.3, "fedmmd__form": form, "fedmmd__outputs": outputs}
    method = make_method("fedmmd", **settings)
    params, batch, context = make_params(3), make_batch(), make_context(method)
    plain = float(make_method("fedavg").loss(params, batch, context))
    place = ["embeddings", "logits"].index(outputs)
    left, right = (apply(model, batch.inputs)[place].tolist() for model in (params, context.start))
    if form == "l2":
        pairs = zip(left, right, strict=True)
        wanted = sum(math.dist(a, b) ** 2 for a, b in pairs) / 2 / len(left)
    else:
        wanted = mean_kernel(left, left) + mean_kernel(right, right) - 2 * mean_kernel(left, right)
    found = float(method.loss(params, batch, context))
    assert found == pytest.approx(plain + 0.3 * wanted, rel=1e-12)


@both_engines
def test_zero_weight_equals_fedavg(images: Path, engine: str) -> None:
    found = after_rounds(images, "fedmmd", engine=engine, fedmmd__weight=0.0)
    assert_same_model(found, after_rounds(images, "fedavg", engine=engine), engine)


def one_step_a_round(images: Path, method: str, engine: str) -> RoundLoop:
    return after_rounds(images, method, engine=engine, train__batch_size=1000)


@both_engines
def test_first_step_of_every_round_equals_fedavg(images: Path, engine: str) -> None:
    # Both streams are the same model then; three rounds of one step each.
    found, wanted = (one_step_a_round(images, each, engine) for each in ("fedmmd", "fedavg"))
    assert_close_tensors(server_of(found), server_of(wanted))


@both_engines
def test_later_steps_differ_from_fedavg(images: Path, engine: str) -> None:
    found, wanted = (after_rounds(images, each, 1, engine=engine) for each in ("fedmmd", "fedavg"))
    assert differ(server_of(found), server_of(wanted))


def test_distant_logits_have_a_finite_gradient() -> None:
    method = make_method("fedmmd")
    params = {name: 1e4 * value for name, value in make_params(3).items()}
    loss, slopes = slopes_of(method, params, make_batch(), make_context(method))
    assert loss.isfinite()
    assert all(value.isfinite().all() for value in slopes.values())
