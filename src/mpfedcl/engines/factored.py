"""Many clients with few samples: models that are never written out.

One step of SGD changes the weight W of a linear layer by an outer product: with x [B, in] what went
into the layer and d [B, out] the slope of the loss at what came out of it, the gradient is dᵀx.
After t steps with momentum m

    W_t = W_0 - lr Σ_{s<t} c(t-s) d_sᵀ x_s,    c(j) = 1 + m + ... + m^(j-1),

so a client *is* the W_0 that all share and its few rows x and d. A product with W_t needs nothing
else: x W_tᵀ = x W_0ᵀ - (x x_sᵀ) d_s ..., where the first term is one large product for all clients.
Nothing of the size of a model is read or written for a client: neither weights nor gradients nor
velocity. With as many rows as a layer is wide, writing the weights out is the cheaper way again.

It is the same algorithm, not an approximation; sums are only taken in another order. It serves
methods whose loss uses weights in linear layers alone (`linear_layers.py` tries it out).
"""

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.functional import linear

from mpfedcl.core.tensors import Tensors
from mpfedcl.engines.factors import Factors, StartingParameters
from mpfedcl.engines.linear_layers import Layer, LinearParameter, check_layer
from mpfedcl.engines.schedule import make_schedule
from mpfedcl.engines.trained_clients import TrainedClients, TrainedStack
from mpfedcl.engines.trainer import ClientTask, Trainer, stack_tensors
from mpfedcl.engines.trainer_costs import describe_training
from mpfedcl.methods import Batch, Context, received_at
from mpfedcl.methods.messages import StackMember
from mpfedcl.models import Model


class FactoredTrainer(Trainer):
    """Trains clients side by side, each as the rows by which it departs from its start."""

    name = "factored"
    layers: Sequence[Layer] = ()
    """What the loss consists of; to be set before it trains."""

    def train(
        self, tasks: Sequence[ClientTask], round_number: int, received: object
    ) -> list[TrainedClients]:
        """Train the clients side by side."""
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
        most = by_name[schedule.clients[0].name]
        num_samples = len(most.client.labels)
        training = describe_training(self._method, most.start, num_samples, len(tasks))
        return [trained.to_stack() if training.is_written_out else trained]

    def _step(self, factors: Factors, own: Tensors, step: int, given: object) -> Tensor:
        """Take one step of every client still at task; return their losses times batch sizes."""
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
        """Return one client's loss, and what went into each layer that is not fed the inputs."""
        start = {**common, **kept}
        entered: Tensors = {}
        seen: set[str] = set()

        def run(inputs: Tensor, weight: str, bias: str | None) -> Tensor:
            layer = Layer(weight, bias, inputs is batch.inputs)
            fits = inputs.shape[:-1] == batch.labels.shape
            check_layer(self.layers, layer, seen, fits=fits)
            seen.add(weight)
            # The tap holds the bias, and x W_0ᵀ where x are the inputs; the slope there is the
            # slope of what comes out.
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


class TrainedFactors:
    """Several clients as their rows and slopes."""

    def __init__(self, model: Model, factors: Factors, losses: Sequence[float]) -> None:
        self.names = [client.name for client in factors.schedule.clients]
        self.losses = losses
        self.states: Sequence[Tensors] = [{}] * len(self.names)
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

    def predict(self, first: int, last: int, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings and logits [models, B, ...]."""
        return self._predict(slice(first, last), inputs, None)

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

    # As `exchange.UpdateStack`

    def __len__(self) -> int:
        return len(self.names)

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
        # Rounding may leave a little less than nothing; NaN stays NaN.
        return squares.clamp(min=0).tolist()

    def tensors(self, index: int) -> Tensors:
        """Return what one client shares, written out."""
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
        self, some: slice, inputs: Tensor, projected: Tensors | None
    ) -> tuple[Tensor, Tensor]:
        """Run the models on the same inputs, or each on its own with what is known of them."""
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
