"""Few clients with many samples: gradients that are never written out.

The gradient of a linear layer's weight is dᵀx, with x [B, in] what went into the layer and d
[B, out] the slope of the loss at what came out of it. Autograd is asked for the slopes alone; the
product that makes the gradient adds it to the velocity. A step goes over velocity and weights once
each, and takes no fresh memory.

It is the loop's algorithm, client after client; sums are only taken in another order. It serves
methods whose loss uses weights in linear layers alone (`linear_layers.py` tries it out).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from mpfedcl.engines.linear_layers import Layer, LinearParameter, check_layer
from mpfedcl.engines.schedule import draw_batches
from mpfedcl.engines.trained_clients import TrainedClient, TrainedClients
from mpfedcl.engines.trainer import ClientTask, Trainer
from mpfedcl.methods import Batch, Context, FullBatch
from mpfedcl.tensors import Tensors

_SMALLEST_SCALE = 2.0**-20
"""Where the velocity's scale would fall below it, the velocity is written anew."""


class DirectTrainer(Trainer):
    """Trains clients in turn, each layer's gradient going straight into its velocity."""

    name = "direct"
    layers: Sequence[Layer] = ()
    """What the loss consists of; to be set before it trains."""

    def train(
        self, tasks: Sequence[ClientTask], round_number: int, received: object
    ) -> list[TrainedClients]:
        """Train the clients; each stands alone afterwards."""
        # One for all clients: memory that was just used is near.
        velocity = {name: torch.empty_like(value) for name, value in tasks[0].start.items()}
        return [self._train(task, round_number, received, velocity) for task in tasks]

    def _train(
        self, task: ClientTask, round_number: int, received: object, velocity: Tensors
    ) -> TrainedClient:
        client = task.client
        batches = draw_batches(client, self._experiment, task.draw_number(round_number))
        lr, momentum = self._method.descent(round_number)
        if len(batches) == 1:
            # What the only step leaves behind moves nothing any more.
            momentum = 0.0
        descent = DirectDescent(
            self.layers, task.start, velocity, lr, momentum, self._experiment.train.weight_decay
        )
        losses = []
        for step, chosen in enumerate(batches):
            batch = FullBatch.of(
                client.inputs.index_select(0, chosen), client.labels.index_select(0, chosen)
            )
            given = self._method.at_step(received, step)
            context = Context(self._model.apply, task.start, given, task.state, task.own)
            loss, entered, slopes = self._differentiate(descent.params, batch, context)
            descent.step(entered, slopes)
            losses.append(loss)
        sizes = torch.tensor([len(chosen) for chosen in batches], dtype=torch.float64)
        mean = float(torch.stack(losses).double().cpu() @ sizes / sizes.sum())
        averaged = {n: v for n, v in descent.params.items() if self._method.shared(n)}
        return TrainedClient(
            client, self._model, descent.params, averaged=averaged, state=task.state, loss=mean
        )

    def _differentiate(
        self, now: Tensors, batch: Batch, context: Context
    ) -> tuple[Tensor, Tensors, Tensors]:
        """Return a batch's loss, what went into each layer, and the slope at what came out."""
        entered: Tensors = {}
        left: Tensors = {}

        def run(inputs: Tensor, weight: str, bias: str | None) -> Tensor:
            layer = Layer(weight, bias, inputs is batch.inputs)
            fits = inputs.shape[:-1] == batch.labels.shape
            check_layer(self.layers, layer, entered, fits=fits)
            entered[weight] = inputs.detach()
            out = linear(inputs, now[weight], None if bias is None else now[bias])
            left[weight] = out if out.requires_grad else out.requires_grad_()
            return out

        params: Any = {name: LinearParameter(name, run) for name in now}
        loss = self._method.loss(params, batch, context)
        if any(out._version for out in left.values()):
            raise TypeError("what comes out of a linear layer is changed in place")
        slopes = torch.autograd.grad(loss, list(left.values()))
        return loss.detach(), entered, dict(zip(left, slopes, strict=True))


class DirectDescent:
    """SGD on linear layers: v <- momentum * v + dᵀx + weight_decay * w; w <- w - lr * v.

    The velocity is kept as u = v / scale, where the scale takes the momentum's powers: a product
    that only adds to what is there takes one pass over it, one that shrinks it first takes two.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        start: Tensors,
        velocity: Tensors,
        lr: float,
        momentum: float,
        weight_decay: float = 0.0,
    ) -> None:
        self.params = {name: value.detach().clone() for name, value in start.items()}
        self._layers = layers
        self._lr, self._momentum, self._weight_decay = lr, momentum, weight_decay
        self._velocity, self._scale = velocity, 1.0
        if momentum:
            torch._foreach_zero_(list(velocity.values()))

    @torch.no_grad()
    def step(self, entered: Tensors, slopes: Tensors) -> None:
        """Change the parameters, given what went into each layer and the slope at what came out."""
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
