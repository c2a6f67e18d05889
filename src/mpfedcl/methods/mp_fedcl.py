"""MP-FedCL: multi-prototype federated contrastive learning (Qiao et al., 2023)."""

from typing import Any

import torch
from torch import Tensor

from mpfedcl.experiment import Experiment
from mpfedcl.methods import Batch, Broadcast, Context, Method, SharesPrototypes, Tensors
from mpfedcl.methods.predictors import PredictorName
from mpfedcl.prototypes import ContrastTargets, PrototypePool, contrastive_loss, prepare_contrast

CONTRAST_SEARCH_SPACE = {
    **Method.search_space,
    "contrast__weight": (0.1, 0.3, 1.0, 3.0),
    "contrast__temperature": (0.07, 0.2, 0.5),
}
"""The search space of every method with the contrastive loss."""


class MpFedCL(SharesPrototypes):
    """Clients send models and up to K centroids per class, and contrast embeddings with all.

    Prototypes are k-means centroids. The local loss is cross-entropy + weight * L_R. L_R is the
    mean over the slices u [C, d] of the padded pool (one prototype per class from one client) of
    -log softmax_c(z·u_c / t)_y: it pulls each embedding towards the prototypes of its class and
    away from the others. Prediction is by nearest prototype.
    """

    name = "mp-fedcl"
    summary = "contrastive loss against K prototypes per class from all clients"
    paper = "Qiao et al., 2023"
    sends = "its model, up to K prototypes per class"
    primary_predictor = "personal_prototype"
    primary_predictor_global: PredictorName | None = "global_prototype"
    search_space = {**CONTRAST_SEARCH_SPACE, "prototypes__per_class": (2, 3, 4)}

    def __init__(self, experiment: Experiment, num_classes: int) -> None:
        super().__init__(experiment, num_classes)
        self.shares_model = experiment.share_model
        if not self.shares_model:
            # Without a global model the personal ones predict on the global test set too.
            self.primary_predictor_global = self.primary_predictor

    def prepare(self, broadcast: Broadcast) -> ContrastTargets:
        """Pad the pool into the grid of clients, slots and classes."""
        return prepare_contrast(broadcast.pool, self.experiment.prototypes.padding or "all")

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        """Return cross-entropy + weight * L_R."""
        embeddings, logits = context.apply(params, batch.inputs)
        settings = self.experiment.contrast
        contrast = contrastive_loss(
            self.project(embeddings),
            batch.labels,
            batch.mask,
            context.received,
            temperature=settings.temperature,
            form=settings.form,
            # Embeddings have at most the norm of prototypes.
            reach=self.max_norm**2,
        )
        return batch.cross_entropy(logits) + settings.weight * contrast

    def remarks(self, broadcast: Broadcast) -> dict[str, Any]:
        """Record the numbers of prototypes if they differ."""
        if self.num_prototypes is not None or not len(broadcast.pool):
            return {}
        return {"prototypes_per_class": _count_prototypes(broadcast.pool)}


def _count_prototypes(pool: PrototypePool) -> dict[str, Any]:
    """Return the distribution of the number of prototypes per client and class."""
    held = pool.held[pool.held > 0]
    found = torch.bincount(held).tolist()
    return {
        "mean": round(float(held.double().mean()), 3),
        "most": len(found) - 1,
        # A number of prototypes, and how often a client has that many of a class.
        "histogram": {str(number): count for number, count in enumerate(found) if count},
    }
