"""The direct trainer: a step by hand, and the same training as the loop."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from own_methods import Anchored, Warming
from tasks import NUM_CLASSES, NUM_INPUTS, Task, copy, draw, make_client
from torch import Tensor
from torch.nn.functional import linear

from mpfedcl.core.tensors import Tensors
from mpfedcl.engines.trainers.direct import DirectDescent
from mpfedcl.engines.trainers.find_linear_layers import Layer
from mpfedcl.engines.trainers.optimizer import MomentumSGD
from mpfedcl.methods import Method, find_method
from mpfedcl.methods.fedper import FedPer
from mpfedcl.models import Mlp, Model

LAYERS = [Layer("w", "b", takes_inputs=True), Layer("v", None, takes_inputs=False)]


def assert_the_loops(task: Task, rtol: float = 1e-10) -> None:
    found, wanted = task.by_direct(), task.by_loop()
    assert list(found) == list(wanted)
    for name, each in found.items():
        assert list(each.params(0)) == list(wanted[name].params(0))
        for key, value in wanted[name].params(0).items():
            torch.testing.assert_close(each.params(0)[key], value, rtol=rtol, atol=rtol * 1e-2)
        assert each.losses[0] == pytest.approx(wanted[name].losses[0], rel=rtol)
        assert each.states == wanted[name].states
        left, right = each.averaged(0), wanted[name].averaged(0)
        assert isinstance(left, dict)
        assert isinstance(right, dict)
        assert left.keys() == right.keys()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("momentum", [0.0, 1e-9, 0.3, 0.5, 0.99])
def test_direct_step_equals_sgd(momentum: float, weight_decay: float) -> None:
    start = {"w": draw(1, 4, 3), "b": draw(2, 4), "v": draw(3, 2, 4)}
    velocity = {name: torch.full_like(value, math.nan) for name, value in start.items()}
    before, plain = copy(start), copy(start)
    direct = DirectDescent(LAYERS, copy(start), velocity, 0.1, momentum, weight_decay)
    written = MomentumSGD(plain, 0.1, momentum, weight_decay)
    # Enough steps for the scale of the velocity to leave its range several times.
    for step in range(60):
        entered = {"w": draw(10 + step, 5, 3), "v": draw(100 + step, 5, 4)}
        slopes = {"w": draw(200 + step, 5, 4), "v": draw(300 + step, 5, 2)}
        gradients = {name: slopes[name].T @ entered[name] for name in slopes}
        written.step([gradients["w"], slopes["w"].sum(0), gradients["v"]])
        direct.step(entered, slopes)
    for name, value in plain.items():
        torch.testing.assert_close(direct.params[name], value, rtol=1e-11, atol=1e-12)
        assert torch.equal(start[name], before[name])


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("method", [Method, FedPer, Anchored, Warming])
def test_training_equals_the_loop(method: type[Method], momentum: float) -> None:
    assert_the_loops(Task([9, 1, 4, 14], method=method, train__momentum=momentum))


@pytest.mark.parametrize(
    "name", ["fedavg", "local", "fedproto", "mp-fedcl", "sp-fedcl", "dp-fedcl", "fedlc", "fedrs"]
)
@pytest.mark.parametrize(("dtype", "rtol"), [("float64", 1e-10), ("float32", 2e-5)])
def test_direct_equals_the_loop_for_every_loss_of_linear_layers(
    name: str, dtype: str, rtol: float
) -> None:
    changes: dict[str, Any] = {"prototypes__per_class": 2, "dtype": dtype}
    assert_the_loops(Task([6, 1, 5], method=find_method(name), **changes), rtol)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 13), min_size=1, max_size=3),
    st.integers(1, 6),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.5, 0.9]),
    st.sampled_from([0.0, 0.05]),
    st.integers(1, NUM_CLASSES),
)
def test_direct_equals_the_loop_for_any_sizes(
    sizes: list[int], batch: int, epochs: int, momentum: float, decay: float, classes: int
) -> None:
    clients = {number: make_client(size, number) for number, size in enumerate(sizes)}
    for client in clients.values():
        client.labels.clamp_(max=classes - 1)
    changes: dict[str, Any] = {
        "train__batch_size": batch,
        "train__epochs": epochs,
        "train__momentum": momentum,
        "train__weight_decay": decay,
    }
    assert_the_loops(Task(sizes, clients=clients, **changes))


def test_direct_training_does_not_change_its_inputs() -> None:
    task = Task([9, 5])
    before = copy(task.start)
    first = task.by_direct()
    kept = copy(first["client-0"].params(0))
    task.by_direct()
    assert all(torch.equal(task.start[name], value) for name, value in before.items())
    assert all(torch.equal(first["client-0"].params(0)[n], value) for n, value in kept.items())


def test_client_with_nan_does_not_affect_others() -> None:
    spoiled = make_client(9, 0)
    spoiled.inputs[4] = math.nan
    found = Task([9, 8], clients={0: spoiled}).by_direct()
    sound = Task([9, 8]).by_direct()
    assert math.isnan(found["client-0"].losses[0])
    for name, value in found["client-1"].params(0).items():
        assert torch.equal(value, sound["client-1"].params(0)[name])


class InPlace(Mlp):
    """Changes the output of its second layer in place, which autograd allows."""

    def apply(self, params: Tensors, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = linear(inputs, params["hidden.0.weight"], params["hidden.0.bias"]).relu()
        hidden = linear(hidden, params["hidden.1.weight"], params["hidden.1.bias"]).relu_()
        return hidden, linear(hidden, params["classifier.weight"], params["classifier.bias"])


def test_output_changed_in_place_is_rejected() -> None:
    model: Model = InPlace((NUM_INPUTS, 7, 4), NUM_CLASSES)
    with pytest.raises(TypeError, match="changed in place"):
        Task([4], model=model).by_direct()
