"""The factored trainer: the closed form by hand, and when it applies."""

import math
from collections.abc import Callable

import numpy
import pytest
import torch
from numpy.typing import NDArray
from own_methods import (
    Anchored,
    Clipped,
    Decay,
    MeanInput,
    SideBySide,
    Smooth,
    TwoViews,
    Warming,
)
from tasks import NUM_CLASSES, NUM_INPUTS, Task, draw, make_client
from torch import Tensor
from torch.nn.functional import linear, relu

from mpfedcl.core.tensors import Tensors
from mpfedcl.engines.trainers.base import TrainedStack, draw_batches, make_schedule
from mpfedcl.engines.trainers.factored import FactoredClients, FactoredTrainer
from mpfedcl.engines.trainers.find_linear_layers import Layer, find_layers
from mpfedcl.methods import Batch, Context, Method, find_method
from mpfedcl.methods.fedper import FedPer
from mpfedcl.models import Mlp, Model

Array = NDArray[numpy.float64]


class SmallModel(Model):
    """A model of a few layers in which each test has its own `apply`."""

    embedding_size = NUM_INPUTS
    names: tuple[str, ...] = ("w", "b")

    def init(self, generator: torch.Generator, dtype: torch.dtype) -> Tensors:
        shapes = {
            "w": (NUM_CLASSES, NUM_INPUTS),
            "b": (NUM_CLASSES,),
            "v": (NUM_INPUTS, NUM_INPUTS),
            "unused": (2,),
        }
        return {
            name: 0.5 * torch.randn(shapes[name], generator=generator, dtype=dtype)
            for name in self.names
        }

    def apply(self, params: Tensors, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, linear(inputs, params["w"], params["b"])


class NoBias(SmallModel):
    names = ("v", "w")

    def apply(self, params: Tensors, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = relu(linear(inputs, params["v"]))
        return hidden, linear(hidden, params["w"])


class HasUnused(SmallModel):
    names = ("w", "b", "unused")


class Tied(SmallModel):
    names = ("v", "w", "b")

    def apply(self, params: Tensors, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = relu(linear(relu(linear(inputs, params["v"])), params["v"]))
        return hidden, linear(hidden, params["w"], params["b"])


class Product(SmallModel):
    names = ("w",)

    def apply(self, params: Tensors, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, inputs @ params["w"].T


class BiasAside(SmallModel):
    def apply(self, params: Tensors, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, linear(inputs, params["w"]) + params["b"]


class Sequences(SmallModel):
    """A linear layer over [B, 1, in]."""

    def apply(self, params: Tensors, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, linear(inputs.unsqueeze(1), params["w"], params["b"]).squeeze(1)


class FixedBias(SmallModel):
    """A bias that is not a parameter."""

    names = ("w",)

    def apply(self, params: Tensors, inputs: Tensor) -> tuple[Tensor, Tensor]:
        fixed = torch.tensor([1.0, -2.0, 0.5], dtype=inputs.dtype)
        return inputs, linear(inputs, params["w"], fixed)


class Finishes(Method):
    def finish(
        self, params: Tensors, context: Context, num_steps: int
    ) -> tuple[Tensors | None, Tensors]:
        return super().finish(params, context, num_steps)


class Remembers(Method):
    def init_client(self, params: Tensors) -> Tensors:
        return {"seen": torch.zeros(1)}


class ReadsShape(Method):
    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        return super().loss(params, batch, context) / params["classifier.bias"].shape[0]


# By hand


def softmax_less_one_hot(logits: Array, label: int) -> Array:
    slope: Array = numpy.exp(logits) / numpy.exp(logits).sum()
    slope[label] -= 1
    return slope


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_two_steps_of_one_layer_match_a_hand_computation(momentum: float) -> None:
    lr = 0.3
    task = Task(
        [2], model=SmallModel(), train__lr=lr, train__batch_size=1, train__momentum=momentum
    )
    (work,) = task.works
    first, second = (int(batch[0]) for batch in draw_batches(work.client, task.experiment, 1))
    x, y = work.client.inputs.numpy(), work.client.labels.tolist()
    w0, b0 = task.start["w"].numpy(), task.start["b"].numpy()

    d1 = softmax_less_one_hot(w0 @ x[first] + b0, y[first])
    w1, b1 = w0 - lr * numpy.outer(d1, x[first]), b0 - lr * d1
    d2 = softmax_less_one_hot(w1 @ x[second] + b1, y[second])
    # The first step again by the momentum: it counts 1 + m times in total.
    w2 = w0 - lr * ((1 + momentum) * numpy.outer(d1, x[first]) + numpy.outer(d2, x[second]))
    b2 = b0 - lr * ((1 + momentum) * d1 + d2)

    trained = task.by_factors()
    found = trained.params(0)
    assert numpy.allclose(found["w"].numpy(), w2, rtol=1e-12, atol=1e-14)
    assert numpy.allclose(found["b"].numpy(), b2, rtol=1e-12, atol=1e-14)
    slopes = trained.slopes["w"][0].numpy()
    assert numpy.allclose(slopes, lr * numpy.stack([(1 + momentum) * d1, d2]), rtol=1e-12)
    assert torch.equal(trained.rows["w"][0], work.client.inputs[[first, second]])
    squared = ((w2 - w0) ** 2).sum() + ((b2 - b0) ** 2).sum()
    assert trained.squared_changes[0] == pytest.approx(squared, rel=1e-10)
    losses = [
        -math.log(numpy.exp(logits)[y[place]] / numpy.exp(logits).sum())
        for logits, place in ((w0 @ x[first] + b0, first), (w1 @ x[second] + b1, second))
    ]
    assert trained.losses[0] == pytest.approx(sum(losses) / 2, rel=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.95])
def test_factor_of_a_step_is_the_sum_of_momentum_powers(momentum: float) -> None:
    task = Task([10, 3], train__batch_size=2, train__momentum=momentum)
    schedule = make_schedule(task.works, task.experiment)
    layers = find_layers(task.method, task.model, task.works[0], None)
    assert layers is not None
    factors = FactoredClients(schedule, task.method, task.model, layers, (0.7, momentum))

    def moved(age: int) -> float:
        return 0.7 * sum(momentum**power for power in range(age))

    assert schedule.num_steps == [5, 2]
    for step in range(6):
        wanted = [moved(step - before) for before in range(step) for _ in range(2)]
        assert factors.scale(step).tolist() == pytest.approx(wanted, rel=1e-12)
    # Each client counts by its own number of steps; later rows belong to no client.
    for slopes in factors.slopes.values():
        slopes.fill_(1)
    factors.close()
    for slopes in factors.slopes.values():
        for client, count in enumerate(schedule.num_steps):
            wanted = [moved(max(count - step, 0)) for step in range(5) for _ in range(2)]
            assert slopes[client, :, 0].tolist() == pytest.approx(wanted, rel=1e-12)


# Against the loop


@pytest.mark.parametrize("model", [None, SmallModel(), NoBias()])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("method", [Method, FedPer, Anchored, Warming])
def test_training_equals_the_loop(
    method: type[Method], momentum: float, model: SmallModel | None
) -> None:
    task = Task([9, 1, 4, 14], method=method, model=model, train__momentum=momentum)
    trained, wanted = task.by_factors(), task.by_loop()
    for index, name in enumerate(trained.names):
        for key, value in wanted[name].params(0).items():
            torch.testing.assert_close(trained.params(index)[key], value, rtol=1e-11, atol=1e-13)
        assert trained.losses[index] == pytest.approx(wanted[name].losses[0], rel=1e-12)


@pytest.mark.parametrize(("hidden", "is_written"), [(30, True), (400, False)])
def test_models_with_fewer_values_than_rows_are_written_out(hidden: int, is_written: bool) -> None:
    # 32 rows: one layer of 400 x 100 weights is larger than 32 x (400 + 100) values.
    task = Task([16, 3], model=Mlp((NUM_INPUTS, hidden, 100), NUM_CLASSES), train__epochs=2)
    layers = find_layers(task.method, task.model, task.works[0], None)
    assert layers is not None
    trainer = FactoredTrainer(task.assembly)
    trainer.layers = layers
    (trained,) = trainer.train(task.works, 1, None)
    assert isinstance(trained, TrainedStack) == is_written
    wanted = task.by_loop()
    for index, name in enumerate(trained.names):
        for key, value in wanted[name].params(0).items():
            torch.testing.assert_close(trained.params(index)[key], value, rtol=1e-11, atol=1e-13)


# When it applies


def find(task: Task) -> tuple[Layer, ...] | None:
    return find_layers(task.method, task.model, task.works[0], task.received)


def test_layers_of_the_perceptron_are_found() -> None:
    wanted = (
        Layer("hidden.0.weight", "hidden.0.bias", takes_inputs=True),
        Layer("hidden.1.weight", "hidden.1.bias", takes_inputs=False),
        Layer("classifier.weight", "classifier.bias", takes_inputs=False),
    )
    for method in (Method, FedPer, Anchored, Warming):
        assert find(Task([3], method=method)) == wanted
    for name in ("fedavg", "local", "fedproto", "mp-fedcl", "sp-fedcl", "dp-fedcl"):
        assert find(Task([1], method=find_method(name), prototypes__per_class=2)) == wanted


def test_layers_without_bias_are_found() -> None:
    wanted = (Layer("v", None, takes_inputs=True), Layer("w", None, takes_inputs=False))
    assert find(Task([3], model=NoBias())) == wanted


NOT_LINEAR: dict[str, Callable[[], Task]] = {
    "gradients are adjusted": lambda: Task([3], method=Clipped),
    "the end is the method's own": lambda: Task([3], method=Finishes),
    "clients keep something": lambda: Task([3], method=Remembers),
    "weights in the loss": lambda: Task([3], method=Decay),
    "weights in a proximal term": lambda: Task([3], method=find_method("fedprox")),
    "applied twice": lambda: Task([3], method=TwoViews),
    "a shape is read": lambda: Task([3], method=ReadsShape),
    "a weight in two layers": lambda: Task([3], model=Tied()),
    "an unused parameter": lambda: Task([3], model=HasUnused()),
    "a product that is no layer": lambda: Task([3], model=Product()),
    "a bias added aside": lambda: Task([3], model=BiasAside()),
    "rows in two dimensions": lambda: Task([3], model=Sequences()),
}
BLIND = {
    "a bias that is no parameter": lambda: Task([3], model=FixedBias()),
    "two rows a sample": lambda: Task([3], method=SideBySide),
    "one row a batch": lambda: Task([3], method=MeanInput),
    "slopes by the inputs": lambda: Task([3], method=Smooth),
}


@pytest.mark.parametrize("case", NOT_LINEAR)
def test_losses_beyond_linear_layers_are_detected(case: str) -> None:
    assert find(NOT_LINEAR[case]()) is None


@pytest.mark.parametrize("case", BLIND)
def test_losses_that_look_like_linear_layers_are_detected(case: str) -> None:
    assert find(BLIND[case]()) is None


def test_finding_layers_changes_nothing() -> None:
    task = Task([3])
    before = {name: value.clone() for name, value in task.start.items()}
    inputs = task.works[0].client.inputs.clone()
    find(task)
    assert all(torch.equal(value, before[name]) for name, value in task.start.items())
    assert torch.equal(task.works[0].client.inputs, inputs)


def test_client_with_nan_does_not_affect_others() -> None:
    spoiled = make_client(9, 1)
    spoiled.inputs[4] = math.nan
    sizes = [8, 9, 8]
    trained = Task(sizes, clients={1: spoiled}).by_factors()
    sound = Task(sizes).by_factors()
    assert trained.names == sound.names
    for index, name in enumerate(trained.names):
        is_finite = all(bool(v.isfinite().all()) for v in trained.params(index).values())
        assert is_finite == (name != "client-1")
        assert math.isnan(trained.losses[index]) == (name == "client-1")
        if is_finite:
            inputs = draw(70, 3, NUM_INPUTS)
            for found, wanted in zip(
                trained.predict([index], inputs),
                sound.predict([index], inputs),
                strict=True,
            ):
                torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)
