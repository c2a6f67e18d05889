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
methods whose loss uses weights in linear layers alone (`find_layers` tries it out).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.functional import linear

from mpfedcl.descent import Descent
from mpfedcl.engines.schedule import Schedule, make_schedule
from mpfedcl.engines.trained import Trained, TrainedStack
from mpfedcl.engines.work import Work
from mpfedcl.exchange import Share
from mpfedcl.experiment import Experiment
from mpfedcl.methods import Batch, Context, Method
from mpfedcl.models import Model, Tensors

_WRITTEN_OUT_FROM = 192
"""Rows from which a client's weights are written out once it has trained (docs/performance.md)."""


@dataclass(frozen=True)
class Layer:
    """A linear layer, as a loss was seen to use it."""

    weight: str
    bias: str | None
    takes_inputs: bool
    """Whether the client's inputs go into it as they are."""


class _Parameter:
    """Stands for a parameter; the only thing that can be done with it is a linear layer."""

    def __init__(self, name: str, run: Callable[..., Tensor]) -> None:
        self.name = name
        self.run = run

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Tensor:
        if function is not linear or kwargs or not isinstance(args[1], cls):
            raise TypeError(f"{function} is no linear layer")
        inputs, weight, bias = (*args, None)[:3]
        if not (bias is None or isinstance(bias, cls)):
            raise TypeError("a bias that is no parameter")
        out: Tensor = weight.run(inputs, weight.name, None if bias is None else bias.name)
        return out


def find_layers(
    method: Method, model: Model, work: Work, received: object
) -> tuple[Layer, ...] | None:
    """Return the linear layers that the loss consists of; None if it uses parameters otherwise."""
    if any(
        getattr(type(method), hook) is not getattr(Method, hook)
        for hook in ("adjust", "finish", "init_client")
    ):
        return None
    layers: list[Layer] = []
    # Two rows, so that what makes one or four of them shows; a lone sample stands for both.
    both = torch.arange(2, device=work.client.labels.device) % len(work.client.labels)
    inputs, labels = work.client.inputs[both], work.client.labels[both]

    def run(given: Tensor, weight: str, bias: str | None) -> Tensor:
        if given.dim() != 2 or len(given) != len(inputs):
            raise TypeError("a linear layer over other rows than the samples")
        if torch._C._functorch.is_functorch_wrapped_tensor(given):
            raise TypeError("a linear layer that is differentiated by its inputs")
        layers.append(Layer(weight, bias, given is inputs))
        return linear(given, work.start[weight], None if bias is None else work.start[bias])

    params: Any = {name: _Parameter(name, run) for name in work.start}
    batch = Batch(inputs, labels, torch.ones_like(labels).bool())
    context = Context(model.apply, work.start, method.at_step(received, 0), work.state)
    try:
        method.loss(params, batch, context)
    except Exception:
        # Whatever it is: the plain trainers will tell, if it is an error at all.
        return None
    used = [name for layer in layers for name in (layer.weight, layer.bias) if name]
    return tuple(layers) if sorted(used) == sorted(work.start) else None


