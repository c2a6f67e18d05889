"""How often a client meets each class: known from its labels, or found without them."""

import torch
from torch import Tensor

SMOOTHING = 0.1
"""Added to each count, so that a class that was never met is unlikely and not impossible."""
_MOST_STEPS = 200
_TOLERANCE = 1e-4


def log_prior(counts: Tensor) -> Tensor:
    """Return log((n_c + 0.1) / (n + 0.1 C)) for counts [..., C].

    Example:
        >>> import torch
        >>> log_prior(torch.tensor([9, 0])).exp()
        tensor([0.9891, 0.0109], dtype=torch.float64)
    """
    smooth = counts.double() + SMOOTHING
    return (smooth / smooth.sum(dim=-1, keepdim=True)).log()


def estimate_prior(scores: Tensor) -> Tensor:
    """Find a label prior from unlabeled samples by EM (Saerens et al., 2002); its log [C].

    Args:
        scores: [B, C] log-likelihoods of each class, up to a number per sample.

    Example:
        >>> import torch
        >>> likely = torch.tensor([[0.0, -9.0], [0.0, -9.0], [0.0, -9.0], [-9.0, 0.0]])
        >>> [round(share, 2) for share in estimate_prior(likely).exp().tolist()]
        [0.74, 0.26]
    """
    return estimate_priors(scores, torch.zeros(len(scores), dtype=torch.int64), 1)[0]


@torch.no_grad()
def estimate_priors(scores: Tensor, owners: Tensor, num_clients: int) -> Tensor:
    """Find the priors of several clients at once, their logs [N, C]; `owners` [B] are whose."""
    scores, owners = scores.double(), owners.to(scores.device)
    prior = scores.new_full((num_clients, scores.shape[-1]), 1 / scores.shape[-1])
    for _ in range(_MOST_STEPS):
        expected = torch.softmax(scores + prior.log()[owners], dim=-1)
        tallied = torch.full_like(prior, SMOOTHING).index_add_(0, owners, expected)
        after = tallied / tallied.sum(dim=1, keepdim=True)
        moved = float((after - prior).abs().max())
        prior = after
        if moved < _TOLERANCE:
            break
    return prior.log()
