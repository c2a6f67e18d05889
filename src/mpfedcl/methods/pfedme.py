"""pFedMe (T Dinh, Tran and Nguyen, 2020)."""

from types import MappingProxyType

from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment import Experiment
from mpfedcl.experiment.method_settings import PFedMeSettings
from mpfedcl.methods._round_values import Context, Server, Tally
from mpfedcl.methods.fedavg import FedAvg
from mpfedcl.methods.messages import Broadcast


class PFedMe(FedAvg):
    """A personal model θ near the client's copy w_i of the global one.

    On each batch K steps along ∇f(θ) + λ (θ - w_i), then w_i moves by lr λ towards θ. w_i is sent;
    θ predicts, and every round starts from the global model again.
    """

    name = "pfedme"
    summary = "personal models near a global one (Moreau envelopes)"
    family = "personal models"
    paper = "T Dinh et al., NeurIPS 2020"
    interpretation = "Clients are averaged by samples; momentum is 0 and weight decay a setting."
    predictor = "personal_classifier"
    global_test_predictor = "global_classifier"
    needs_sgd = True
    settings: PFedMeSettings
    search_space = MappingProxyType(
        {
            **FedAvg.search_space,
            "pfedme__weight": (1.0, 5.0, 15.0),
            "pfedme__lr": (0.01, 0.03, 0.09),
        }
    )

    def __init__(self, experiment: Experiment, num_classes: int) -> None:
        super().__init__(experiment, num_classes)
        self.repeats = self.settings.steps

    def descent(self, round_number: int) -> tuple[float, float]:
        """The personal model's steps; the formula has no momentum."""
        return self.settings.lr, 0.0

    def prepare(self, broadcast: Broadcast) -> float:
        """Return how far w_i goes towards θ after a batch."""
        lr = self.experiment.train.learning_rate(broadcast.round)
        return lr * self.settings.weight

    def at_step(self, received: float, step: int) -> float:
        """Nowhere, until a batch has had all its steps."""
        return received if (step + 1) % self.repeats == 0 else 0.0

    def begin(self, context: Context) -> tuple[Tensors, Tensors]:
        """θ and w_i both begin at the global model."""
        return context.start, context.start

    def adjust(self, gradients: Tensors, params: Tensors, context: Context) -> Tensors:
        """∇f(θ) + λ (θ - w_i)."""
        pull = self.settings.weight
        return {n: g + pull * (params[n] - context.memory[n]) for n, g in gradients.items()}

    def after_step(self, params: Tensors, context: Context) -> tuple[Tensors, Tensors]:
        """w_i moves towards θ."""
        moved = {n: w.lerp(params[n], context.received) for n, w in context.memory.items()}
        return params, moved

    def finish(self, params: Tensors, context: Context, num_steps: int) -> tuple[Tensors, Tensors]:
        """Send w_i; θ stays."""
        return context.memory, context.state

    def reduce(self, server: Server, means: Tensors, tally: Tally) -> Server:
        """(1 - β) w + β mean."""
        mixed = {n: server.params[n].lerp(mean, self.settings.mixing) for n, mean in means.items()}
        return super().reduce(server, mixed, tally)
