"""The trainer of many clients with few samples: models are never written out.

One step of SGD changes the weight W of a linear layer by an outer product: with x [B, in] the
input of the layer and d [B, out] the gradient at its output, here called slope, the gradient is
dᵀx. After t steps with momentum m

    W_t = W_0 - lr Σ_{s<t} c(t-s) d_sᵀ x_s,    c(j) = 1 + m + ... + m^(j-1),

so a client *is* the W_0 that all share and its few rows x and d. A product with W_t needs nothing
else: x W_tᵀ = x W_0ᵀ - (x x_sᵀ) d_s ..., where the first term is one large product for all clients.
Nothing of the size of a model is read or written for a client: neither weights nor gradients nor
velocity. With as many rows as a layer is wide, writing the weights out is the cheaper way again.

It is the same algorithm with another order of sums, not an approximation, for methods whose loss
uses weights in linear layers only (`linear_layers.py` finds out).
"""

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.functional import linear

from mpfedcl.core.tensors import Tensors
from mpfedcl.engines.trainers.base import (
    ClientTask,
    Schedule,
    TrainedClients,
    TrainedStack,
    Trainer,
    make_schedule,
    stack_tensors,
)
from mpfedcl.engines.trainers.linear_layers import Layer, LinearParameter, check_layer
from mpfedcl.engines.trainers.optimizer import MomentumSGD
from mpfedcl.methods import Batch, Context, Method, received_at
from mpfedcl.methods.messages import StackMember
from mpfedcl.models import Model


class StartingParameters:
    """The parameters that clients begin with: common ones once, each client's own stacked."""

    def __init__(self, method: Method, starts: Sequence[Tensors]) -> None:
        self.common = {n: v for n, v in starts[0].items() if method.shared(n)}
        self.own = stack_tensors(
            [{n: v for n, v in start.items() if n not in self.common} for start in starts]
        )

    def first(self, count: int) -> Tensors:
        """Return the own parameters of the first clients."""
        return {name: value[:count] for name, value in self.own.items()}

    def stacked(self, name: str, count: int) -> Tensor:
        """Return a parameter as [clients, ...]."""
        if name in self.own:
            return self.own[name]
        return self.common[name].expand(count, *(-1,) * self.common[name].dim())


