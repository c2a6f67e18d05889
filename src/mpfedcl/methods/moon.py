"""MOON, model-contrastive federated learning (Li, He and Song, CVPR 2021)."""

from torch import Tensor
from torch.nn.functional import cosine_similarity, softplus

from mpfedcl.experiment.method_settings import MoonSettings
from mpfedcl.methods import Batch, Context, FedAvg, Tensors


class Moon(FedAvg):
    """FedAvg that pulls embeddings towards the global model's, away from the last local model's.

    The local loss is cross-entropy + mu log(1 + exp((cos(z, z_last) - cos(z, z_global)) / t)), with
    the embeddings [d] of a sample by the trained, the client's last and the global model.
    """

    name = "moon"
    summary = "FedAvg whose embeddings stay near the global model's"
    paper = "Li, He and Song, CVPR 2021"
    interpretation = "No projection head is added: the inputs of the classifier are compared."
    keeps = "its last model"
    settings: MoonSettings
    search_space = {**FedAvg.search_space, "moon__mu": (0.1, 1.0, 5.0)}

    def init_client(self, params: Tensors) -> Tensors:
        """Start with the global model as the last model: the contrast is then constant."""
        return params

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        """Return cross-entropy + mu * contrast; no gradient flows into the two other models."""
        embeddings, logits = context.apply(params, batch.inputs)
        near, far = (
            cosine_similarity(embeddings, context.apply(model, batch.inputs)[0], dim=-1)
            for model in (context.start, context.state)
        )
        contrast = softplus((far - near) / self.settings.temperature)
        return batch.cross_entropy(logits) + self.settings.mu * batch.mean(contrast)

    def finish(
        self, params: Tensors, context: Context, num_steps: int
    ) -> tuple[Tensors | None, Tensors]:
        """Keep the trained model, from which embeddings move away in the next round."""
        sent, _ = super().finish(params, context, num_steps)
        return sent, params
