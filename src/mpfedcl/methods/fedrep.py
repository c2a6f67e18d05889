"""FedRep (Collins et al., ICML 2021)."""

import math

import torch
from torch import Tensor

from mpfedcl.experiment.method_settings import FedRepSettings
from mpfedcl.methods import Context, LocalTraining, Method, Tensors


class FedRep(Method):
    """The layers below the classifier are averaged; each client has its own classifier.

    In a round a client first trains its classifier with the other layers frozen, then the other
    layers with its classifier frozen.
    """

    name = "fedrep"
    summary = "shares all but the classifier; the two parts train in turn"
    family = "personal models"
    paper = "Collins et al., ICML 2021"
    interpretation = "Momentum is 0, so that the part that is not being trained stays unchanged."
    sends = "all but its classifier"
    keeps = "its classifier"
    primary_predictor = "personal_classifier"
    needs_sgd = True
    settings: FedRepSettings
    search_space = {**Method.search_space, "fedrep__head_epochs": (1, 5, 10)}

    def shared(self, parameter: str) -> bool:
        """Keep the classifier with each client."""
        return parameter not in self.layers.classifier

    def local_training(self, round_number: int) -> LocalTraining:
        """Add the classifier's epochs; momentum would move the part that is not being trained."""
        usual = super().local_training(round_number)
        return usual._replace(momentum=0.0, epochs=self.settings.head_epochs + usual.epochs)

    def describe(self, labels: Tensor) -> Tensors:
        """Return the number of steps that train the classifier."""
        steps = math.ceil(len(labels) / self.experiment.train.batch_size)
        head_steps = steps * self.settings.head_epochs
        return {"head_steps": torch.tensor(head_steps, device=labels.device)}

    def adjust(
        self, gradients: Tensors, params: Tensors, context: Context
    ) -> tuple[Tensors, Tensors]:
        """Move the classifier in the first steps, and the layers below it in the others."""
        is_head = context.step < context.own["head_steps"]
        chosen = {
            n: torch.where(is_head == (not self.shared(n)), g, torch.zeros_like(g))
            for n, g in gradients.items()
        }
        return chosen, context.memory
