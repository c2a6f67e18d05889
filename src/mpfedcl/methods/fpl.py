"""FPL, federated prototype learning (Huang et al., CVPR 2023)."""

from dataclasses import replace

from torch import Tensor
from torch.nn.functional import normalize

from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment.method_settings import FplSettings
from mpfedcl.methods import Batch, Broadcast, Context, FedAvg, PrototypePool, SharesPrototypes
from mpfedcl.methods._prototypes import UNIT_NORM
from mpfedcl.prototypes import ContrastTargets, contrastive_loss, finch_pool, prepare_contrast


class FPL(SharesPrototypes, FedAvg):
    """FedAvg; embeddings are contrasted with clusters of all clients' class means.

    The server clusters the class means of each class by FINCH into cluster prototypes u_m, and
    averages these into one unbiased prototype U_c per class. The local loss adds
    -log(Σ_{m of class y} exp(cos(z, u_m) / t) / Σ_m exp(cos(z, u_m) / t)) + |z - U_y|² / d.
    """

    name = "fpl"
    summary = "FedAvg; contrasts embeddings with clusters of the clients' class means"
    paper = "Huang et al., CVPR 2023"
    interpretation = "Class means are taken after local training, not during its last epoch."
    sends = "its model and class means"
    primary_predictor = "global_classifier"
    clustering = "mean"
    normalizes = False
    settings: FplSettings
    search_space = {
        **FedAvg.search_space,
        "fpl__temperature": (0.02, 0.07, 0.2),
        "fpl__weight": (0.1, 1.0),
    }

    def prepare(self, broadcast: Broadcast) -> tuple[ContrastTargets, Tensor, Tensor]:
        """Return the cluster prototypes as targets, U [C, d], and a mask [C] of known classes."""
        pool = broadcast.pool
        unit = replace(pool, vectors=normalize(pool.vectors, dim=1))
        return prepare_contrast(unit), pool.class_means(), pool.present

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        """Return cross-entropy plus both prototype losses, which are 0 in the first round."""
        embeddings, logits = context.apply(params, batch.inputs)
        targets, means, present = context.received
        contrast = contrastive_loss(
            normalize(embeddings, dim=-1, eps=1e-12),
            batch.labels,
            batch.mask,
            targets,
            temperature=self.settings.temperature,
            form="pooled",
            reach=UNIT_NORM,
        )
        known = Batch(batch.inputs, batch.labels, batch.mask & present[batch.labels])
        squares = (embeddings - means[batch.labels]).square().mean(dim=-1)
        prototypes = contrast + known.mean(squares)
        return batch.cross_entropy(logits) + self.settings.weight * prototypes

    def reference(self, pool: PrototypePool) -> PrototypePool:
        """Return the cluster prototypes."""
        return finch_pool(pool)
