"""From prototypes and a metric to a classifier that is linear in the features, class by class."""

from typing import NamedTuple

import torch
from torch import Tensor

ABSENT = -1e30
"""The score of a class that nobody holds; finite, so that no arithmetic on it gives NaN."""


class Components(NamedTuple):
    """The parts that each class's score is made of: log Σ_g exp(weight_cg · phi + bias_cg)."""

    weight: Tensor
    """[C, G, d]; zeros where a class has fewer than G parts."""
    bias: Tensor
    """[C, G]; `ABSENT` where a class has fewer."""


def make_components(
    prototypes: Tensor,
    solved: Tensor,
    labels: Tensor,
    shares: Tensor,
    *,
    origin: Tensor,
    temperature: float,
    num_classes: int,
) -> Components:
    """Return each prototype's log-likelihood, over that of the origin, as a part of its class.

    Args:
        prototypes: [G, d], m.
        solved: [G, d], A (m - origin).
        labels, shares: [G], the class of each and its share in the class; shares add up to 1.
        origin: [d]. What all classes have in common is left out, and with it rounding.
        temperature: T.
        num_classes: C.
    """
    halves = (solved * (prototypes + origin)).sum(1) / 2
    biases = -halves / temperature + shares.log()
    counts = torch.bincount(labels, minlength=num_classes)
    order = labels.argsort(stable=True)
    place = torch.arange(len(labels), device=labels.device)
    slot = place - (counts.cumsum(0) - counts)[labels[order]]
    most = max(1, int(counts.max()))
    weight = solved.new_zeros(num_classes, most, solved.shape[1])
    bias = solved.new_full((num_classes, most), ABSENT)
    weight[labels[order], slot] = solved[order] / temperature
    bias[labels[order], slot] = biases[order]
    return Components(weight, bias)


def score(components: Components, features: Tensor) -> Tensor:
    """Return the log-likelihoods [B, C] of features [B, d], up to what classes have in common."""
    weight, bias = components
    parts = features @ weight.flatten(0, 1).T + bias.flatten()
    if weight.shape[1] == 1:
        return parts
    return torch.logsumexp(parts.view(*parts.shape[:-1], *bias.shape), dim=-1)
