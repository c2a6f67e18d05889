"""FedAT, asynchronous tiers (Chai et al., SC 2021)."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from mpfedcl.experiment.method_settings import FedATSettings
from mpfedcl.methods import Arrival, Server
from mpfedcl.methods._asynchronous import AsynchronousProximal


class FedAT(AsynchronousProximal):
    """Synchronous rounds within tiers of equally fast clients; slow tiers have larger weights.

    After a round of tier m of M, w_m is the mean of its clients, its number of rounds T_m grows by
    1, and w <- sum_m T_(M+1-m) / sum(T) w_m: a slow tier is weighted by the rounds of its fast
    counterpart. Clients minimize f_i(w) + pull/2 |w - w_sent|^2.
    """

    name = "fedat"
    summary = "rounds within tiers of equal speed; tiers do not wait for each other"
    paper = "Chai et al., SC 2021"
    interpretation = (
        "Tiers count one round each at first, or the model would not move until the slowest tier "
        "has answered; models are not compressed."
    )
    keeps = "nothing; the server keeps a model for each tier"
    timing = "tiers"
    settings: FedATSettings
    search_space = {**AsynchronousProximal.search_space, "fedat__pull": (0.0, 0.1, 0.4)}

    @property
    def num_tiers(self) -> int:
        """The number of tiers in the settings."""
        return self.settings.tiers

    def arrive(self, server: Server, arrivals: Sequence[Arrival]) -> Server:
        """Return w_m <- the tier's mean; w <- Σ_m T_(M+1-m) / ΣT w_m, T_m the rounds of tier m."""
        for each in arrivals:
            private, count = server.private, each.num_tiers
            if not private:
                private = {"rounds": torch.full((count,), self.settings.start)} | {
                    f"tier{m}.{name}": value
                    for m in range(count)
                    for name, value in server.params.items()
                }
            private = private | {f"tier{each.tier}.{n}": value for n, value in each.means.items()}
            private["rounds"] = private["rounds"].clone()
            private["rounds"][each.tier] += 1
            shares = weigh_tiers(private["rounds"].tolist())
            params = {
                name: sum(
                    (share * private[f"tier{m}.{name}"] for m, share in enumerate(shares)),
                    torch.zeros_like(value),
                )
                for name, value in server.params.items()
            }
            server = replace(server, params=params, private=private)
        return server


def weigh_tiers(rounds: Sequence[int]) -> list[float]:
    """Return the weight of each tier: the share of rounds of tier M + 1 - m."""
    return [count / sum(rounds) for count in reversed(rounds)]