class FactoredTrainer:
    """Trains clients side by side, each as the rows by which it departs from its start."""

    def __init__(
        self, experiment: Experiment, method: Method, model: Model, layers: Sequence[Layer]
    ) -> None:
        self._experiment = experiment
        self._method = method
        self._model = model
        self._layers = layers

    def train(self, works: Sequence[Work], round_number: int, received: object) -> list[Trained]:
        """Train the clients side by side."""
        schedule = make_schedule([work.client for work in works], self._experiment, round_number)
        by_name = {work.client.name: work for work in works}
        start = _Start(self._method, [by_name[c.name].start for c in schedule.clients])
        train = self._experiment.train
        lr = train.lr * train.lr_decay ** (round_number - 1)
        factors = _Factors(schedule, start, self._layers, lr, train.momentum)
        losses = torch.zeros(len(schedule.clients), dtype=torch.float64)
        for step in range(schedule.num_steps[0]):
            given = self._method.at_step(received, step)
            losses[: schedule.active(step)] += self._step(factors, step, given).cpu()
        factors.close()
        sizes = torch.tensor([len(client.labels) for client in schedule.clients])
        means = (losses / (train.epochs * sizes)).tolist()
        trained = TrainedFactors(self._model, factors, means)
        return [trained.written_out() if factors.num_rows >= _WRITTEN_OUT_FROM else trained]

    def _step(self, factors: "_Factors", step: int, given: object) -> Tensor:
        """Take one step of every client still at work; return their losses times batch sizes."""
        taps = factors.taps(step)
        batch = factors.batch(step)
        in_dims = (0, 0, 0, None, 0)
        losses, entered = vmap(partial(self._loss, given, factors.start.common), in_dims)(
            taps,
            factors.past(step),
            factors.start.first(len(batch.labels)),
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
        own: Tensors,
        scale: Tensor,
        batch: Batch,
    ) -> tuple[Tensor, Tensors]:
        """Return one client's loss, and what went into each layer that is not fed the inputs."""
        start = {**common, **own}
        entered: Tensors = {}
        seen: set[str] = set()

        def run(inputs: Tensor, weight: str, _bias: str | None) -> Tensor:
            if weight in seen or inputs.shape[:-1] != batch.labels.shape:
                raise TypeError(f"{weight} is used otherwise than in the first step of the run")
            seen.add(weight)
            # The tap holds the bias, and x W_0ᵀ where x are the inputs; the slope there is the
            # slope of what comes out.
            out = taps[weight]
            if inputs is not batch.inputs:
                entered[weight] = inputs
                out = linear(inputs, start[weight]) + out
            if not past:
                return out
            rows, slopes = past[weight]
            return out - ((inputs @ rows.T) * scale) @ slopes

        params: Any = {name: _Parameter(name, run) for name in start}
        context = Context(self._model.apply, start, given, {})
        return self._method.loss(params, batch, context), entered


class _Start:
    """The parameters that clients begin with: common ones once, each client's own stacked."""

    def __init__(self, method: Method, starts: Sequence[Tensors]) -> None:
        self.common = {n: v for n, v in starts[0].items() if method.shared(n)}
        self.own = {
            n: torch.stack([start[n] for start in starts])
            for n in starts[0]
            if n not in self.common
        }

    def first(self, count: int) -> Tensors:
        """Return the own parameters of the first clients."""
        return {name: value[:count] for name, value in self.own.items()}

    def stacked(self, name: str, count: int) -> Tensor:
        """Return a parameter as [clients, ...]."""
        return (
            self.own[name]
            if name in self.own
            else self.common[name].expand(count, *(-1,) * self.common[name].dim())
        )


