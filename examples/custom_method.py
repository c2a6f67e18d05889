"""A method of your own in one file: SCAFFOLD (Karimireddy et al., 2020).

Run it from this folder:  mpfedcl run --method custom_method:Scaffold --rounds 10

It uses most hooks: state of the server, state of each client, gradients corrected at every step,
and more tensors than the weights in the average. A simpler method overrides only `loss`.
"""

from torch import zeros_like

from mpfedcl.methods import Broadcast, Context, Method, Server, Tally, Tensors


class Scaffold(Method):
    """Clients correct their drift: step along gradient - own control + server's control."""

    name = "scaffold"
    summary = "FedAvg with control variates against client drift"
    reading = "averaged_classifier"

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
        lr = train.learning_rate(broadcast.round)
        return broadcast.extra, lr / (1 - train.momentum)

    def adjust(self, gradients: Tensors, params: Tensors, context: Context) -> Tensors:
        """g - c_i + c."""
        control, _ = context.received
        return {n: g - context.state[n] + control[n] for n, g in gradients.items()}

    def finish(self, params: Tensors, context: Context, num_steps: int) -> tuple[Tensors, Tensors]:
        """c_i' = c_i - c + (w_start - w_end) / (steps * length)."""
        control, step = context.received
        drift = {n: (context.start[n] - w) / (num_steps * step) for n, w in params.items()}
        change = {f"control.{n}": drift[n] - control[n] for n in params}
        return {**params, **change}, {n: context.state[n] - control[n] + drift[n] for n in params}

    def reduce(self, server: Server, means: Tensors, tally: Tally) -> Server:
        """Average the weights; add the mean change to the server's control."""
        extra = {n: c + means[f"control.{n}"] for n, c in server.extra.items()}
        return Server({n: means[n] for n in server.params}, extra)
