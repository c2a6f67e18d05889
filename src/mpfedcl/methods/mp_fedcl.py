"""MP-FedCL: multi-prototype federated contrastive learning, the flagship."""

from torch import Tensor

from mpfedcl.exchange import Broadcast
from mpfedcl.experiment import Experiment
from mpfedcl.methods.base import Batch, Context, Method
from mpfedcl.models import Tensors
from mpfedcl.prototypes import ContrastTargets, contrastive_loss, prepare_contrast


class MpFedCL(Method):
    """Up to K k-means centroids a class travel beside the model; clients contrast against them all.

    Loss = cross-entropy + weight * L_R, with L_R the contrastive pull of each embedding to the
    prototypes of its class and away from those of the others. Prediction is by nearest prototype.
    """

    name = "mp-fedcl"
    summary = "K prototypes a class, a contrastive pull to everybody's"
    reading = "personal_prototype"
    shares_prototypes = True

    def __init__(self, experiment: Experiment, num_classes: int) -> None:
        super().__init__(experiment, num_classes)
        self.shares_model = experiment.share_model

    def prepare(self, broadcast: Broadcast) -> ContrastTargets:
        """Pad the pool into the grid of clients, slots and classes."""
        return prepare_contrast(broadcast.pool, self.experiment.prototypes.padding or "all")

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        """Cross-entropy + weight * L_R."""
        embeddings, logits = context.apply(params, batch.inputs)
        settings = self.experiment.contrast
        contrast = contrastive_loss(
            self.project(embeddings),
            batch.labels,
            batch.mask,
            context.received,
            temperature=settings.temperature,
            form=settings.form,
            reach=self.longest_prototype(),
        )
        return batch.cross_entropy(logits) + settings.weight * contrast
