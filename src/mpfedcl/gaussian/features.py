"""The features that sums are made of: every sample a vector of length 1."""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import normalize

from mpfedcl.core.rng import generator


def unit_features(inputs: Tensor) -> Tensor:
    """Return phi(x) = sign(x) sqrt|x|, scaled to length 1: [..., d] for [..., d].

    The root tames the few large numbers of a feature; the length bounds what one sample can add to
    any sum. A sample of zeros has no direction and gets the one that favors no coordinate.

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


def project_features(features: Tensor, dimensions: int, seed: int) -> Tensor:
    """Return features in fewer dimensions, of length 1 again: [..., k] for [..., d].

    By a matrix that depends on the seed alone, so that everybody has the same. What all coordinates
    of a sample have in common is taken out first: most features are positive, and that is the same
    in every class. Where there are no more dimensions than asked for, features stay as they are.

    Example:
        >>> import torch
        >>> project_features(torch.eye(8), 3, seed=0).norm(dim=1)
        tensor([1., 1., 1., 1., 1., 1., 1., 1.])
    """
    size = features.shape[-1]
    if dimensions >= size:
        return features
    centered = features - features.mean(dim=-1, keepdim=True)
    return normalize(centered @ _projection(size, dimensions, seed).to(features), dim=-1, eps=1e-12)


@lru_cache(maxsize=4)
def _projection(size: int, dimensions: int, seed: int) -> Tensor:
    """Return [d, k] with orthonormal columns."""
    drawn = torch.randn(
        size, dimensions, generator=generator(seed, "projection"), dtype=torch.float64
    )
    basis: Tensor = torch.linalg.qr(drawn).Q
    return basis
