"""FedLC and FedRS: losses that know which classes a client holds."""

from pathlib import Path
from typing import Any

import pytest
import torch
from identities import after_rounds, both_engines, differ, server_of
from tiny_method_inputs import apply, draw, make_batch, make_method, make_params

from mpfedcl.core.tensors import Tensors
from mpfedcl.methods import Context, Method
from small_experiments import assert_same_tensors

LABELS = (0, 1, 1, 1, 1, 0)
"""Class 0 twice, class 1 four times; classes 2 and 3 are missing."""


def slopes(method: Method, params: Tensors, own: Tensors) -> Tensors:
    batch = make_batch(LABELS)
    context = Context(apply, params, None, {}, own)
    found: Tensors = torch.func.grad(lambda p: method.loss(p, batch, context))(params)
    return found


def test_fedlc_takes_margins_off_the_logits() -> None:
    method, params, batch = make_method("fedlc", fedlc__tau=2.0), make_params(), make_batch(LABELS)
    own = method.describe(batch.labels)
    assert own["margins"].tolist() == [2 * 2**-0.25, 2 * 4**-0.25, 1e6, 1e6]
    found = method.loss(params, batch, Context(apply, params, None, {}, own))
    _, logits = apply(params, batch.inputs)
    wanted = 0.0
    for row, label in zip(logits.tolist(), LABELS, strict=True):
        moved = [row[0] - 2 * 2**-0.25, row[1] - 2 * 4**-0.25]
        total = sum(torch.tensor(moved, dtype=torch.float64).exp().tolist())
        wanted -= moved[label] - float(torch.tensor(total, dtype=torch.float64).log())
    assert float(found) == pytest.approx(wanted / len(LABELS), rel=1e-12)


def test_missing_class_gets_no_gradient_from_fedlc_and_less_from_fedrs() -> None:
    params = make_params()
    plain = slopes(make_method("fedavg"), params, {})["c"]
    assert bool(plain[:, 2:].abs().gt(0).all())
    method = make_method("fedlc")
    found = slopes(method, params, method.describe(torch.tensor(LABELS)))["c"]
    assert bool(found[:, 2:].eq(0).all())
    assert bool(found[:, :2].abs().gt(0).all())


def test_equal_class_counts_equal_cross_entropy() -> None:
    params, even = make_params(), torch.tensor([0, 1, 2, 3] * 3)
    for name in ("fedlc", "fedrs"):
        method = make_method(name)
        found = slopes(method, params, method.describe(even))
        wanted = slopes(make_method("fedavg"), params, {})
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, rtol=1e-12, atol=1e-14)


def test_fedrs_scales_the_logits_of_missing_classes() -> None:
    method, params, batch = make_method("fedrs"), make_params(), make_batch(LABELS)
    own = method.describe(batch.labels)
    assert own["scales"].tolist() == [1, 1, 0.5, 0.5]
    _, logits = apply(params, batch.inputs)
    scaled = logits * torch.tensor([1, 1, 0.5, 0.5], dtype=torch.float64)
    wanted = torch.nn.functional.cross_entropy(scaled, batch.labels)
    found = method.loss(params, batch, Context(apply, params, None, {}, own))
    assert float(found) == pytest.approx(float(wanted), rel=1e-12)


@both_engines
@pytest.mark.parametrize(
    ("method", "off"), [("fedlc", {"fedlc__tau": 0.0}), ("fedrs", {"fedrs__alpha": 1.0})]
)
def test_disabled_method_equals_fedavg(
    images: Path, method: str, off: dict[str, Any], engine: str
) -> None:
    average = after_rounds(images, "fedavg", engine=engine)
    assert_same_tensors(
        server_of(after_rounds(images, method, engine=engine, **off)), server_of(average)
    )
    few: dict[str, Any] = {
        "partition__kind": "classes",
        "partition__classes_per_client": 2,
        "engine": engine,
    }
    default, plain = (after_rounds(images, name, **few) for name in (method, "fedavg"))
    assert differ(server_of(default), server_of(plain))


def test_margins_are_finite_with_one_class_or_one_sample() -> None:
    method = make_method("fedlc")
    for labels in ([3], [1, 1, 1]):
        own = method.describe(torch.tensor(labels))
        assert bool(own["margins"].isfinite().all())
        batch = make_batch(labels)
        context = Context(apply, make_params(), None, {}, own)
        gradient = torch.func.grad(lambda p, b=batch, c=context: method.loss(p, b, c))(
            {"w": draw(1, 5, 3), "c": draw(2, 3, 4)}
        )
        assert all(bool(value.isfinite().all()) for value in gradient.values())
