"""FedLC, logits calibration (Zhang et al., ICML 2022)."""

import torch
from torch import Tensor

from mpfedcl.experiment.method_settings import FedLCSettings
from mpfedcl.methods import Batch, Context, FedAvg, Tensors

_OUT_OF_REACH = 1e6
"""The margin of a class that a client lacks: its probability is 0, and all values are finite."""


class FedLC(FedAvg):
    """FedAvg with a margin on the logits, which is larger for a client's rare classes.

    The local loss is cross-entropy(f(x) - m), where m_c = tau n_c^(-1/4) and n_c is the client's
    number of samples of class c. Predictions are made without m.
    """

    name = "fedlc"
    summary = "FedAvg with margins for a client's rare classes"
    paper = "Zhang et al., ICML 2022"
    interpretation = (
        "The softmax runs over all classes: without a sample's own class, as printed, the "
        "loss has no lower bound."
    )
    settings: FedLCSettings
    search_space = {**FedAvg.search_space, "fedlc__tau": (0.1, 0.5, 1.0, 2.0)}

    def describe(self, labels: Tensor) -> Tensors:
        """Return the margins of all classes."""
        if not self.settings.tau:
            return {}
        counts = torch.bincount(labels, minlength=self.num_classes)
        margins = self.settings.tau * counts.clamp(min=1).double() ** -0.25
        return {"margins": margins.masked_fill(counts == 0, _OUT_OF_REACH)}

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        """Return the cross-entropy of the logits minus the margins."""
        if not context.own:
            return super().loss(params, batch, context)
        _, logits = context.apply(params, batch.inputs)
        return batch.cross_entropy(logits - context.own["margins"].to(logits.dtype))
