"""A method of your own in one file: SCAFFOLD (Karimireddy et al., 2020).

Run it from this folder:  mpfedcl run --method custom_method:Scaffold --rounds 10

It has a setting, state of server and clients, gradients corrected at every step, and more than the
weights in the average. A simpler method overrides only `loss`.
"""

from torch import zeros_like

from mpfedcl.methods import Broadcast, Context, Field, Method, Server, Settings, Tally, Tensors


class ScaffoldSettings(Settings):
    """SCAFFOLD."""

    section = "scaffold"
    server_lr: float = Field(default=1.0, gt=0)
    """Length of the server's step towards the average of the clients' models."""


class Scaffold(Method):
    """Clients correct their drift: step along gradient - own control + server's control."""

    name, summary = "scaffold", "FedAvg with control variates against client drift"
    settings: ScaffoldSettings

    def init_server(self, params: Tensors) -> Server:
        """Start the server's control at zero; it is sent with each broadcast."""
        return Server(params, {name: zeros_like(value) for name, value in params.items()})

    def init_client(self, params: Tensors) -> Tensors:
        """Start each client's own control at zero; it stays with the client."""
        return {name: zeros_like(value) for name, value in params.items()}

    def template(self, params: Tensors) -> Tensors:
        """Clients send their weights and the change of their control."""
        return {**params, **{f"control.{name}": value for name, value in params.items()}}

    def prepare(self, broadcast: Broadcast) -> tuple[Tensors, float]:
        """Return the server's control and the length of this round's steps, momentum included."""
        train = self.experiment.train
        return broadcast.extra, train.learning_rate(broadcast.round) / (1 - train.momentum)

    def adjust(self, gradients: Tensors, params: Tensors, context: Context) -> Tensors:
        """g - c_i + c."""
        return {n: g - context.state[n] + context.received[0][n] for n, g in gradients.items()}

    def finish(self, params: Tensors, context: Context, num_steps: int) -> tuple[Tensors, Tensors]:
        """c_i' = c_i - c + (w_start - w_end) / (steps * length)."""
        control, step = context.received
        drift = {n: (context.start[n] - w) / (num_steps * step) for n, w in params.items()}
        change = {f"control.{n}": drift[n] - control[n] for n in params}
        return {**params, **change}, {n: context.state[n] - control[n] + drift[n] for n in params}

    def reduce(self, server: Server, means: Tensors, tally: Tally) -> Server:
        """Step towards the mean of the weights; add the mean change to the server's control."""
        params = {n: w.lerp(means[n], self.settings.server_lr) for n, w in server.params.items()}
        return Server(params, {n: c + means[f"control.{n}"] for n, c in server.extra.items()})
