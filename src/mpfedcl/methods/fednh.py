"""FedNH, non-IID hypersphere (Dai et al., AAAI 2023)."""

from dataclasses import replace

import torch
from torch import Tensor, zeros_like
from torch.nn.functional import normalize

from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment.method_settings import FedNHSettings
from mpfedcl.methods import (
    Batch,
    Context,
    FedAvg,
    InvalidInput,
    PrototypePool,
    Server,
    SharesPrototypes,
    Tally,
)
from mpfedcl.prototypes.kmeans import mean_by


class FedNH(SharesPrototypes, FedAvg):
    """FedAvg with class prototypes of norm 1 as a classifier that clients do not train.

    The prototypes w_c start orthogonal. The local loss is cross-entropy(s cos(z, w_c)) for the
    embedding z. Clients send the means of their normalized embeddings by class, and the server
    sets w_c <- normalize(ρ w_c + (1 - ρ) m_c), with m_c the sample-weighted mean over clients.
    """

    name = "fednh"
    summary = "FedAvg; the classifier is class prototypes that only the server moves"
    paper = "Dai et al., AAAI 2023"
    interpretation = (
        "The scale s is a setting, not trained; prototypes start as orthogonal vectors, so the "
        "embedding needs at least as many dimensions as there are classes."
    )
    sends = "its model and class means"
    primary_predictor = "global_classifier"
    sends_pool = False
    clustering = "mean"
    normalizes = True
    settings: FedNHSettings
    search_space = {**FedAvg.search_space, "fednh__smoothing": (0.5, 0.9, 1.0)}

    def init_server(self, params: Tensors) -> Server:
        """Replace the classifier by orthonormal rows, without bias."""
        weight = params[self._weight]
        if weight.shape[0] > weight.shape[1]:
            raise InvalidInput(
                f"the embedding has {weight.shape[1]} dimensions; with method {self.name} it must "
                f"have at least {weight.shape[0]}, one for each class."
            )
        orthonormal = torch.linalg.qr(weight.double().T).Q.T.to(weight).contiguous()
        return Server({**params, **self._classifier(params, orthonormal)})

    def loss(self, params: Tensors, batch: Batch, context: Context) -> Tensor:
        """Return the cross-entropy of s times the cosine similarities to the prototypes."""
        embeddings, logits = context.apply(params, batch.inputs)
        similarities = self.project(embeddings) @ params[self._weight].T
        # Engines need a gradient for every parameter, including the bias.
        return batch.cross_entropy(self.settings.scale * similarities + 0 * logits)

    def after_step(self, params: Tensors, context: Context) -> tuple[Tensors, Tensors]:
        """Put the classifier back."""
        fixed = {n: context.start[n] for n in params if n in self.layers.classifier}
        return params | fixed, context.memory

    def reduce(self, server: Server, means: Tensors, tally: Tally) -> Server:
        """Average the models; move the prototypes of the classes that clients held."""
        server = super().reduce(server, means, tally)
        if not any(len(each) for each in tally.prototypes.values()):
            return server
        pool = PrototypePool.gather(tally.prototypes, num_classes=self.num_classes)
        old, rho = server.params[self._weight], self.settings.smoothing
        unit = normalize(pool.vectors, dim=1)
        found = mean_by(unit, pool.labels, self.num_classes, pool.counts.to(unit.dtype)).to(old)
        moved = normalize(rho * old + (1 - rho) * found, dim=1)
        new = torch.where(pool.present.to(old.device).unsqueeze(1), moved, old)
        return replace(server, params={**server.params, self._weight: new})

    def reference(self, pool: PrototypePool) -> PrototypePool:
        """Return one prototype per class: the sample-weighted mean."""
        return pool.class_centers()

    @property
    def _weight(self) -> str:
        """The name of the classifier's weight [C, d]."""
        return next(n for n in self.layers.classifier if self.initial[n].dim() == 2)

    def _classifier(self, params: Tensors, weight: Tensor) -> Tensors:
        others = {n: zeros_like(params[n]) for n in params if n in self.layers.classifier}
        return {**others, self._weight: weight}
