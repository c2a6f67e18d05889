"""FedPCL, prototype-wise contrastive learning (Tan et al., NeurIPS 2022)."""

from typing import ClassVar

from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment.method_settings import FedPclSettings
from mpfedcl.methods import Batch, Broadcast, Context, Method, PredictorName, SharesPrototypes
from mpfedcl.prototypes import ContrastTargets, contrastive_loss, prepare_contrast


class FedPcl(SharesPrototypes):
    """Only class means are sent; embeddings are contrasted with those of all clients.

    L = -log softmax_c(z·U_c / t)_y, with U_c [d] the mean over the clients that hold class c, plus
    the mean of the same loss over every client's class means; z and the embeddings behind the means
    have norm 1. No classifier is trained: the nearest of a client's own class means predicts.
    """

    name = "fedpcl"
    summary = "shares class means only; trains with a contrastive loss only"
    paper = "Tan et al., NeurIPS 2022"
    interpretation = "One view of each image, contrasted with all classes that some client holds."
    sends = "its class means"
    keeps = "its model"
    primary_predictor = "personal_prototype"
    predictors: ClassVar[tuple[PredictorName, ...]] = (
        "personal_prototype",
        "personal_prototype_prior",
    )
    shares_model = False
    clustering = "mean"
    normalizes = True
    compares_with_own = True
    settings: FedPclSettings
    search_space = {**Method.search_space, "fedpcl__temperature": (0.07, 0.2, 0.5)}

    def prepare(self, broadcast: Broadcast) -> tuple[ContrastTargets, ContrastTargets]:
        """Return the class means averaged over clients, and those of each client, as targets.

        The average replaces the classes that a client lacks.
        """
        pool = broadcast.pool
        return prepare_contrast(pool.averaged_over_owners()), prepare_contrast(pool, "all")

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        """Return L_g + L_p; both are 0 before there are prototypes."""
        embeddings, logits = context.apply(params, batch.inputs)
        z = self.project(embeddings)
        averaged, each = (
            contrastive_loss(
                z,
                batch.labels,
                batch.mask,
                targets,
                temperature=self.settings.temperature,
                reach=self.max_norm**2,
            )
            for targets in context.received
        )
        # Engines need a gradient for every parameter, including the untrained classifier.
        return averaged + each + 0 * batch.mean(logits.sum(1))
