"""Asynchronous averaging by sample share (after Wang, Zhang et al., IEEE TWC 2022)."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from mpfedcl.experiment.method_settings import AsyncShareSettings
from mpfedcl.methods import Arrival, Asynchronous, Server, Update
from mpfedcl.methods._asynchronous import freshness


class AsyncShare(Asynchronous):
    """Rare updates have larger weights, so that in the long run clients count by their samples.

    At every tick w <- (1 - sum_k u_k) w + sum_k u_k w_k, where u_k = n_k / n * s_k / f_k, limited
    to 1 in total: f_k is the running mean of k's updates per tick, s_k = (staleness + 1)^-a.
    """

    name = "async-share"
    summary = "clients that answer rarely count more when they do"
    paper = "Wang, Zhang et al., IEEE TWC 2022"
    interpretation = (
        "The paper's own weights were not available: here the weight of a client is its share of "
        "the samples divided by its update frequency, at most 1 in total."
    )
    keeps = "nothing; the server keeps how often each client answers"
    timing = "ticks"
    settings: AsyncShareSettings
    search_space = {**Asynchronous.search_space, "async_share__staleness": (0.0, 0.5, 1.0)}

    def weigh(self, update: Update, server: Server) -> float:
        """Return n_k / f_k, with f_k the running mean of arrivals per tick, including this one."""
        decay, ticks = self.settings.decay, int(server.private.get("ticks", 0)) + 1
        before = float(server.private.get(f"came.{update.client}", 0.0))
        return update.num_samples * (1 - decay**ticks) / (decay * before + (1 - decay))

    def arrive(self, server: Server, arrivals: Sequence[Arrival]) -> Server:
        """Return w <- (1 - Σu) w + Σ_k u_k w_k,  u_k = q_k s_k / f_k, with Σu limited to 1."""
        names = {name for each in arrivals for name in each.names}
        decay, old = self.settings.decay, server.private
        zero = torch.zeros((), dtype=torch.float64)
        known = {name: old[name] for name in old if name != "ticks"}
        known |= {f"came.{name}": old.get(f"came.{name}", zero) for name in names}
        private = {
            name: decay * value + (1 - decay) * (name.removeprefix("came.") in names)
            for name, value in known.items()
        }
        private["ticks"] = old.get("ticks", torch.zeros((), dtype=torch.int64)) + 1
        shares = [
            freshness(each.staleness, self.settings.staleness)
            * sum(each.weights)
            * each.share
            / each.num_samples
            for each in arrivals
        ]
        most = max(1.0, sum(shares))
        params = {n: (1 - sum(shares) / most) * value for n, value in server.params.items()}
        for share, each in zip(shares, arrivals, strict=True):
            params = {n: value + share / most * each.means[n] for n, value in params.items()}
        return replace(server, params=params, private=private)
