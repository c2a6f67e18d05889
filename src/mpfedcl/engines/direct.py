"""Few clients with many samples: gradients that are never written out.

The gradient of a linear layer's weight is dᵀx, with x [B, in] what went into the layer and d
[B, out] the slope of the loss at what came out of it. Autograd is asked for the slopes alone; the
product that makes the gradient adds it to the velocity. A step goes over velocity and weights once
each, and takes no fresh memory.

It is the loop's algorithm, client after client; sums are only taken in another order. It serves
methods whose loss uses weights in linear layers alone (`linear_layers.py` tries it out).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from mpfedcl.core.tensors import Tensors
from mpfedcl.engines.linear_layers import Layer, LinearParameter, check_layer
from mpfedcl.engines.schedule import draw_batches
from mpfedcl.engines.trained_clients import TrainedClient, TrainedClients
from mpfedcl.engines.trainer import ClientTask, Trainer
from mpfedcl.methods import Batch, Context, FullBatch, received_at

_SMALLEST_SCALE = 2.0**-20
"""Where the velocity's scale would fall below it, the velocity is written anew."""


@dataclass(frozen=True)
class Begun:
    """How far a client's training has come: beside its parameters and their velocity."""

    num_steps: int
    scale: float = 1.0
    """What the velocity must be multiplied by."""
    loss: float = 0.0
    """The sum of the samples' losses."""


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

    def begin(
        self,
        task: ClientTask,
        round_number: int,
        received: object,
        part: float,
        memory: tuple[Tensors, Tensors],
    ) -> Begun:
        """Take a part of a client's steps, its parameters and velocity in the memory given."""
        params, velocity = memory
        torch._foreach_copy_(list(params.values()), [task.start[name] for name in params])
        batches = self._draw(task, round_number)
        num_steps = round(part * len(batches))
        descent = self._make_descent(len(batches), round_number, params, velocity)
        loss = self._take_steps(task, received, batches[:num_steps], descent)
        return Begun(num_steps, descent.scale, loss)

    def finish(
        self,
        task: ClientTask,
        round_number: int,
        received: object,
        begun: Begun,
        memory: tuple[Tensors, Tensors],
    ) -> TrainedClient:
        """Take the steps that are left of what was begun elsewhere."""
        params = {name: memory[0][name].clone() for name in task.start}
        batches = self._draw(task, round_number)
        descent = self._make_descent(len(batches), round_number, params, memory[1], begun.scale)
        left = batches[begun.num_steps :]
        loss = begun.loss + self._take_steps(task, received, left, descent, begun.num_steps)
        return self._end(task, batches, params, loss)

    def _train(
        self, task: ClientTask, round_number: int, received: object, velocity: Tensors
    ) -> TrainedClient:
        params = {name: value.detach().clone() for name, value in task.start.items()}
        batches = self._draw(task, round_number)
        descent = self._make_descent(len(batches), round_number, params, velocity)
        loss = self._take_steps(task, received, batches, descent)
        return self._end(task, batches, params, loss)

    def _draw(self, task: ClientTask, round_number: int) -> list[Tensor]:
        return draw_batches(task.client, self._experiment, task.draw_number(round_number))

    def _make_descent(
        self,
        num_steps: int,
        round_number: int,
        params: Tensors,
        velocity: Tensors,
        scale: float | None = None,
    ) -> "DirectDescent":
        lr, momentum, *_ = self._method.local_training(round_number)
        if num_steps == 1:
            # What the only step leaves behind moves nothing any more.
            momentum = 0.0
        weight_decay = self._experiment.train.weight_decay
        return DirectDescent(self.layers, params, velocity, lr, momentum, weight_decay, scale)

    def _take_steps(
        self,
        task: ClientTask,
        received: object,
        batches: Sequence[Tensor],
        descent: "DirectDescent",
        first: int = 0,
    ) -> float:
        """Take a step on each batch; return the sum of the samples' losses."""
        client, losses = task.client, []
        for step, chosen in enumerate(batches, start=first):
            batch = FullBatch.of(
                client.inputs.index_select(0, chosen), client.labels.index_select(0, chosen)
            )
            given = received_at(received, step)
            context = Context(self._model.apply, task.start, given, task.state, task.own)
            loss, entered, slopes = self._differentiate(descent.params, batch, context)
            descent.step(entered, slopes)
            losses.append(loss)
        if not losses:
            return 0.0
        sizes = torch.tensor([len(chosen) for chosen in batches], dtype=torch.float64)
        return float(torch.stack(losses).double().cpu() @ sizes)

    def _end(
        self, task: ClientTask, batches: Sequence[Tensor], params: Tensors, loss: float
    ) -> TrainedClient:
        averaged = {n: v for n, v in params.items() if self._method.shared(n)}
        mean = loss / sum(map(len, batches))
        return TrainedClient(
            task.client, self._model, params, averaged=averaged, state=task.state, loss=mean
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
        params: Tensors,
        velocity: Tensors,
        lr: float,
        momentum: float,
        weight_decay: float = 0.0,
        scale: float | None = None,
    ) -> None:
        """Change these parameters; with a scale, go on with the velocity as it is."""
        self.params = params
        self.scale = 1.0 if scale is None else scale
        self._layers = layers
        self._lr, self._momentum, self._weight_decay = lr, momentum, weight_decay
        self._velocity = velocity
        if momentum and scale is None:
            torch._foreach_zero_(list(velocity.values()))

    @torch.no_grad()
    def step(self, entered: Tensors, slopes: Tensors) -> None:
        """Change the parameters, given what went into each layer and the slope at what came out."""
        moved, factor = self.params, -self._lr
        if self._momentum:
            self._fade()
            moved, factor = self._velocity, 1 / self.scale
        params = list(self.params.values())
        if self._weight_decay:
            torch._foreach_add_(list(moved.values()), params, alpha=factor * self._weight_decay)
        for layer in self._layers:
            slope = slopes[layer.weight]
            moved[layer.weight].addmm_(slope.T, entered[layer.weight], alpha=factor)
            if layer.bias is not None:
                moved[layer.bias].add_(slope.sum(0), alpha=factor)
        if self._momentum:
            torch._foreach_add_(params, list(moved.values()), alpha=-self._lr * self.scale)

    def _fade(self) -> None:
        """Multiply the velocity by the momentum: its scale, as long as that is in range."""
        self.scale *= self._momentum
        if self.scale < _SMALLEST_SCALE:
            torch._foreach_mul_(list(self._velocity.values()), self.scale)
            self.scale = 1.0
