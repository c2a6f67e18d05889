"""FedOpt: FedAvgM, FedAdam, FedYogi and FedAdagrad (Reddi et al., ICLR 2021)."""

from dataclasses import replace

import torch
from torch import Tensor

from mpfedcl.experiment.method_settings import FedOptSettings
from mpfedcl.methods import FedAvg, Server, Tally, Tensors


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
        settings, is_sgd = self.settings, self.settings.optimizer == "sgd"
        lr, beta1 = settings.lr or (1.0 if is_sgd else 0.01), settings.momentum
        if beta1 is None:
            beta1 = 0.0 if settings.optimizer == "adagrad" else 0.9
        params, kept = dict(server.params), dict(server.private)
        for name, mean in means.items():
            value, m = params[name], kept[f"momentum.{name}"]
            change = mean - value
            if is_sgd:
                # In this form, lr = 1 without momentum gives the mean bit for bit.
                params[name] = value.lerp(mean, lr) + lr * beta1 * m
                kept[f"momentum.{name}"] = beta1 * m + change
            else:
                m = m.lerp(change, 1 - beta1)
                v = self._collect(kept[f"squares.{name}"], change.square())
                params[name] = value + lr * m / (v.sqrt() + settings.adaptivity)
                kept |= {f"momentum.{name}": m, f"squares.{name}": v}
        return replace(server, params=params, private=kept)

    def _collect(self, before: Tensor, squares: Tensor) -> Tensor:
        """Return v after the squares of one more round."""
        fresh = 1 - self.settings.beta2
        if self.settings.optimizer == "adagrad":
            return before + squares
        if self.settings.optimizer == "yogi":
            return before - fresh * squares * (before - squares).sign()
        return before.lerp(squares, fresh)
