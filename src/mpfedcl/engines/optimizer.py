"""Stochastic gradient descent with momentum, for parameters by name."""

import torch
from torch import Tensor

from mpfedcl.tensors import Tensors

_FUSED = ("cpu", "cuda")


class MomentumSGD:
    """v <- momentum * v + g; w <- w - lr * v. The velocity is fresh: v is g in the first step.

    torch.optim.SGD does the same, and takes the better part of a second to import a compiler that
    nothing here uses.
    """

    def __init__(self, params: Tensors, lr: float, momentum: float) -> None:
        self._params = list(params.values())
        self._velocity = [torch.empty_like(value) for value in self._params]
        self._lr = lr
        self._momentum = momentum
        self._is_first = True

    @torch.no_grad()
    def step(self, gradients: list[Tensor], first: int | None = None) -> None:
        """Change the parameters in place; of stacked ones, only those of the `first` clients."""
        params, velocity = self._params, self._velocity
        if first is not None:
            params, velocity = [p[:first] for p in params], [v[:first] for v in velocity]
        if params[0].device.type in _FUSED:
            # One pass over memory instead of three; it goes by memory, so layouts must agree.
            gradients = [gradient.contiguous() for gradient in gradients]
            torch._fused_sgd_(
                params,
                gradients,
                velocity if self._momentum else [],
                weight_decay=0.0,
                momentum=self._momentum,
                lr=self._lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=self._is_first,
            )
        else:
            self._step_plainly(params, velocity, gradients)
        self._is_first = False

    def _step_plainly(
        self, params: list[Tensor], velocities: list[Tensor], gradients: list[Tensor]
    ) -> None:
        for value, velocity, gradient in zip(params, velocities, gradients, strict=True):
            if self._is_first:
                velocity.copy_(gradient)
            else:
                velocity.mul_(self._momentum).add_(gradient)
            value.sub_(velocity, alpha=self._lr)
