"""FedAsync (Xie, Koyejo and Gupta, 2019)."""

from collections.abc import Sequence
from dataclasses import replace

from mpfedcl.experiment.method_settings import FedAsyncSettings
from mpfedcl.methods import Arrival, Server
from mpfedcl.methods._asynchronous import AsynchronousProximal, freshness, mix


class FedAsync(AsynchronousProximal):
    """Each update is mixed into the global model as it arrives; stale updates count less.

    Server: w <- (1 - m s) w + m s w_i, with the mixing weight m and s = (staleness + 1)^-a. Clients
    minimize f_i(w) + pull/2 |w - w_sent|^2. Sample counts are ignored; fast clients count more.
    """

    name = "fedasync"
    summary = "mixes in each client's model as it arrives"
    paper = "Xie, Koyejo and Gupta, 2019"
    interpretation = (
        "Staleness follows from the virtual clock, while the paper draws it; it counts from 0."
    )
    settings: FedAsyncSettings
    search_space = {**AsynchronousProximal.search_space, "fedasync__mixing": (0.3, 0.6, 0.9)}

    def arrive(self, server: Server, arrivals: Sequence[Arrival]) -> Server:
        """Return w <- (1 - α s) w + α s w_i, one client at a time."""
        params = server.params
        for each in arrivals:
            params = mix(params, each.means, self.settings.mixing * self.fade(each.staleness))
        return replace(server, params=params)

    def fade(self, staleness: int) -> float:
        """Return the factor of the mixing weight for an update of this staleness."""
        settings = self.settings
        if settings.staleness == "constant":
            return 1.0
        if settings.staleness == "polynomial":
            return freshness(staleness, settings.a)
        late = staleness - settings.b
        return 1.0 if late <= 0 else 1 / (settings.a * late + 1)
