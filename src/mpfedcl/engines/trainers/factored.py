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
uses weights in linear layers only (`find_linear_layers.py` finds out).
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
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
    batch_dims,
    leaves_padding_out,
    make_schedule,
    stack_tensors,
    take_one,
    take_some,
)
from mpfedcl.engines.trainers.find_linear_layers import Layer, LinearParameter, check_layer
from mpfedcl.engines.trainers.optimizer import MomentumSGD
from mpfedcl.methods import Batch, Context, Method
from mpfedcl.methods.messages import StackMember
from mpfedcl.models import Model


class FactoredClients(TrainedClients):
    """Several clients as rows (inputs) and slopes of each layer in all steps so far.

    Parameters that clients begin with are in `common` once, or stacked in `own`. The clients are
    trained after `close`.
    """

    def __init__(
        self,
        schedule: Schedule,
        method: Method,
        model: Model,
        layers: Sequence[Layer],
        descent: tuple[float, float],
    ) -> None:
        """Begin the round; `descent` is the learning rate and the momentum."""
        super().__init__(schedule.clients, model, (), [{}] * len(schedule.tasks))
        starts = [task.start for task in schedule.tasks]
        self.common = {n: v for n, v in starts[0].items() if method.shared(n)}
        self.own = stack_tensors(
            [{n: v for n, v in start.items() if n not in self.common} for start in starts]
        )
        self.schedule = schedule
        self.layers = layers
        self.num_rows = schedule.samples[0].numel()
        """Rows of a client in the whole round."""
        self._whole = schedule.whole()
        self._lr, self._momentum = descent
        self.rows: Tensors = {}
        self.slopes: Tensors = {}
        self.biases: Tensors = {}
        self._projected: Tensors = {}
        """x W_0ᵀ of all rows of the round, for the layers that take the inputs: one product."""
        for layer in layers:
            weight = self.common.get(layer.weight, self.own.get(layer.weight))
            assert weight is not None
            fan_out, fan_in = weight.shape[-2:]
            # Zeros, because a client that has finished leaves the rows of later steps as they are.
            self.slopes[layer.weight] = weight.new_zeros(len(self), self.num_rows, fan_out)
            if layer.takes_inputs:
                self.rows[layer.weight] = self._whole.inputs
                self._projected[layer.weight] = self._whole.inputs @ weight.mT
            else:
                self.rows[layer.weight] = weight.new_zeros(len(self), self.num_rows, fan_in)
            if layer.bias is not None:
                self.biases[layer.bias] = self._start(layer.bias).clone()
        self._descent = MomentumSGD(self.biases, *descent) if self.biases else None

    # Training

    def batches(self, step: int) -> Iterator[tuple[slice | Tensor, Batch]]:
        """Yield the clients that train together in a step, and their batches."""
        return self.schedule.batches(self._whole, step)

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
                tap = self._projected[layer.weight][:active, rows] + tap
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

    def keep(
        self, step: int, entered: Sequence[tuple[slice | Tensor, Tensors]], slopes: Tensors
    ) -> None:
        """Store the rows (some clients at a time) and slopes of a step, and move the biases."""
        active, rows = self._at(step)
        for some, inputs in entered:
            for name, value in inputs.items():
                due = slice(rows.start, rows.start + value.shape[1])
                self.rows[name][some, due] = value.detach()
        for layer in self.layers:
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

    def _start(self, name: str) -> Tensor:
        """Return a parameter before the round as [clients, ...]."""
        if name in self.own:
            return self.own[name]
        return self.common[name].expand(len(self), *self.common[name].shape)

    # Trained

    def averaged(self, index: int) -> StackMember:
        """Return a client's part of the stack."""
        return StackMember(self, index)

    def params(self, index: int) -> Tensors:
        """Return a client's whole model, written out."""
        return take_one(self._write(slice(index, index + 1)), 0)

    def embed(self) -> list[Tensor]:
        """Return every client's embeddings of its own training samples, in their order."""
        schedule = self.schedule
        # The first epoch has each sample once, unless it is cut short.
        needed = [-(-len(client.labels) // schedule.num_rows) for client in self._clients]
        is_augmented = schedule.tasks[0].augmentation is not None
        if is_augmented or any(map(operator.gt, needed, schedule.num_steps)):
            return self.to_stack().embed()
        steps = max(needed)
        due = slice(steps * schedule.num_rows)
        projected = {name: value[:, due] for name, value in self._projected.items()}
        embeddings, _ = self._predict(slice(None), self._whole.inputs[:, due], projected)
        places, masks = schedule.samples[:, :steps].flatten(1), schedule.mask[:, :steps].flatten(1)
        found = []
        for number, client in enumerate(self._clients):
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
            self._clients,
            self._model,
            self._write(slice(None)),
            starts=[self.common] * len(self),
            states=self.states,
            losses=self.losses,
        )

    # As `messages.UpdateStack`

    @property
    def template(self) -> Tensors:
        """One client's tensors, for their shapes."""
        return self.common

    def weighted_sum(self, weights: Tensor) -> Tensors:
        """Return the weighted sum over clients: one product a layer for all of them."""
        counted = weights.nonzero().squeeze(1)
        everyone = len(counted) == len(weights)
        totals = {}
        for layer in self.layers:
            if layer.weight in self.common:
                rows, slopes = self.rows[layer.weight], self.slopes[layer.weight]
                if not everyone:
                    rows, slopes = rows[counted], slopes[counted]
                shares = weights[counted].to(slopes)
                scaled = (slopes * shares.view(-1, 1, 1)).flatten(0, 1)
                base = self.common[layer.weight]
                totals[layer.weight] = torch.addmm(
                    base, scaled.T, rows.flatten(0, 1), beta=float(shares.sum()), alpha=-1
                )
            if layer.bias is not None and layer.bias in self.common:
                bias = self.biases[layer.bias]
                totals[layer.bias] = weights[counted].to(bias) @ bias[counted]
        return totals

    @cached_property
    def squared_changes(self) -> list[float]:
        """|slopesᵀ rows|² = Σ (slopes slopesᵀ) ∘ (rows rowsᵀ), and the biases' part."""
        squares = torch.zeros(len(self), dtype=torch.float64)
        for layer in self.layers:
            if layer.weight in self.common:
                rows, slopes = self.rows[layer.weight], self.slopes[layer.weight]
                product = (rows @ rows.mT).mul_(slopes @ slopes.mT)
                squares += product.sum((1, 2), dtype=torch.float64).cpu()
            if layer.bias is not None and layer.bias in self.common:
                change = self.biases[layer.bias] - self.common[layer.bias]
                squares += change.square().sum(1, dtype=torch.float64).cpu()
        # Rounding may give small negative values; NaN stays NaN.
        return squares.clamp(min=0).tolist()

    def tensors(self, index: int) -> Tensors:
        """Return the shared parameters of one client."""
        return {n: v for n, v in self.params(index).items() if n in self.common}

    def _write(self, some: slice) -> Tensors:
        """Return W_0 - slopesᵀ rows, and the biases, of some clients."""
        params = {}
        for layer in self.layers:
            rows, slopes = self.rows[layer.weight][some], self.slopes[layer.weight][some]
            start = self._start(layer.weight)[some]
            params[layer.weight] = torch.baddbmm(start, slopes.mT, rows, alpha=-1)
            if layer.bias is not None:
                params[layer.bias] = self.biases[layer.bias][some].clone()
        return params

    def _predict(
        self, some: slice | list[int], inputs: Tensor, projected: Tensors | None
    ) -> tuple[Tensor, Tensor]:
        """Run the models on common inputs, or each on its own with their known products."""
        own = {name: value[some] for name, value in self.own.items()}
        past = {n: (self.rows[n][some], self.slopes[n][some]) for n in self.rows}
        biases = {name: value[some] for name, value in self.biases.items()}
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
        start = {**self.common, **own}

        def run(given: Tensor, weight: str, bias: str | None) -> Tensor:
            rows, slopes = past[weight]
            known = given is inputs and weight in projected
            out = projected[weight] if known else linear(given, start[weight])
            out = out - (given @ rows.T) @ slopes
            return out if bias is None else out + biases[bias]

        params: Any = {name: LinearParameter(name, run) for name in start}
        return self._model.apply(params, inputs)


class FactoredTrainer(Trainer):
    """Train clients together, each as its rows and slopes."""

    name = "factored"
    layers: Sequence[Layer] = ()
    """The layers of the loss; set before training."""

    def train(
        self, tasks: Sequence[ClientTask], round_number: int, received: object
    ) -> list[TrainedClients]:
        """Train the clients together."""
        pads = leaves_padding_out(self._method)
        schedule = make_schedule(tasks, self._experiment, pads=pads)
        own = stack_tensors([task.own for task in schedule.tasks])
        lr, momentum, *_ = self._method.local_training(round_number)
        trained = FactoredClients(schedule, self._method, self._model, self.layers, (lr, momentum))
        losses = torch.zeros(len(trained), dtype=torch.float64)
        for step in range(schedule.num_steps[0]):
            losses += self._step(trained, own, step, received).cpu()
        trained.close()
        trained.losses = (losses / schedule.mask.sum((1, 2)).cpu()).tolist()
        return [trained.to_stack() if is_smaller_written_out(trained) else trained]

    def _step(self, clients: FactoredClients, own: Tensors, step: int, received: object) -> Tensor:
        """Take one step of each client that still trains; return losses times batch sizes."""
        taps, past = clients.taps(step), clients.earlier_steps(step)
        loss = partial(self._loss, received, step, clients.common)
        losses, rows, sums = [], [], torch.zeros(len(clients), dtype=torch.float64)
        for some, batch in clients.batches(step):
            size = batch.labels.shape[1]
            found, entered = vmap(loss, (0, 0, 0, 0, None, batch_dims(batch)))(
                {name: tap[some, :size] for name, tap in taps.items()},
                {name: (before[some], moved[some]) for name, (before, moved) in past.items()},
                take_some(clients.own, some),
                take_some(own, some),
                clients.scale(step),
                batch,
            )
            sums[some] = (found.detach() * batch.mask.sum(1)).cpu().double()
            losses.append(found.sum())
            rows.append((some, entered))
        slopes = torch.autograd.grad(losses, list(taps.values()))
        clients.keep(step, rows, dict(zip(taps, slopes, strict=True)))
        return sums

    def _loss(
        self,
        received: object,
        step: int,
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
            layer = check_layer(self.layers, batch, seen, inputs, weight, bias)
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
        context = Context(self._model.apply, start, received, {}, own, step=step)
        return self._method.loss(params, batch, context), entered


def is_smaller_written_out(clients: FactoredClients) -> bool:
    """Return whether the weights of a client take less memory than its rows and slopes."""
    shapes = [(rows.shape[2], clients.slopes[name].shape[2]) for name, rows in clients.rows.items()]
    weights = sum(fan_in * fan_out for fan_in, fan_out in shapes)
    return weights < clients.num_rows * sum(fan_in + fan_out for fan_in, fan_out in shapes)
