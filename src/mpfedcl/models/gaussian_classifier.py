"""The model of one-shot methods: features of norm 1, and scores that are linear in them."""

from collections.abc import Callable

import torch
from torch import Tensor

from mpfedcl.core.tensors import Tensors
from mpfedcl.gaussian import ABSENT, Components, score, unit_features
from mpfedcl.models.base import Model

_SCORES_AT_ONCE = 2**24
"""Samples times components scored together; a mixture over many clients has many components."""


class GaussianClassifier(Model):
    """Class scores from components [C, G]; the embedding is the features themselves.

    Nothing is trained: `weight` [C, G, d] and `bias` [C, G] are computed in closed form from
    sufficient statistics, for any G.

    Args:
        input_size: Number of input values of a sample.
        num_classes: C.
        features: Maps inputs to features of norm 1.
    """

    def __init__(
        self,
        input_size: int,
        num_classes: int,
        features: Callable[[Tensor], Tensor] = unit_features,
    ) -> None:
        self._features = features
        self.embedding_size = features(torch.zeros(1, input_size)).shape[1]
        self._num_classes = num_classes

    def init(self, generator: torch.Generator, dtype: torch.dtype) -> Tensors:
        """Return a classifier that knows no class."""
        weight = torch.zeros(self._num_classes, 1, self.embedding_size, dtype=dtype)
        bias = torch.full((self._num_classes, 1), ABSENT, dtype=dtype)
        return {"weight": weight, "bias": bias}

    def apply_many(self, params: Tensors, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Evaluate several models as one whose classes are concatenated."""
        count = len(params["weight"])
        side_by_side = {name: value.flatten(0, 1) for name, value in params.items()}
        features, scores = self.apply(side_by_side, inputs)
        by_model = scores.view(len(scores), count, -1).transpose(0, 1)
        return features.expand(count, *features.shape), by_model

    def fits(self, params: Tensors) -> bool:
        """Return whether parameters fit this model, with any number of components."""
        if params.keys() != {"weight", "bias"}:
            return False
        weight, bias = params["weight"].shape, params["bias"].shape
        expected = (self._num_classes, self.embedding_size)
        return len(weight) == 3 and (weight[0], weight[2]) == expected and bias == weight[:2]

    def apply(self, params: Tensors, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features and the classes' scores."""
        features, parts = self._features(inputs), Components(params["weight"], params["bias"])
        at_once = max(1, _SCORES_AT_ONCE // parts.bias.numel())
        is_one_piece = parts.bias.shape[1] == 1
        # An exported program takes batches of any size, so it must not branch on the size.
        if is_one_piece or torch.compiler.is_exporting() or len(features) <= at_once:
            return features, score(parts, features)
        return features, torch.cat([score(parts, some) for some in torch.split(features, at_once)])
