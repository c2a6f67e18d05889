"""pFedMe (T Dinh, Tran and Nguyen, NeurIPS 2020)."""

from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment.method_settings import PFedMeSettings
from mpfedcl.methods import Broadcast, Context, FedAvg, LocalTraining, Server, Tally


class PFedMe(FedAvg):
    """Each client has a personal model θ near its copy w_i of the global model.

    On each batch θ takes K steps along ∇f_i(θ) + λ (θ - w_i), then w_i <- w_i - lr λ (w_i - θ). w_i
    is sent; w <- (1 - β) w + β mean of w_i. θ predicts; every round starts from the global model.
    """

    name = "pfedme"
    summary = "personal models near a global one (Moreau envelopes)"
    family = "personal models"
    paper = "T Dinh et al., NeurIPS 2020"
    interpretation = "Clients are averaged by samples; momentum is 0 and weight decay a setting."
    primary_predictor = "personal_classifier"
    primary_predictor_global = "global_classifier"
    needs_sgd = True
    settings: PFedMeSettings
    search_space = {
        **FedAvg.search_space,
        "pfedme__weight": (1.0, 5.0, 15.0),
        "pfedme__lr": (0.01, 0.03, 0.09),
    }

    def local_training(self, round_number: int) -> LocalTraining:
        """Take K steps of the personal model on each batch; the formula has no momentum."""
        usual = super().local_training(round_number)
        return usual._replace(lr=self.settings.lr, momentum=0.0, repeats=self.settings.steps)

    def prepare(self, broadcast: Broadcast) -> float:
        """Return the rate lr λ of w_i towards θ."""
        return self.experiment.train.learning_rate(broadcast.round) * self.settings.weight

    def begin(self, context: Context) -> tuple[Tensors, Tensors]:
        """Start θ and w_i at the global model."""
        return context.start, context.start

    def adjust(
        self, gradients: Tensors, params: Tensors, context: Context
    ) -> tuple[Tensors, Tensors]:
        """Return ∇f(θ) + λ (θ - w_i)."""
        pull = self.settings.weight
        near = context.memory
        return {n: g + pull * (params[n] - near[n]) for n, g in gradients.items()}, near

    def after_step(self, params: Tensors, context: Context) -> tuple[Tensors, Tensors]:
        """Move w_i towards θ in the last step on a batch."""
        if (context.step + 1) % self.settings.steps:
            return params, context.memory
        moved = {n: w.lerp(params[n], context.received) for n, w in context.memory.items()}
        return params, moved

    def finish(self, params: Tensors, context: Context, num_steps: int) -> tuple[Tensors, Tensors]:
        """Send w_i; θ is the personalized model."""
        return context.memory, context.state

    def reduce(self, server: Server, means: Tensors, tally: Tally) -> Server:
        """Return (1 - β) w + β mean."""
        mixed = {n: server.params[n].lerp(mean, self.settings.mixing) for n, mean in means.items()}
        return super().reduce(server, mixed, tally)
