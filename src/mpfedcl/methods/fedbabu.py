"""FedBABU, body aggregation and body update (Oh et al., ICLR 2022)."""

from mpfedcl.core.tensors import Tensors
from mpfedcl.methods import Context, TwoModels


class FedBABU(TwoModels):
    """FedAvg of the layers below a classifier that never moves from its random initial values.

    For its predictions, each client fine-tunes the received model, its classifier included.
    """

    name = "fedbabu"
    summary = "FedAvg below a fixed random classifier; clients fine-tune the result"
    paper = "Oh et al., ICLR 2022"
    interpretation = (
        "Fine-tuning uses the batches of the round, so every round can be evaluated; the paper "
        "fine-tunes once, after the last round."
    )
    sends = "its model, whose classifier never changes"

    def after_step(self, params: Tensors, context: Context) -> tuple[Tensors, Tensors]:
        """Put the classifier of the sent model back to its initial values."""
        if not self.is_personal(context):
            params = params | {n: context.start[n] for n in params if n in self.layers.classifier}
        return super().after_step(params, context)
