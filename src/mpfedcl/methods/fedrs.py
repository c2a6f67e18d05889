"""FedRS, restricted softmax (Li and Zhan, KDD 2021)."""

import torch
from torch import Tensor

from mpfedcl.experiment.method_settings import FedRSSettings
from mpfedcl.methods import Batch, Context, FedAvg, Tensors


class FedRS(FedAvg):
    """FedAvg with a restricted softmax: logits of classes that a client lacks count less.

    The local loss is cross-entropy(a * f(x)), with a_c = 1 for classes that the client holds and
    a_c = alpha < 1 for the others.
    """

    name = "fedrs"
    summary = "FedAvg that pushes missing classes down less"
    paper = "Li and Zhan, KDD 2021"
    interpretation = "A class's bias is scaled with its weights."
    settings: FedRSSettings
    search_space = {**FedAvg.search_space, "fedrs__alpha": (0.1, 0.5, 0.9)}

    def describe(self, labels: Tensor) -> Tensors:
        """Return the scales of all classes."""
        if self.settings.alpha == 1:
            return {}
        counts = torch.bincount(labels, minlength=self.num_classes)
        scales = torch.ones(self.num_classes, dtype=torch.float64, device=labels.device)
        return {"scales": scales.masked_fill(counts == 0, self.settings.alpha)}

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        """Return the cross-entropy of the scaled logits."""
        if not context.own:
            return super().loss(params, batch, context)
        _, logits = context.apply(params, batch.inputs)
        return batch.cross_entropy(logits * context.own["scales"].to(logits.dtype))
