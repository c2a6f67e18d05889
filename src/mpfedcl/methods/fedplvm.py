"""FedPLVM, prototype learning with variance-aware clusters (Wang et al., NeurIPS 2024)."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment.method_settings import FedPlvmSettings
from mpfedcl.methods import (
    Batch,
    Broadcast,
    Context,
    FedAvg,
    PrototypePool,
    Prototypes,
    SharesPrototypes,
)
from mpfedcl.prototypes import finch_pool, finch_prototypes

_LEAST_SIMILARITY = 1e-6
"""Below it the power of a similarity has no finite slope."""


class FedPLVM(SharesPrototypes, FedAvg):
    """FedAvg; embeddings are contrasted with prototypes that are clustered twice.

    Clients cluster their embeddings of each class by FINCH, whose number of clusters grows with
    the variance, and the server clusters all their prototypes likewise into u_m. With the
    similarities s_m = max(cos(z, u_m), 0)^α / t, the local loss adds λ times the α-sparsity loss
    -log(Σ_{m of class y} exp(s_m) / Σ_m exp(s_m)) and 2 (1 - cos(z, U_y))², U_y the mean of u_m.
    """

    name = "fedplvm"
    summary = "FedAvg; contrasts embeddings with prototypes clustered twice"
    paper = "Wang et al., NeurIPS 2024"
    interpretation = "Negative similarities count as 0; the paper's embeddings have none."
    sends = "its model, prototypes of FINCH's clusters"
    primary_predictor = "global_classifier"
    clustering = "dbscan"
    normalizes = False
    settings: FedPlvmSettings
    search_space = {
        **FedAvg.search_space,
        "fedplvm__weight": (0.1, 1.0, 10.0),
        "fedplvm__alpha": (0.25, 0.5, 1.0),
    }

    def summarize(
        self, embeddings: Sequence[Tensor], labels: Sequence[Tensor], seeds: Sequence[int]
    ) -> list[Prototypes]:
        """Return the means of FINCH's clusters."""
        least = self.experiment.prototypes.min_cluster_size
        return finch_prototypes(
            embeddings, labels, num_classes=self.num_classes, min_cluster_size=least
        )

    def prepare(self, broadcast: Broadcast) -> PrototypePool:
        """Return the pool with prototypes of norm 1, then the means U_c, also of norm 1."""
        pool = broadcast.pool
        classes = torch.arange(self.num_classes, device=pool.labels.device)
        both = torch.cat([pool.vectors, pool.class_means()])
        return replace(
            pool.merged_into(
                normalize(both, dim=1),
                torch.cat([pool.labels, classes]),
                torch.ones(len(both), dtype=torch.int64, device=pool.labels.device),
            ),
            num_prototypes=None,
        )

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        """Return cross-entropy plus both prototype losses, which are 0 in the first round."""
        embeddings, logits = context.apply(params, batch.inputs)
        entropy, received = batch.cross_entropy(logits), context.received
        if len(received) == self.num_classes:
            return entropy
        cosines = normalize(embeddings, dim=-1, eps=1e-12) @ received.vectors.T
        clusters, means = cosines.split([len(received) - self.num_classes, self.num_classes], -1)
        powers = clusters.clamp(min=_LEAST_SIMILARITY) ** self.settings.alpha
        similar = powers / self.settings.temperature
        classes = received.labels[: -self.num_classes]
        is_own = classes == batch.labels.unsqueeze(-1)
        least = torch.finfo(similar.dtype).min
        own = similar.masked_fill(~is_own, least).logsumexp(-1)
        sparsity = similar.logsumexp(-1) - own
        to_mean = means.gather(-1, batch.labels.unsqueeze(-1)).squeeze(-1)
        both = sparsity + 2 * (1 - to_mean).square()
        known = Batch(batch.inputs, batch.labels, batch.mask & is_own.any(-1))
        return entropy + self.settings.weight * known.mean(both)

    def reference(self, pool: PrototypePool) -> PrototypePool:
        """Return the prototypes clustered again."""
        return finch_pool(pool)
