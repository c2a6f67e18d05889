"""FedAvg-FT: FedAvg, and a classifier that each client fine-tunes for itself."""

from torch import zeros_like

from mpfedcl.core.tensors import Tensors
from mpfedcl.methods._round_values import Context
from mpfedcl.methods._two_models import TwoModels


class FedAvgFT(TwoModels):
    """FedAvg; each client also trains its received model's classifier, and predicts with it.

    The layers below the classifier stay as they were received.
    """

    name = "fedavg-ft"
    summary = "FedAvg, and a classifier fine-tuned by each client"
    paper = "Cheng et al., 2021, and others"
    interpretation = "Fine-tuning takes the batches of the round, so every round can be evaluated."

    def adjust(self, gradients: Tensors, params: Tensors, context: Context) -> Tensors:
        """Of the own model, only the classifier moves."""
        if not context.received.is_own:
            return gradients
        return {
            n: g if n.startswith("classifier.") else zeros_like(g) for n, g in gradients.items()
        }
