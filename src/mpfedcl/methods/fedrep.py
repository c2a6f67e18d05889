"""FedRep (Collins et al., 2021)."""

import math
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.experiment.method_settings import FedRepSettings
from mpfedcl.methods._round_values import Context
from mpfedcl.methods.base import Method


class FedRep(Method):
    """The layers below the classifier are averaged; each client has a classifier of its own.

    In a round a client first trains its classifier alone, then the layers below it alone.
    """

    name = "fedrep"
    summary = "shares all but the classifier; the two parts train in turn"
    family = "personal models"
    paper = "Collins et al., ICML 2021"
    interpretation = "Momentum is 0, so that the part that is not being trained stays unchanged."
    sends = "all but its classifier"
    keeps = "its classifier"
    predictor = "personal_classifier"
    needs_sgd = True
    settings: FedRepSettings
    search_space = MappingProxyType({**Method.search_space, "fedrep__head_epochs": (1, 5, 10)})

    @property
    def epochs(self) -> int:
        """Those of the classifier, then those of the layers below."""
        return self.settings.head_epochs + self.experiment.train.epochs

    def shared(self, parameter: str) -> bool:
        """The classifier stays at home."""
        return not parameter.startswith("classifier.")

    def descent(self, round_number: int) -> tuple[float, float]:
        """No momentum: it would move a part that is not due."""
        return self.experiment.train.learning_rate(round_number), 0.0

    def describe(self, labels: Tensor) -> Tensors:
        """Return how many steps are the classifier's."""
        steps = math.ceil(len(labels) / self.experiment.train.batch_size)
        head_steps = steps * self.settings.head_epochs
        return {"head_steps": torch.tensor(head_steps, device=labels.device)}

    def at_step(self, received: Any, step: int) -> int:
        """Return the step's number."""
        return step

    def adjust(self, gradients: Tensors, params: Tensors, context: Context) -> Tensors:
        """Let only the part that is due move."""
        is_head = context.received < context.own["head_steps"]
        return {
            n: torch.where(is_head == (not self.shared(n)), g, torch.zeros_like(g))
            for n, g in gradients.items()
        }
