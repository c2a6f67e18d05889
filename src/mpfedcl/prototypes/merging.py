"""A pool that does not grow with the clients: prototypes of a class merged by weighted k-means."""

import torch
from torch import Tensor

from mpfedcl.prototypes.groups import group_samples
from mpfedcl.prototypes.kmeans import run_kmeans
from mpfedcl.prototypes.pool import PrototypePool


def merge_prototypes(pool: PrototypePool, most: int, generator: torch.Generator) -> PrototypePool:
    """Return a pool with at most `most` prototypes per class; the same one where that is so.

    k-means in each class, a prototype counting as its samples: u = Σ n_m u_m / Σ n_m over those
    that become one, and n = Σ n_m. So a class's mean over samples stays what it was, and its second
    moment loses the scatter within what is merged (`spread_kept`). The new ones are owned by groups
    of K, the largest first: who has sent what is not told any more.
    """
    if most < 1:
        raise ValueError(f"most is {most}; it must be at least 1.")
    if not len(pool) or int(torch.bincount(pool.labels).max()) <= most:
        return pool
    # One group per class, classes in order.
    groups = group_samples([pool.vectors], [pool.labels], pool.num_classes)
    num_clusters = min(most, int(groups.sizes.max()))
    draws = torch.rand(len(groups), num_clusters, generator=generator)
    weights = pool.counts.to(pool.vectors.dtype)
    clusters = run_kmeans(groups, draws, spread=True, weights=weights)
    key, place = torch.unique(groups.group * num_clusters + clusters, return_inverse=True)
    vectors, counts = _average(pool, place, len(key))
    return _own_by_groups(pool, vectors, groups.labels[key // num_clusters], counts)


def spread_kept(full: PrototypePool, merged: PrototypePool) -> float:
    """Return the share of the scatter of prototypes around their class means that is left.

    Σ n |u - ū_c|², with ū_c the mean over samples, of the merged pool over that of the full one; 1
    where there is none.
    """
    before = _scatter(full)
    return _scatter(merged) / before if before > 0 else 1.0


def _average(pool: PrototypePool, place: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the mean by counts, and the counts, of the prototypes of each place."""
    weights = pool.counts.double()
    counts = torch.zeros(size, dtype=torch.int64, device=place.device)
    counts.index_add_(0, place, pool.counts)
    # In double precision: thousands of prototypes may become one.
    sums = torch.zeros(size, pool.dimension, dtype=torch.float64, device=place.device)
    sums.index_add_(0, place, pool.vectors.double() * weights.unsqueeze(1))
    totals = sums.new_zeros(size).index_add_(0, place, weights)
    return (sums / totals.clamp(min=1).unsqueeze(1)).to(pool.vectors.dtype), counts


def _own_by_groups(
    pool: PrototypePool, vectors: Tensor, labels: Tensor, counts: Tensor
) -> PrototypePool:
    """Give the first K prototypes of each class to the first group, the next K to the next."""
    most = pool.num_prototypes or int(pool.held.max())
    largest_first = (labels * (int(counts.max()) + 1) - counts).argsort(stable=True)
    labels = labels[largest_first]
    held = torch.bincount(labels, minlength=pool.num_classes)
    rank = torch.arange(len(labels), device=labels.device) - (held.cumsum(0) - held)[labels]
    owners = rank // most
    by_owner = owners.argsort(stable=True)
    chosen = largest_first[by_owner]
    num_owners = int(owners.max()) + 1
    digits = len(str(num_owners))
    return PrototypePool(
        vectors=vectors[chosen],
        labels=labels[by_owner],
        counts=counts[chosen],
        owners=owners[by_owner],
        names=tuple(f"group-{number + 1:0{digits}}" for number in range(num_owners)),
        num_classes=pool.num_classes,
        num_prototypes=pool.num_prototypes,
    )


def _scatter(pool: PrototypePool) -> float:
    weights = pool.counts.double().unsqueeze(1)
    vectors = pool.vectors.double()
    sums = vectors.new_zeros(pool.num_classes, pool.dimension)
    sums.index_add_(0, pool.labels, weights * vectors)
    totals = weights.new_zeros(pool.num_classes, 1).index_add_(0, pool.labels, weights)
    centres = sums / totals.clamp(min=1)
    return float((weights * (vectors - centres[pool.labels]).square()).sum())
