"""FedOpt: FedAvgM, FedAdam, FedYogi and FedAdagrad (Reddi et al., ICLR 2021)."""

from dataclasses import replace

import torch
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment.method_settings import FedOptSettings
from mpfedcl.methods.base import Server, Tally
from mpfedcl.methods.fedavg import FedAvg


class FedOpt(FedAvg):
    """The mean change D = mean of w_i - w serves as a gradient for an optimizer on the server.

    sgd: m <- beta1 m + D, w <- w + lr m. The others: m <- beta1 m + (1 - beta1) D, v accumulates
    D², w <- w + lr m / (sqrt(v) + tau), without bias correction; v starts at tau².
    """

    name = "fedopt"
    summary = "FedAvg; the server uses momentum, Adam, Yogi or Adagrad"
    paper = "Reddi et al., ICLR 2021"
    keeps = "nothing; the server: its momentum, and mean squares"
    settings: FedOptSettings
    search_space = {
        **FedAvg.search_space,
        "fedopt__optimizer": ("sgd", "adam", "yogi", "adagrad"),
        "fedopt__lr": (0.003, 0.01, 0.03, 0.1, 1.0),
    }

    def init_server(self, params: Tensors) -> Server:
        """Start with zero momentum and v = tau²."""
        kept = {f"momentum.{name}": torch.zeros_like(value) for name, value in params.items()}
        if self.settings.optimizer != "sgd":
            least = self.settings.adaptivity**2
            kept |= {f"squares.{n}": torch.full_like(v, least) for n, v in params.items()}
        return Server(params, private=kept)

    def reduce(self, server: Server, means: Tensors, tally: Tally) -> Server:
        """Step along the mean change."""
        step = self._step_plainly if self.settings.optimizer == "sgd" else self._adapt
        params, kept = dict(server.params), dict(server.private)
        for name, mean in means.items():
            params[name] = step(name, params[name], mean, kept)
        return replace(server, params=params, private=kept)

    def _step_plainly(self, name: str, value: Tensor, mean: Tensor, kept: Tensors) -> Tensor:
        lr, momentum, key = self._lr, self._momentum, f"momentum.{name}"
        # In this form, lr = 1 without momentum gives the mean bit for bit.
        moved = value.lerp(mean, lr) + lr * momentum * kept[key]
        kept[key] = momentum * kept[key] + (mean - value)
        return moved

    def _adapt(self, name: str, value: Tensor, mean: Tensor, kept: Tensors) -> Tensor:
        change = mean - value
        kept[f"momentum.{name}"] = kept[f"momentum.{name}"].lerp(change, 1 - self._momentum)
        squares = self._collect(kept[f"squares.{name}"], change.square())
        kept[f"squares.{name}"] = squares
        length = squares.sqrt() + self.settings.adaptivity
        return value + self._lr * kept[f"momentum.{name}"] / length

    def _collect(self, before: Tensor, squares: Tensor) -> Tensor:
        """Return v after the squares of one more round."""
        fresh = 1 - self.settings.beta2
        if self.settings.optimizer == "adagrad":
            return before + squares
        if self.settings.optimizer == "yogi":
            return before - fresh * squares * (before - squares).sign()
        return before.lerp(squares, fresh)

    @property
    def _lr(self) -> float:
        default = 1.0 if self.settings.optimizer == "sgd" else 0.01
        return self.settings.lr or default

    @property
    def _momentum(self) -> float:
        default = 0.0 if self.settings.optimizer == "adagrad" else 0.9
        return default if self.settings.momentum is None else self.settings.momentum
