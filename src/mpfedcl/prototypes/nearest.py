"""The nearest of many vectors: the speed of a product, the answer of exact differences."""

import torch
from torch import Tensor

_CHUNK = 2**22
"""Distances held at once: the memory stays small however many queries there are."""


def find_nearest(z: Tensor, vectors: Tensor, labels: Tensor) -> Tensor:
    """Return [B]: the row of `vectors` [M, d] nearest to each row of z.

    argmin_m |z - u_m|; M must be at least 1. The label of that row is the nearest one's to the last
    bit, the first of a tie; among rows of one label rounding may decide.
    """
    pieces = torch.split(z, max(1, _CHUNK // len(vectors)))
    return torch.cat([_find_piece(piece, vectors, labels) for piece in pieces])


def _find_piece(z: Tensor, vectors: Tensor, labels: Tensor) -> Tensor:
    """As `find_nearest`, for as many queries as fit.

    |z - u|² / 2 less |z|² / 2 is |u|² / 2 - z·u: one product. Where rounding could have decided
    between two labels, those queries alone are measured again by differences.
    """
    half_square = vectors.square().sum(1) / 2
    cost = torch.addmm(half_square, z, vectors.T, alpha=-1)
    best = cost.min(dim=1)
    # A sum of d products is off by at most about d times the rounding of its terms' size.
    largest = vectors.norm(dim=1).max()
    rounding = 2 * vectors.shape[1] * torch.finfo(z.dtype).eps
    margin = rounding * largest * (largest + z.norm(dim=1))
    close = cost <= (best.values + margin).unsqueeze(1)
    others = labels != labels[best.indices].unsqueeze(1)
    doubtful = (close & others).any(1).nonzero().squeeze(1)
    exact = torch.cdist(z[doubtful], vectors, compute_mode="donot_use_mm_for_euclid_dist")
    return best.indices.index_copy(0, doubtful, exact.argmin(1))
