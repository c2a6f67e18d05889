"""What a client sends: sums over its samples by class, and how they scatter within classes."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class ClassSums(NamedTuple):
    """The sums of some samples; those of several clients add up.

    With phi a sample's features: n_c, s_c = Σ phi, and the scatter of a client's samples around its
    own class means, W_i = Σ phi phi' - Σ_c s_ic s_ic'/n_ic.
    """

    counts: Tensor
    """[C]: n_c."""
    sums: Tensor
    """[C, d]: s_c."""
    within: Tensor
    """[d (d + 1) / 2]: W, half of it, because it is symmetric (see `pack_symmetric`)."""
    scatter: Tensor
    """[]: |W_i|² / f_i of each client; f_i are its samples less the classes that it holds."""


def collect_sums(features: Tensor, labels: Tensor, num_classes: int) -> ClassSums:
    """Return the sums of one client's samples; zeros of the same shapes without any."""
    counts = torch.bincount(labels, minlength=num_classes)
    sums = features.new_zeros(num_classes, features.shape[1]).index_add_(0, labels, features)
    centred = centre_by_class(features, labels, counts, sums)
    within = centred.T @ centred
    degrees = int(counts.sum()) - int((counts > 0).sum())
    scatter = within.square().sum(dtype=torch.float64) / max(1, degrees)
    return ClassSums(
        counts.to(features.dtype), sums, pack_symmetric(within), scatter.to(features.dtype)
    )


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
