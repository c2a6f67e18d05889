"""Ditto (Li et al., ICML 2021)."""

from mpfedcl.experiment.method_settings import DittoSettings
from mpfedcl.methods import Context, Tensors, TwoModels


class Ditto(TwoModels):
    """FedAvg for the global model w; each client also trains and keeps a personal model v_i.

    The personal model minimizes f_i(v_i) + lambda/2 |v_i - w|^2.
    """

    name = "ditto"
    summary = "FedAvg, and personal models pulled towards the global one"
    paper = "Li et al., ICML 2021"
    interpretation = "Both models see the same batches, one after the other."
    keeps = "its own model"
    settings: DittoSettings
    search_space = {**TwoModels.search_space, "ditto__weight": (0.1, 0.3, 1.0, 3.0)}

    def init_client(self, params: Tensors) -> Tensors:
        """Start the personal model at the first global one."""
        return params

    def begin_personal(self, context: Context) -> Tensors:
        """Continue with the personal model of the last round."""
        return context.state

    def adjust(
        self, gradients: Tensors, params: Tensors, context: Context
    ) -> tuple[Tensors, Tensors]:
        """Return g + λ (v - w) for the personal model."""
        pull = self.settings.weight if self.is_personal(context) else 0.0
        if pull:
            gradients = {n: g + pull * (params[n] - context.start[n]) for n, g in gradients.items()}
        return super().adjust(gradients, params, context)

    def finish(self, params: Tensors, context: Context, num_steps: int) -> tuple[Tensors, Tensors]:
        """Send the model of FedAvg; keep the personal one."""
        sent, _ = super().finish(params, context, num_steps)
        return sent, params