class Factors:
    """The inputs (rows) and slopes of each layer in all steps so far, of the clients of a stack."""

    def __init__(
        self,
        schedule: Schedule,
        start: StartingParameters,
        layers: Sequence[Layer],
        lr: float,
        momentum: float,
    ) -> None:
        self.schedule = schedule
        self.start = start
        self.layers = layers
        self.num_rows = schedule.samples[0].numel()
        """Rows of a client in the whole round."""
        self.inputs = schedule.inputs()
        self._labels = schedule.labels()
        self._lr = lr
        self._momentum = momentum
        count = len(schedule.clients)
        self.rows: Tensors = {}
        self.slopes: Tensors = {}
        self.biases: Tensors = {}
        self.projected: Tensors = {}
        """x W_0ᵀ of all rows of the round, for the layers that take the inputs: one product."""
        for layer in layers:
            weight = start.common.get(layer.weight, start.own.get(layer.weight))
            assert weight is not None
            fan_out, fan_in = weight.shape[-2:]
            # Zeros, because a client that has finished leaves the rows of later steps as they are.
            self.slopes[layer.weight] = weight.new_zeros(count, self.num_rows, fan_out)
            if layer.takes_inputs:
                self.rows[layer.weight] = self.inputs
                self.projected[layer.weight] = self.inputs @ weight.mT
            else:
                self.rows[layer.weight] = weight.new_zeros(count, self.num_rows, fan_in)
            if layer.bias is not None:
                self.biases[layer.bias] = start.stacked(layer.bias, count).clone()
        self._descent = MomentumSGD(self.biases, lr, momentum) if self.biases else None

    def batch(self, step: int) -> Batch:
        """Return the batches of the clients that still train."""
        active, rows = self._at(step)
        return Batch(
            self.inputs[:active, rows],
            self._labels[:active, rows],
            self.schedule.mask[:active, step],
        )

    def taps(self, step: int) -> Tensors:
        """Return the known part of each layer's output [clients, rows, out], as a leaf.

        That is the bias, and for layers of the inputs the product with the initial weight.
        """
        active, rows = self._at(step)
        taps = {}
        for layer in self.layers:
            shape = (active, self.schedule.num_rows, self.slopes[layer.weight].shape[2])
            tap = self.slopes[layer.weight].new_zeros(1)
            if layer.bias is not None:
                tap = self.biases[layer.bias][:active].unsqueeze(1)
            if layer.takes_inputs:
                tap = self.projected[layer.weight][:active, rows] + tap
            taps[layer.weight] = tap.expand(shape).detach().requires_grad_()
        return taps

    def earlier_steps(self, step: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the rows and slopes of all steps before; nothing before the first."""
        active, rows = self._at(step)
        if step == 0:
            return {}
        return {
            name: (self.rows[name][:active, : rows.start], self.slopes[name][:active, : rows.start])
            for name in self.rows
        }

    def scale(self, step: int) -> Tensor:
        """Return [rows before]: how much each earlier row has moved the weights by now."""
        return self._scales(torch.tensor([step]))[0, : step * self.schedule.num_rows]

    def keep(self, step: int, entered: Tensors, slopes: Tensors) -> None:
        """Store the rows and slopes of a step, and move the biases."""
        active, rows = self._at(step)
        for layer in self.layers:
            if layer.weight in entered:
                self.rows[layer.weight][:active, rows] = entered[layer.weight].detach()
            self.slopes[layer.weight][:active, rows] = slopes[layer.weight]
        if self._descent is not None:
            biased = [layer.weight for layer in self.layers if layer.bias is not None]
            self._descent.step([slopes[name].sum(1) for name in biased], active)

    def close(self) -> None:
        """Scale the slopes by their total effect: W = W_0 - slopesᵀ rows from here on."""
        scales = self._scales(torch.tensor(self.schedule.num_steps)).unsqueeze(2)
        for slopes in self.slopes.values():
            slopes.mul_(scales)

    def _at(self, step: int) -> tuple[int, slice]:
        num_rows = self.schedule.num_rows
        return self.schedule.active(step), slice(step * num_rows, (step + 1) * num_rows)

    def _scales(self, steps: Tensor) -> Tensor:
        """Return [len(steps), rows]: lr · c(t - s) after t steps for the rows of step s."""
        like = next(iter(self.slopes.values()))
        ages = steps.unsqueeze(1) - torch.arange(self.schedule.samples.shape[1])
        powers = self._momentum ** ages.clamp(min=0).double()
        moved = self._lr * (1 - powers) / (1 - self._momentum)
        return moved.repeat_interleave(self.schedule.num_rows, dim=1).to(like)


class FactoredTrainer(Trainer):
    """Train clients together, each as its rows and slopes."""

    name = "factored"
    layers: Sequence[Layer] = ()
    """The layers of the loss; set before training."""

    def train(
        self, tasks: Sequence[ClientTask], round_number: int, received: object
    ) -> list[TrainedClients]:
        """Train the clients together."""
        schedule = make_schedule([task.client for task in tasks], self._experiment, round_number)
        by_name = {task.client.name: task for task in tasks}
        start = StartingParameters(self._method, [by_name[c.name].start for c in schedule.clients])
        own = stack_tensors([by_name[c.name].own for c in schedule.clients])
        lr, momentum, *_ = self._method.local_training(round_number)
        factors = Factors(schedule, start, self.layers, lr, momentum)
        losses = torch.zeros(len(schedule.clients), dtype=torch.float64)
        for step in range(schedule.num_steps[0]):
            given = received_at(received, step)
            losses[: schedule.active(step)] += self._step(factors, own, step, given).cpu()
        factors.close()
        sizes = torch.tensor([len(client.labels) for client in schedule.clients])
        means = (losses / (self._experiment.train.epochs * sizes)).tolist()
        trained = TrainedFactors(self._model, factors, means)
        return [trained.to_stack() if is_smaller_written_out(factors) else trained]

    def _step(self, factors: Factors, own: Tensors, step: int, given: object) -> Tensor:
        """Take one step of each client that still trains; return losses times batch sizes."""
        taps = factors.taps(step)
        batch = factors.batch(step)
        active = len(batch.labels)
        in_dims = (0, 0, 0, 0, None, 0)
        losses, entered = vmap(partial(self._loss, given, factors.start.common), in_dims)(
            taps,
            factors.earlier_steps(step),
            factors.start.first(active),
            {name: value[:active] for name, value in own.items()},
            factors.scale(step),
            batch,
        )
        slopes = torch.autograd.grad(losses.sum(), list(taps.values()))
        factors.keep(step, entered, dict(zip(taps, slopes, strict=True)))
        return losses.detach() * batch.mask.sum(1)

    def _loss(
        self,
        given: object,
        common: Tensors,
        taps: Tensors,
        past: Mapping[str, tuple[Tensor, Tensor]],
        kept: Tensors,
        own: Tensors,
        scale: Tensor,
        batch: Batch,
    ) -> tuple[Tensor, Tensors]:
        """Return one client's loss, and the input of each layer after the first."""
        start = {**common, **kept}
        entered: Tensors = {}
        seen: set[str] = set()

        def run(inputs: Tensor, weight: str, bias: str | None) -> Tensor:
            layer = Layer(weight, bias, inputs is batch.inputs)
            fits = inputs.shape[:-1] == batch.labels.shape
            check_layer(self.layers, layer, seen, fits=fits)
            seen.add(weight)
            # The tap holds the bias, and x W_0ᵀ if x are the inputs; its gradient is the slope.
            out = taps[weight]
            if not layer.takes_inputs:
                entered[weight] = inputs
                out = linear(inputs, start[weight]) + out
            if not past:
                return out
            rows, slopes = past[weight]
            return out - ((inputs @ rows.T) * scale) @ slopes

        params: Any = {name: LinearParameter(name, run) for name in start}
        context = Context(self._model.apply, start, given, {}, own)
        return self._method.loss(params, batch, context), entered


def is_smaller_written_out(factors: Factors) -> bool:
    """Return whether the weights of a client take less memory than its rows and slopes."""
    shapes = [(rows.shape[2], factors.slopes[name].shape[2]) for name, rows in factors.rows.items()]
    weights = sum(fan_in * fan_out for fan_in, fan_out in shapes)
    return weights < factors.num_rows * sum(fan_in + fan_out for fan_in, fan_out in shapes)


class TrainedFactors(TrainedClients):
    """Several clients as their rows and slopes."""

    def __init__(self, model: Model, factors: Factors, losses: Sequence[float]) -> None:
        self.names = [client.name for client in factors.schedule.clients]
        self.losses = losses
        self.states = [{}] * len(self.names)
        self._model = model
        self.factors = factors
        self._start = factors.start

    def averaged(self, index: int) -> StackMember:
        """Return a client's part of the stack."""
        return StackMember(self, index)

    def params(self, index: int) -> Tensors:
        """Return a client's whole model, written out."""
        return self._write(slice(index, index + 1), squeeze=True)

    def embed(self) -> list[Tensor]:
        """Return every client's embeddings of its own training samples, in their order."""
        schedule = self.factors.schedule
        # The first epoch has each sample once.
        steps = max(-(-len(client.labels) // schedule.num_rows) for client in schedule.clients)
        due = slice(steps * schedule.num_rows)
        projected = {name: value[:, due] for name, value in self.factors.projected.items()}
        embeddings, _ = self._predict(slice(None), self.factors.inputs[:, due], projected)
        places, masks = schedule.samples[:, :steps].flatten(1), schedule.mask[:, :steps].flatten(1)
        found = []
        for number, client in enumerate(schedule.clients):
            size = len(client.labels)
            own = embeddings.new_empty(size, embeddings.shape[2])
            own[places[number][masks[number]][:size]] = embeddings[number][masks[number]][:size]
            found.append(own)
        return found

    def predict(self, some: Sequence[int], inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings and logits [models, B, ...]."""
        return self._predict(list(some), inputs, None)

    def to_stack(self) -> TrainedStack:
        """Return the same clients with their models written out."""
        return TrainedStack(
            self.factors.schedule.clients,
            self._model,
            self._write(slice(None)),
            starts=[self._start.common] * len(self),
            states=self.states,
            losses=self.losses,
        )

    # As `messages.UpdateStack`

    @property
    def template(self) -> Tensors:
        """One client's tensors, for their shapes."""
        return self._start.common

    def weighted_sum(self, weights: Tensor) -> Tensors:
        """Return the weighted sum over clients: one product a layer for all of them."""
        counted = weights.nonzero().squeeze(1)
        everyone = len(counted) == len(weights)
        totals = {}
        for layer in self.factors.layers:
            if layer.weight in self._start.common:
                rows, slopes = self.factors.rows[layer.weight], self.factors.slopes[layer.weight]
                if not everyone:
                    rows, slopes = rows[counted], slopes[counted]
                shares = weights[counted].to(slopes)
                scaled = (slopes * shares.view(-1, 1, 1)).flatten(0, 1)
                base = self._start.common[layer.weight]
                totals[layer.weight] = torch.addmm(
                    base, scaled.T, rows.flatten(0, 1), beta=float(shares.sum()), alpha=-1
                )
            if layer.bias is not None and layer.bias in self._start.common:
                bias = self.factors.biases[layer.bias]
                totals[layer.bias] = weights[counted].to(bias) @ bias[counted]
        return totals

    @cached_property
    def squared_changes(self) -> list[float]:
        """|slopesᵀ rows|² = Σ (slopes slopesᵀ) ∘ (rows rowsᵀ), and the biases' part."""
        squares = torch.zeros(len(self), dtype=torch.float64)
        for layer in self.factors.layers:
            if layer.weight in self._start.common:
                rows, slopes = self.factors.rows[layer.weight], self.factors.slopes[layer.weight]
                product = (rows @ rows.mT).mul_(slopes @ slopes.mT)
                squares += product.sum((1, 2), dtype=torch.float64).cpu()
            if layer.bias is not None and layer.bias in self._start.common:
                change = self.factors.biases[layer.bias] - self._start.common[layer.bias]
                squares += change.square().sum(1, dtype=torch.float64).cpu()
        # Rounding may give small negative values; NaN stays NaN.
        return squares.clamp(min=0).tolist()

    def tensors(self, index: int) -> Tensors:
        """Return the shared parameters of one client."""
        return {n: v for n, v in self.params(index).items() if n in self._start.common}

    def _write(self, some: slice, *, squeeze: bool = False) -> Tensors:
        """Return W_0 - slopesᵀ rows, and the biases, of some clients."""
        factors, params = self.factors, {}
        for layer in factors.layers:
            rows, slopes = factors.rows[layer.weight][some], factors.slopes[layer.weight][some]
            start = self._start.stacked(layer.weight, len(self))[some]
            params[layer.weight] = torch.baddbmm(start, slopes.mT, rows, alpha=-1)
            if layer.bias is not None:
                params[layer.bias] = factors.biases[layer.bias][some].clone()
        return {n: v.squeeze(0) for n, v in params.items()} if squeeze else params

    def _predict(
        self, some: slice | list[int], inputs: Tensor, projected: Tensors | None
    ) -> tuple[Tensor, Tensor]:
        """Run the models on common inputs, or each on its own with their known products."""
        factors = self.factors
        own = {name: value[some] for name, value in self._start.own.items()}
        past = {n: (factors.rows[n][some], factors.slopes[n][some]) for n in factors.rows}
        biases = {name: value[some] for name, value in factors.biases.items()}
        in_dims = (0, 0, 0, 0, None if projected is None else 0)
        embeddings, logits = vmap(self._apply, in_dims)(own, past, biases, projected or {}, inputs)
        return embeddings, logits

    def _apply(
        self,
        own: Tensors,
        past: Mapping[str, tuple[Tensor, Tensor]],
        biases: Tensors,
        projected: Tensors,
        inputs: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Run one client's model."""
        start = {**self._start.common, **own}

        def run(given: Tensor, weight: str, bias: str | None) -> Tensor:
            rows, slopes = past[weight]
            known = given is inputs and weight in projected
            out = projected[weight] if known else linear(given, start[weight])
            out = out - (given @ rows.T) @ slopes
            return out if bias is None else out + biases[bias]

        params: Any = {name: LinearParameter(name, run) for name in start}
        return self._model.apply(params, inputs)
