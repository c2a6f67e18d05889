"""FedProc, prototypical contrastive federated learning (Mu et al., FGCS 2023)."""

from dataclasses import replace
from operator import attrgetter

from torch import Tensor
from torch.nn.functional import normalize

from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment.method_settings import FedProcSettings
from mpfedcl.methods import Batch, Broadcast, Context, FedAvg, Server, SharesPrototypes, Tally
from mpfedcl.methods._prototypes import UNIT_NORM, class_means_pool, update_class_means
from mpfedcl.prototypes import ContrastTargets, PrototypePool, contrastive_loss, prepare_contrast


class FedProc(SharesPrototypes, FedAvg):
    """FedAvg that first aligns embeddings with global class means, and later trains the classifier.

    The local loss in round r of T is alpha L + (1 - alpha) cross-entropy with alpha = 1 - (r - 1) /
    T and L = -log softmax_c(z·g_c / t)_y; the first round has no g yet. g_c [d] is the
    sample-weighted class mean, scaled to norm 1; a class that no client held in a round keeps its
    g_c.
    """

    name = "fedproc"
    summary = "FedAvg; first aligns embeddings with global class means"
    paper = "Mu et al., FGCS 2023"
    interpretation = "The classifier uses unnormalized embeddings."
    sends = "its model and class means"
    keeps = "nothing; the server: global class means"
    sends_pool = False
    clustering = "mean"
    settings: FedProcSettings
    defaults = {"fedproc__rounds": attrgetter("rounds")}
    search_space = {**FedAvg.search_space, "fedproc__temperature": (0.1, 0.5, 1.0)}

    def alpha(self, round_number: int) -> float:
        """Return the weight of the contrast: 1 - (r - 1) / T, and 0 after round T."""
        return max(0.0, 1 - (round_number - 1) / (self.settings.rounds or self.experiment.rounds))

    def prepare(self, broadcast: Broadcast) -> tuple[ContrastTargets, float]:
        """Return the global prototypes as targets, and alpha, which is 0 before there are any."""
        pool = class_means_pool(broadcast.extra, broadcast.pool)
        return prepare_contrast(pool), self.alpha(broadcast.round) if len(pool) else 0.0

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        """Return alpha * contrastive loss + (1 - alpha) * cross-entropy."""
        embeddings, logits = context.apply(params, batch.inputs)
        received: tuple[ContrastTargets, float] = context.received
        targets, alpha = received
        contrast = contrastive_loss(
            normalize(embeddings, dim=-1, eps=1e-12),
            batch.labels,
            batch.mask,
            targets,
            temperature=self.settings.temperature,
            reach=UNIT_NORM,
        )
        return alpha * contrast + (1 - alpha) * batch.cross_entropy(logits)

    def reduce(self, server: Server, means: Tensors, tally: Tally) -> Server:
        """Average the models; update the prototypes of the classes that clients held."""
        renewed = update_class_means(server.extra, tally.prototypes, self.num_classes)
        unit = {name: normalize(value, dim=-1) for name, value in renewed.items()}
        return replace(super().reduce(server, means, tally), extra=unit)

    def reference(self, pool: PrototypePool) -> PrototypePool:
        """Return one prototype per class: the sample-weighted mean."""
        return pool.class_centers()
