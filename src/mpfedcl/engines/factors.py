"""What clients of a factored stack have done in a round: the rows and slopes of every step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.engines.linear_layers import Layer
from mpfedcl.engines.optimizer import MomentumSGD
from mpfedcl.engines.schedule import Schedule
from mpfedcl.methods import Batch, Method


class StartingParameters:
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


class Factors:
    """What the clients of a stack have done so far: rows in, slopes out, for each layer."""

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
        self._descent = MomentumSGD(self.biases, lr, momentum) if self.biases else None

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
