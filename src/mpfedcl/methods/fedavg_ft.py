"""FedAvg-FT, FedAvg with fine-tuning (Cheng et al., 2021)."""

from torch import zeros_like

from mpfedcl.methods import Context, Tensors, TwoModels


class FedAvgFT(TwoModels):
    """FedAvg; each client also fine-tunes the received model's classifier, and predicts with it.

    The layers below the classifier keep the received values.
    """

    name = "fedavg-ft"
    summary = "FedAvg, and a classifier fine-tuned by each client"
    paper = "Cheng et al., 2021, and others"
    interpretation = "Fine-tuning uses the batches of the round, so every round can be evaluated."

    def adjust(
        self, gradients: Tensors, params: Tensors, context: Context
    ) -> tuple[Tensors, Tensors]:
        """Move only the classifier of the personal model."""
        if self.is_personal(context):
            gradients = {
                n: g if n in self.layers.classifier else zeros_like(g) for n, g in gradients.items()
            }
        return super().adjust(gradients, params, context)
