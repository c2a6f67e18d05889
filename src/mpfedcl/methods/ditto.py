"""Ditto (Li et al., 2021)."""

from types import MappingProxyType

from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment.method_settings import DittoSettings
from mpfedcl.methods._round_values import Context
from mpfedcl.methods._two_models import TwoModels


class Ditto(TwoModels):
    """FedAvg, and beside it each client's own model v, which descends f(v) + λ/2 |v - w|^2."""

    name = "ditto"
    summary = "FedAvg, and personal models pulled towards the global one"
    paper = "Li et al., ICML 2021"
    interpretation = "Both models see the same batches, one after the other."
    keeps = "its own model"
    settings: DittoSettings
    search_space = MappingProxyType(
        {**TwoModels.search_space, "ditto__weight": (0.1, 0.3, 1.0, 3.0)}
    )

    def init_client(self, params: Tensors) -> Tensors:
        """The own model is the first global one."""
        return params

    def begin_own(self, context: Context) -> Tensors:
        """Go on with the own model."""
        return context.state

    def adjust(self, gradients: Tensors, params: Tensors, context: Context) -> Tensors:
        """g + λ (v - w) for the own model."""
        pull = self.settings.weight if context.received.is_own else 0.0
        if not pull:
            return gradients
        return {n: g + pull * (params[n] - context.start[n]) for n, g in gradients.items()}

    def finish(self, params: Tensors, context: Context, num_steps: int) -> tuple[Tensors, Tensors]:
        """Send the model of FedAvg; keep the own one."""
        sent, _ = super().finish(params, context, num_steps)
        return sent, params
