"""FINCH (Sarfraz et al., CVPR 2019): clustering by first neighbors, without parameters."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from mpfedcl.prototypes.clustering import average_clusters, cluster_each
from mpfedcl.prototypes.kmeans import group_samples, mean_by
from mpfedcl.prototypes.pool import PrototypePool, Prototypes, split_among_groups

_CHUNK = 2048
"""Rows of similarities held at once."""


def run_finch(points: Tensor) -> Tensor:
    """Return the cluster [n] of each point, from 0: FINCH's coarsest partition.

    Each point is joined with its nearest neighbor by cosine similarity, and the connected
    components are clusters. The means of these clusters are joined likewise, as long as more than
    one cluster is left. A single cluster is returned only if the first step already gives it.
    """
    clusters = _join_neighbors(points)
    while (count := _count(clusters)) > 1:
        coarser = _join_neighbors(mean_by(points, clusters, count))[clusters]
        if _count(coarser) == 1:
            break
        clusters = coarser
    return clusters


def finch_prototypes(
    embeddings: Sequence[Tensor],
    labels: Sequence[Tensor],
    *,
    num_classes: int,
    min_cluster_size: int = 1,
) -> list[Prototypes]:
    """Return the means of the FINCH clusters of several clients, class by class."""
    if not embeddings:
        return []
    groups = group_samples(embeddings, labels, num_classes)
    return average_clusters(groups, *cluster_each(groups, run_finch), min_cluster_size)


def finch_pool(pool: PrototypePool) -> PrototypePool:
    """Return the means of the FINCH clusters of a pool's prototypes, each counted once.

    The first clusters of each class belong to one owner, the next ones to another, so that no
    owner has more prototypes of a class than a client may have.
    """
    if not len(pool):
        return pool
    groups = group_samples([pool.vectors], [pool.labels], pool.num_classes)
    (merged,) = average_clusters(groups, *cluster_each(groups, run_finch), 1)
    return split_among_groups(pool, merged.vectors, merged.labels, merged.counts)


def _join_neighbors(points: Tensor) -> Tensor:
    """Return the connected components [n] of the graph of first neighbors."""
    # Imported here, because most methods do not need it.
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    if len(points) == 1:
        return torch.zeros(1, dtype=torch.int64, device=points.device)
    unit, rows = normalize(points, dim=1), torch.arange(len(points), device=points.device)
    neighbors = []
    for some in torch.split(rows, _CHUNK):
        similarities = unit[some] @ unit.T
        similarities[torch.arange(len(some)), some] = -torch.inf
        neighbors.append(similarities.argmax(dim=1))
    edges = (
        torch.ones(len(rows)).numpy(),
        (rows.cpu().numpy(), torch.cat(neighbors).cpu().numpy()),
    )
    _, found = connected_components(coo_matrix(edges, shape=(len(rows), len(rows))), directed=False)
    return torch.from_numpy(found).to(rows)


def _count(clusters: Tensor) -> int:
    return int(clusters.max()) + 1
