"""How often a client meets each class: known from its labels, or found without them."""

import torch
from torch import Tensor

SMOOTHING = 0.1
"""Added to each count, so that a class that was never met is unlikely and not impossible."""
_MOST_STEPS = 200
_TOLERANCE = 1e-6


def log_prior(counts: Tensor) -> Tensor:
    """Return log((n_c + 0.1) / (n + 0.1 C)) for counts [..., C].

    Example:
        >>> import torch
        >>> log_prior(torch.tensor([9, 0])).exp()
        tensor([0.9891, 0.0109], dtype=torch.float64)
    """
    smooth = counts.double() + SMOOTHING
    return (smooth / smooth.sum(dim=-1, keepdim=True)).log()


@torch.no_grad()
def estimate_prior(scores: Tensor) -> Tensor:
    """Find a label prior from unlabelled samples by EM (Saerens et al., 2002); its log [C].

    Args:
        scores: [B, C] log-likelihoods of each class, up to a number per sample.

    Example:
        >>> import torch
        >>> likely = torch.tensor([[0.0, -9.0], [0.0, -9.0], [0.0, -9.0], [-9.0, 0.0]])
        >>> estimate_prior(likely).exp()
        tensor([0.7382, 0.2618], dtype=torch.float64)
    """
    scores = scores.double()
    size = scores.shape[-1]
    prior = torch.full((size,), 1 / size, dtype=torch.float64, device=scores.device)
    for _ in range(_MOST_STEPS):
        expected = torch.softmax(scores + prior.log(), dim=-1).sum(0) + SMOOTHING
        after = expected / expected.sum()
        moved = float((after - prior).abs().max())
        prior = after
        if moved < _TOLERANCE:
            break
    return prior.log()
