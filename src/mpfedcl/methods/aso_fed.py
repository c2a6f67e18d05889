"""ASO-Fed, asynchronous online federated learning (Chen et al., IEEE Big Data 2020)."""

from collections.abc import Sequence
from dataclasses import replace

from mpfedcl.experiment.method_settings import AsoFedSettings
from mpfedcl.methods import Arrival, Context, LocalTraining, Server, Tensors
from mpfedcl.methods._asynchronous import AsynchronousProximal


class AsoFed(AsynchronousProximal):
    """Each change is weighted by its client's samples; slow clients take larger steps.

    Server, for each update: w <- w - n_i / n (w_sent - w_i). Client: steps along r (g - g_before +
    h) with the gradient g of f_i(w) + pull/2 |w - w_sent|^2, the running mean h <- beta h + (1 -
    beta) g, and r = max(1, log of the mean delay in seconds).
    """

    name = "aso-fed"
    summary = "adds each update as it arrives; slow clients take larger steps"
    paper = "Chen et al., IEEE Big Data 2020"
    interpretation = (
        "All samples are available from the start, steps have no momentum, and the weights of the "
        "first layer are scaled so that equal ones are unchanged."
    )
    sends = "how its model has changed"
    keeps = "its gradients and how long it takes"
    settings: AsoFedSettings
    search_space = {**AsynchronousProximal.search_space, "asofed__pull": (0.001, 0.01, 0.1)}

    def init_client(self, params: Tensors) -> Tensors:
        """Start without gradients; `delays` has the total seconds and the number of updates."""
        none = {name: value.new_zeros(value.shape) for name, value in params.items()}
        past = {f"{part}.{n}": value for part in ("mean", "last") for n, value in none.items()}
        return {**past, "delays": next(iter(params.values())).new_zeros(2)}

    def local_training(self, round_number: int) -> LocalTraining:
        """Train without momentum: the mean of past gradients takes its place."""
        return super().local_training(round_number)._replace(momentum=0.0)

    def begin(self, context: Context) -> tuple[Tensors, Tensors]:
        """Continue with the gradients of the last update."""
        past = {name: value for name, value in context.state.items() if name != "delays"}
        return context.start, past

    def adjust(
        self, gradients: Tensors, params: Tensors, context: Context
    ) -> tuple[Tensors, Tensors]:
        """Return r (g - g_before + h), and h <- β h + (1 - β) g; r = max(1, log of mean delay)."""
        seconds, times = context.state["delays"].unbind(-1)
        stretch = (seconds / times.clamp(min=1)).log().clamp(min=1)
        beta, old = self.settings.beta, context.memory
        steps = {
            n: stretch * (g - old[f"last.{n}"] + old[f"mean.{n}"]) for n, g in gradients.items()
        }
        means = {
            f"mean.{n}": beta * old[f"mean.{n}"] + (1 - beta) * g for n, g in gradients.items()
        }
        return steps, {**means, **{f"last.{n}": g for n, g in gradients.items()}}

    def finish(self, params: Tensors, context: Context, num_steps: int) -> tuple[Tensors, Tensors]:
        """Send w_sent - w; keep the gradients."""
        changes = {f"change.{n}": context.start[n] - value for n, value in params.items()}
        return changes, {**context.memory, "delays": context.state["delays"]}

    def note_delay(self, state: Tensors, seconds: float) -> Tensors:
        """Add the delay of one update."""
        delays = state["delays"]
        return {**state, "delays": delays + delays.new_tensor([seconds, 1])}

    def arrive(self, server: Server, arrivals: Sequence[Arrival]) -> Server:
        """Return w <- w - n_k / N (w_sent - w_k)."""
        params = server.params
        for each in arrivals:
            changes = {name: each.means[f"change.{name}"] for name in params}
            params = {n: value - each.share * changes[n] for n, value in params.items()}
            if self.settings.features:
                params = emphasize(params)
        return replace(server, params=params)


def emphasize(params: Tensors) -> Tensors:
    """Return the model with A * W for its first layer's W, A = fan-in * softmax_j |W_ij|."""
    first, weight = next((name, each) for name, each in params.items() if each.ndim > 1)
    rows = weight.flatten(1)
    scaled = rows.abs().softmax(1) * rows.shape[1] * rows
    return {**params, first: scaled.reshape(weight.shape)}
