"""FedDyn (Acar et al., ICLR 2021)."""

from torch import zeros_like

from mpfedcl.experiment.method_settings import FedDynSettings
from mpfedcl.methods import Context, FedAvg, Server, Tally, Tensors


class FedDyn(FedAvg):
    """FedAvg with a linear and a proximal term in each client's loss that align their optima.

    Client: steps along g - g_i + alpha (w - w_global), then g_i <- g_i - alpha (w_i - w_global),
    its gradient at the end of training. Server: h = sum_i n_i / n g_i over all clients, and
    w_global <- mean of w_i - h / alpha.
    """

    name = "feddyn"
    summary = "FedAvg with a regularizer that aligns the clients' losses"
    paper = "Acar et al., ICLR 2021"
    interpretation = "Clients are weighted by samples, also in h."
    keeps = "its gradient; the server: the mean gradient"
    settings: FedDynSettings
    search_space = {**FedAvg.search_space, "feddyn__alpha": (0.01, 0.03, 0.1, 0.3)}

    def init_server(self, params: Tensors) -> Server:
        """Start h at zero; it is never sent."""
        return Server(params, private={name: zeros_like(value) for name, value in params.items()})

    def init_client(self, params: Tensors) -> Tensors:
        """Start a client's gradient at zero; it stays with the client."""
        return {name: zeros_like(value) for name, value in params.items()}

    def adjust(
        self, gradients: Tensors, params: Tensors, context: Context
    ) -> tuple[Tensors, Tensors]:
        """Return g - g_i + alpha (w - w_global)."""
        alpha, own, start = self.settings.alpha, context.state, context.start
        steps = {n: g - own[n] + alpha * (params[n] - start[n]) for n, g in gradients.items()}
        return steps, context.memory

    def finish(self, params: Tensors, context: Context, num_steps: int) -> tuple[Tensors, Tensors]:
        """Return w_i, and g_i' = g_i - alpha (w_i - w_global)."""
        alpha, own = self.settings.alpha, context.state
        return params, {n: own[n] - alpha * (w - context.start[n]) for n, w in params.items()}

    def reduce(self, server: Server, means: Tensors, tally: Tally) -> Server:
        """Return h' = h - alpha * share of all samples * (mean - w), w' = mean - h' / alpha."""
        alpha, step = self.settings.alpha, self.settings.alpha * tally.share
        h = {n: g - step * (means[n] - server.params[n]) for n, g in server.private.items()}
        return Server({n: mean - h[n] / alpha for n, mean in means.items()}, private=h)
