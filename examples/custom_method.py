"""A custom method in one file: SCAFFOLD (Karimireddy et al., 2020), which is also built in.

Run `mpfedcl run --method custom_method:Scaffold --rounds 10` in this folder. The method has a
setting, state on the server and on clients, corrected gradients, and more than parameters in the
average. A simpler method overrides only `loss`.
"""

from torch import zeros_like

from mpfedcl.methods import Broadcast, Context, Field, Method, Server, Settings, Tally, Tensors


class ScaffoldSettings(Settings):
    """SCAFFOLD."""

    section = "my_scaffold"
    server_lr: float = Field(default=1.0, gt=0)
    """Step size of the server towards the mean of the clients' models."""


class Scaffold(Method):
    """Clients correct their drift: step along gradient - own control + server's control."""

    name, summary = "my-scaffold", "FedAvg with control variates against client drift"
    settings: ScaffoldSettings

    def init_server(self, params: Tensors) -> Server:
        """Start the server's control at zero; it is sent with each broadcast."""
        return Server(params, {name: zeros_like(value) for name, value in params.items()})

    def init_client(self, params: Tensors) -> Tensors:
        """Start each client's own control at zero; it stays with the client."""
        return {name: zeros_like(value) for name, value in params.items()}

    def prepare(self, broadcast: Broadcast) -> tuple[Tensors, float]:
        """Return the server's control and this round's learning rate."""
        return broadcast.extra, self.experiment.train.learning_rate(broadcast.round)

    def adjust(
        self, gradients: Tensors, params: Tensors, context: Context
    ) -> tuple[Tensors, Tensors]:
        """Return g - c_i + c."""
        own, control = context.state, context.received[0]
        return {n: g - own[n] + control[n] for n, g in gradients.items()}, context.memory

    def finish(self, params: Tensors, context: Context, num_steps: int) -> tuple[Tensors, Tensors]:
        """Return w_i, and c_i' = c_i - c + (w_start - w_end) / (lr * effective steps)."""
        control, lr = context.received
        length = lr * self.experiment.train.effective_steps(num_steps)
        change = {n: (context.start[n] - w) / length - control[n] for n, w in params.items()}
        sent = {**params, **{f"control.{n}": value for n, value in change.items()}}
        return sent, {n: context.state[n] + value for n, value in change.items()}

    def reduce(self, server: Server, means: Tensors, tally: Tally) -> Server:
        """Step towards the mean of the weights; c' = c + share of all samples * mean change."""
        params = {n: w.lerp(means[n], self.settings.server_lr) for n, w in server.params.items()}
        change = {n: tally.share * means[f"control.{n}"] for n in params}
        return Server(params, {n: server.extra[n] + change[n] for n in params})
