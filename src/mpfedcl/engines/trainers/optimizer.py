"""The optimizers of local training, for parameters by name: fresh in each round.

torch.optim has the same optimizers, but importing it loads a compiler that is unused here, which
takes most of a second. `TrainSettings.learning_rate` has the schedule of the learning rate.
"""

from typing import Any

import torch
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment.settings import TrainSettings


def make_optimizer(
    params: Tensors, settings: TrainSettings, descent: tuple[float, float]
) -> "MomentumSGD | Adam":
    """Return the optimizer that settings name; `descent` is its learning rate and momentum."""
    lr, momentum = descent
    if settings.optimizer == "adam":
        return Adam(params, lr, settings.weight_decay)
    return MomentumSGD(params, lr, momentum, settings.weight_decay)


class MomentumSGD:
    """v <- momentum * v + g; w <- w - lr * v. The velocity is fresh: v is g in the first step."""

    def __init__(
        self, params: Tensors, lr: float, momentum: float, weight_decay: float = 0.0
    ) -> None:
        self._params = list(params.values())
        self._velocity = [torch.empty_like(v) for v in self._params] if momentum else []
        self._settings: dict[str, Any] = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
        }
        self._is_first = True

    @torch.no_grad()
    def step(self, gradients: list[Tensor], first: int | None = None) -> None:
        """Change the parameters in place; of stacked ones, only those of the `first` clients."""
        # One pass over memory instead of three; it goes by memory, so layouts must agree.
        torch._fused_sgd_(
            _first(self._params, first),
            [gradient.contiguous() for gradient in gradients],
            _first(self._velocity, first),
            **self._settings,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=self._is_first,
        )
        self._is_first = False


class Adam:
    """Adam (Kingma and Ba, 2015) with its usual β = (0.9, 0.999) and ε = 1e-8."""

    def __init__(self, params: Tensors, lr: float, weight_decay: float = 0.0) -> None:
        self._params = list(params.values())
        self._means = [torch.zeros_like(value) for value in self._params]
        self._squares = [torch.zeros_like(value) for value in self._params]
        self._settings: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        self._steps = 0

    @torch.no_grad()
    def step(self, gradients: list[Tensor], first: int | None = None) -> None:
        """Change the parameters in place; of stacked ones, only those of the `first` clients."""
        self._steps += 1
        # Clients that have finished never come back: all that move have taken as many steps.
        steps = torch.tensor(float(self._steps), device=self._params[0].device)
        torch._fused_adam_(
            _first(self._params, first),
            [gradient.contiguous() for gradient in gradients],
            _first(self._means, first),
            _first(self._squares, first),
            [],
            [steps] * len(self._params),
            **self._settings,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            maximize=False,
        )


def _first(values: list[Tensor], count: int | None) -> list[Tensor]:
    return values if count is None else [value[:count] for value in values]
