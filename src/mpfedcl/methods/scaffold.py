"""SCAFFOLD (Karimireddy et al., ICML 2020)."""

from torch import zeros_like

from mpfedcl.experiment.method_settings import ScaffoldSettings
from mpfedcl.methods import Broadcast, Context, FedAvg, Server, Tally, Tensors


class Scaffold(FedAvg):
    """FedAvg with control variates: estimates of the local and global gradient that correct drift.

    Client: steps along g - c_i + c, then c_i <- c_i - c + (w_start - w_i) / (lr * steps), the mean
    of its raw gradients, each weighted by the effect of momentum. Server: w <- w + server_lr (mean
    of w_i - w), and c = sum_i n_i / n c_i over all clients, sampled or not.
    """

    name = "scaffold"
    summary = "FedAvg with control variates against client drift"
    paper = "Karimireddy et al., ICML 2020"
    interpretation = "Clients are weighted by samples, and controls account for momentum."
    sends = "its model, the change of its control"
    keeps = "its control; the server: the mean control"
    needs_sgd = True
    settings: ScaffoldSettings
    search_space = {**FedAvg.search_space, "scaffold__server_lr": (0.5, 1.0)}

    def init_server(self, params: Tensors) -> Server:
        """Start the server's control at zero; it is sent with each broadcast."""
        return Server(params, {name: zeros_like(value) for name, value in params.items()})

    def init_client(self, params: Tensors) -> Tensors:
        """Start a client's own control at zero; it stays with the client."""
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
        sent = {**params, **{f"control.{name}": value for name, value in change.items()}}
        return sent, {name: context.state[name] + value for name, value in change.items()}

    def reduce(self, server: Server, means: Tensors, tally: Tally) -> Server:
        """Step towards the mean of the weights; c' = c + share of all samples * mean change."""
        params = {n: w.lerp(means[n], self.settings.server_lr) for n, w in server.params.items()}
        change = {n: tally.share * means[f"control.{n}"] for n in params}
        return Server(params, {n: server.extra[n] + change[n] for n in params})
