"""The features that sums are made of: every sample a vector of length 1."""

import torch
from torch import Tensor


def unit_features(inputs: Tensor) -> Tensor:
    """Return phi(x) = sign(x) sqrt|x|, scaled to length 1: [..., d] for [..., d].

    The root tames the few large numbers of a feature; the length bounds what one sample can add to
    any sum. A sample of zeros has no direction and gets the one that favours no coordinate.

    Example:
        >>> import torch
        >>> unit_features(torch.tensor([[9.0, -16.0], [0.0, 0.0]]))
        tensor([[ 0.6000, -0.8000],
                [ 0.7071,  0.7071]])
    """
    roots = inputs.abs().sqrt() * inputs.sign()
    # |phi|² is the sum of |x|, which single precision may not hold; its root it does.
    lengths = inputs.abs().sum(dim=-1, keepdim=True, dtype=torch.float64).sqrt().to(inputs.dtype)
    even = torch.full_like(roots, inputs.shape[-1] ** -0.5)
    # Asked so that NaN stays NaN.
    return torch.where(lengths == 0, even, roots / lengths)
