"""FedProto (Tan et al., AAAI 2022)."""

from torch import Tensor

from mpfedcl.experiment.method_settings import FedProtoSettings
from mpfedcl.methods import Batch, Broadcast, Context, Method, SharesPrototypes, Tensors
from mpfedcl.prototypes import PrototypePool


class FedProto(SharesPrototypes):
    """Only class means are sent; embeddings are pulled towards the mean over the clients.

    The local loss is cross-entropy + lambda mean |v - U_y|^2 / d, with the embedding v [d] and the
    mean U_y [d] over the clients that hold class y.
    """

    name = "fedproto"
    summary = "shares class means only; pulls embeddings towards their average"
    paper = "Tan et al., AAAI 2022"
    sends = "its class means"
    keeps = "its model"
    primary_predictor = "personal_prototype"
    shares_model = False
    clustering = "mean"
    normalizes = False
    settings: FedProtoSettings
    search_space = {**Method.search_space, "fedproto__weight": (0.1, 0.5, 1.0, 4.0)}

    def prepare(self, broadcast: Broadcast) -> tuple[Tensor, Tensor]:
        """Return the global prototypes [C, d], and a mask [C] of the classes that have one."""
        return broadcast.pool.class_means(), broadcast.pool.present

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        """Return cross-entropy + lambda * MSE(v, global prototype of the class).

        Samples whose class has no prototype yet are left out of the second mean.
        """
        embeddings, logits = context.apply(params, batch.inputs)
        vectors, present = context.received
        squares = (embeddings - vectors[batch.labels]).square().mean(dim=-1)
        pulled = Batch(batch.inputs, batch.labels, batch.mask & present[batch.labels])
        return batch.cross_entropy(logits) + self.settings.weight * pulled.mean(squares)

    def reference(self, pool: PrototypePool) -> PrototypePool:
        """Return one global prototype per class: the average over its owners."""
        return pool.averaged_over_owners()