class _Factors:
    """What the clients of a stack have done so far: rows in, slopes out, for each layer."""

    def __init__(
        self, schedule: Schedule, start: _Start, layers: Sequence[Layer], lr: float, momentum: float
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
            self.rows[layer.weight] = (
                self.inputs
                if layer.takes_inputs
                else weight.new_zeros(count, self.num_rows, fan_in)
            )
            self.slopes[layer.weight] = weight.new_zeros(count, self.num_rows, fan_out)
            if layer.takes_inputs:
                self.projected[layer.weight] = self.inputs @ weight.mT
            if layer.bias is not None:
                self.biases[layer.bias] = start.stacked(layer.bias, count).clone()
        self._descent = Descent(self.biases, lr, momentum) if self.biases else None

    def batch(self, step: int) -> Batch:
        """Return the batches of the clients at work, side by side."""
        active, rows = self._at(step)
        return Batch(
            self.inputs[:active, rows],
            self._labels[:active, rows],
            self.schedule.mask[:active, step],
        )

    def taps(self, step: int) -> Tensors:
        """Return what comes out of each layer [clients, rows, out] as far as it is known: a leaf.

        That is the bias, and for inputs the product with the weight that all began with.
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

    def past(self, step: int) -> dict[str, tuple[Tensor, Tensor]]:
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
        """Note down what a step did, and move the biases."""
        active, rows = self._at(step)
        for layer in self.layers:
            if layer.weight in entered:
                self.rows[layer.weight][:active, rows] = entered[layer.weight].detach()
            self.slopes[layer.weight][:active, rows] = slopes[layer.weight]
        if self._descent is not None:
            biased = [layer.weight for layer in self.layers if layer.bias is not None]
            self._descent.step([slopes[name].sum(1) for name in biased], active)

    def close(self) -> None:
        """Scale the slopes by what they came to: W = W_0 - slopesᵀ rows from here on."""
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


class TrainedFactors:
    """Several clients as their rows and slopes."""

    def __init__(self, model: Model, factors: _Factors, losses: Sequence[float]) -> None:
        self.names = [client.name for client in factors.schedule.clients]
        self.losses = losses
        self.states: Sequence[Tensors] = [{}] * len(self.names)
        self._model = model
        self._factors = factors
        self._start = factors.start

    def sums(self, index: int) -> Share:
        """Return a client's part of the stack."""
        return Share(self, index)

    def params(self, index: int) -> Tensors:
        """Return a client's whole model, written out."""
        return self._write(slice(index, index + 1), squeeze=True)

    def embed(self) -> list[Tensor]:
        """Return every client's embeddings of its own training samples, in their order."""
        schedule = self._factors.schedule
        # The first epoch has each sample once.
        steps = max(-(-len(client.labels) // schedule.num_rows) for client in schedule.clients)
        due = slice(steps * schedule.num_rows)
        projected = {name: value[:, due] for name, value in self._factors.projected.items()}
        embeddings, _ = self._predict(slice(None), self._factors.inputs[:, due], projected)
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

    def written_out(self) -> TrainedStack:
        """Return the same clients with their models written out."""
        return TrainedStack(
            self._factors.schedule.clients,
            self._model,
            self._write(slice(None)),
            start=self._start.common,
            states=self.states,
            losses=self.losses,
        )

    # As `exchange.Stack`

    def __len__(self) -> int:
        return len(self.names)

    @property
    def template(self) -> Tensors:
        """One client's tensors, for their shapes."""
        return self._start.common

    def total(self, weights: Tensor) -> Tensors:
        """Return the weighted sum over clients: one product a layer for all of them."""
        counted = weights.nonzero().squeeze(1)
        everyone = len(counted) == len(weights)
        totals = {}
        for layer in self._factors.layers:
            if layer.weight in self._start.common:
                rows, slopes = self._factors.rows[layer.weight], self._factors.slopes[layer.weight]
                if not everyone:
                    rows, slopes = rows[counted], slopes[counted]
                shares = weights[counted].to(slopes)
                scaled = (slopes * shares.view(-1, 1, 1)).flatten(0, 1)
                base = self._start.common[layer.weight]
                totals[layer.weight] = torch.addmm(
                    base, scaled.T, rows.flatten(0, 1), beta=float(shares.sum()), alpha=-1
                )
            if layer.bias is not None and layer.bias in self._start.common:
                bias = self._factors.biases[layer.bias]
                totals[layer.bias] = weights[counted].to(bias) @ bias[counted]
        return totals

    @cached_property
    def squared_changes(self) -> list[float]:
        """|slopesᵀ rows|² = Σ (slopes slopesᵀ) ∘ (rows rowsᵀ), and the biases' part."""
        squares = torch.zeros(len(self), dtype=torch.float64)
        for layer in self._factors.layers:
            if layer.weight in self._start.common:
                rows, slopes = self._factors.rows[layer.weight], self._factors.slopes[layer.weight]
                product = (rows @ rows.mT).mul_(slopes @ slopes.mT)
                squares += product.sum((1, 2), dtype=torch.float64).cpu()
            if layer.bias is not None and layer.bias in self._start.common:
                change = self._factors.biases[layer.bias] - self._start.common[layer.bias]
                squares += change.square().sum(1, dtype=torch.float64).cpu()
        # Rounding may leave a little less than nothing; NaN stays NaN.
        return squares.clamp(min=0).tolist()

    def tensors(self, index: int) -> Tensors:
        """Return what one client shares, written out."""
        return {n: v for n, v in self.params(index).items() if n in self._start.common}

    def _write(self, some: slice, *, squeeze: bool = False) -> Tensors:
        """Return W_0 - slopesᵀ rows, and the biases, of some clients."""
        factors, params = self._factors, {}
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
        factors = self._factors
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
            if given is inputs and weight in projected:
                out = projected[weight]
            else:
                out = linear(given, start[weight])
            out = out - (given @ rows.T) @ slopes
            return out if bias is None else out + biases[bias]

        params: Any = {name: _Parameter(name, run) for name in start}
        return self._model.apply(params, inputs)
