"""The trainer of few clients with many samples: gradients are never stored.

The gradient of a linear layer's weight is dᵀx, with x [B, in] the input of the layer and d
[B, out] the gradient at its output, here called slope. Autograd computes only the slopes; the
product that makes the weight's gradient adds it to the velocity. A step passes over velocity and
weights once each, and allocates no memory.

It is the loop's algorithm with another order of sums, for methods whose loss uses weights in linear
layers only (`find_linear_layers.py` finds out).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from mpfedcl.core.tensors import Tensors
from mpfedcl.engines.trainers.base import (
    ClientTask,
    TrainedClient,
    TrainedClients,
    Trainer,
    draw_batches,
)
from mpfedcl.engines.trainers.find_linear_layers import Layer, LinearParameter, check_layer
from mpfedcl.methods import Batch, Context

_SMALLEST_SCALE = 2.0**-20
"""The velocity is rescaled if its scale would fall below this."""


class DirectTrainer(Trainer):
    """Train clients in turn, adding each layer's gradient directly to its velocity."""

    name = "direct"
    layers: Sequence[Layer] = ()
    """The layers of the loss; set before training."""

    def train(
        self, tasks: Sequence[ClientTask], round_number: int, received: object
    ) -> list[TrainedClients]:
        """Train the clients, each with a model of its own."""
        # One for all clients: memory that was just used is near.
        velocity = {name: torch.empty_like(value) for name, value in tasks[0].start.items()}
        return [self._train(task, round_number, received, velocity) for task in tasks]

    def _train(
        self, task: ClientTask, round_number: int, received: object, velocity: Tensors
    ) -> TrainedClient:
        client, params = task.client, {n: v.detach().clone() for n, v in task.start.items()}
        batches = draw_batches(client, self._experiment, task.number)
        lr, momentum, *_ = self._method.local_training(round_number)
        if len(batches) == 1:
            # The velocity after the only step moves nothing any more.
            momentum = 0.0
        weight_decay = self._experiment.train.weight_decay
        descent = DirectDescent(self.layers, params, velocity, lr, momentum, weight_decay)
        losses = []
        for step, chosen in enumerate(batches):
            batch = task.batch(chosen, step)
            context = Context(
                self._model.apply, task.start, received, task.state, task.own, step=step
            )
            loss, entered, slopes = self._differentiate(params, batch, context)
            descent.step(entered, slopes)
            losses.append(loss)
        sizes = torch.tensor([len(chosen) for chosen in batches], dtype=torch.float64)
        mean = float(torch.stack(losses).double().cpu() @ sizes) / float(sizes.sum())
        averaged = {n: v for n, v in params.items() if self._method.shared(n)}
        return TrainedClient(
            client, self._model, params, averaged=averaged, state=task.state, loss=mean
        )

    def _differentiate(
        self, now: Tensors, batch: Batch, context: Context
    ) -> tuple[Tensor, Tensors, Tensors]:
        """Return a batch's loss, and the input and the slope of each layer."""
        entered: Tensors = {}
        left: Tensors = {}

        def run(inputs: Tensor, weight: str, bias: str | None) -> Tensor:
            check_layer(self.layers, batch, entered, inputs, weight, bias)
            entered[weight] = inputs.detach()
            out = linear(inputs, now[weight], None if bias is None else now[bias])
            left[weight] = out if out.requires_grad else out.requires_grad_()
            return out

        params: Any = {name: LinearParameter(name, run) for name in now}
        loss = self._method.loss(params, batch, context)
        if any(out._version for out in left.values()):
            raise TypeError("the output of a linear layer is changed in place")
        slopes = torch.autograd.grad(loss, list(left.values()))
        return loss.detach(), entered, dict(zip(left, slopes, strict=True))


class DirectDescent:
    """SGD on linear layers: v <- momentum * v + dᵀx + weight_decay * w; w <- w - lr * v.

    The velocity is stored as u = v / scale, and the scale takes the powers of the momentum: a
    product that only adds takes one pass over memory, one that shrinks first takes two.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        params: Tensors,
        velocity: Tensors,
        lr: float,
        momentum: float,
        weight_decay: float = 0.0,
    ) -> None:
        """Change these parameters; the velocity is memory to use."""
        self.params = params
        self._scale = 1.0
        self._layers = layers
        self._lr, self._momentum, self._weight_decay = lr, momentum, weight_decay
        self._velocity = velocity
        if momentum:
            torch._foreach_zero_(list(velocity.values()))

    @torch.no_grad()
    def step(self, entered: Tensors, slopes: Tensors) -> None:
        """Change the parameters, given the input and the slope of each layer."""
        moved, factor = self.params, -self._lr
        if self._momentum:
            self._fade()
            moved, factor = self._velocity, 1 / self._scale
        params = list(self.params.values())
        if self._weight_decay:
            torch._foreach_add_(list(moved.values()), params, alpha=factor * self._weight_decay)
        for layer in self._layers:
            slope = slopes[layer.weight]
            moved[layer.weight].addmm_(slope.T, entered[layer.weight], alpha=factor)
            if layer.bias is not None:
                moved[layer.bias].add_(slope.sum(0), alpha=factor)
        if self._momentum:
            torch._foreach_add_(params, list(moved.values()), alpha=-self._lr * self._scale)

    def _fade(self) -> None:
        """Multiply the velocity by the momentum: its scale, as long as that is in range."""
        self._scale *= self._momentum
        if self._scale < _SMALLEST_SCALE:
            torch._foreach_mul_(list(self._velocity.values()), self._scale)
            self._scale = 1.0
