"""Sums of features by class, and symmetric matrices of which half is enough."""

from functools import lru_cache

import torch
from torch import Tensor


def centre_by_class(features: Tensor, labels: Tensor, counts: Tensor, sums: Tensor) -> Tensor:
    """Return the features less the mean of their class."""
    return features - (sums / counts.clamp(min=1).unsqueeze(1))[labels]


def moment_from_within(within: Tensor, counts: Tensor, sums: Tensor) -> Tensor:
    """Return Σ phi phi' [d, d] of one client, which adds up and can be subtracted, from its W_i."""
    return within + _between(counts, sums)


def within_from_moment(moment: Tensor, counts: Tensor, sums: Tensor) -> Tensor:
    """Return W_i [d, d] of one client from its Σ phi phi'."""
    return moment - _between(counts, sums)


def _between(counts: Tensor, sums: Tensor) -> Tensor:
    """Return Σ_c s_c s_c' / n_c."""
    scaled = sums / counts.clamp(min=1).sqrt().unsqueeze(1)
    return scaled.T @ scaled


def packed_size(dimension: int) -> int:
    """Return the numbers that a symmetric matrix takes once packed."""
    return dimension * (dimension + 1) // 2


def pack_symmetric(matrix: Tensor) -> Tensor:
    """Return the upper half of a symmetric matrix [d, d], row by row."""
    return matrix.flatten()[_upper_places(len(matrix)).to(matrix.device)]


def unpack_symmetric(packed: Tensor, dimension: int) -> Tensor:
    """Return the matrix [d, d] that `pack_symmetric` was given."""
    matrix = packed.new_zeros(dimension * dimension)
    matrix[_upper_places(dimension).to(packed.device)] = packed
    square = matrix.view(dimension, dimension)
    return square + square.triu(1).T


@lru_cache(maxsize=2)
def _upper_places(dimension: int) -> Tensor:
    rows, columns = torch.triu_indices(dimension, dimension)
    places: Tensor = rows * dimension + columns
    return places
