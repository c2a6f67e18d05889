"""As many prototypes as a class has clusters, chosen for each (client, class) by itself."""

import torch
from torch import Tensor

from mpfedcl.prototypes.groups import Groups, mean_by
from mpfedcl.prototypes.kmeans import run_kmeans

MOST_PROTOTYPES = 8
"""The largest K that is tried: also the largest in the paper's figure on K."""
_LEAST_SHARE = 1e-6
"""Of a group's squares: below it clusters are points, and points cannot be more distinct."""


def choose_clusters(
    groups: Groups, draws: Tensor, *, spread: bool, min_cluster_size: int = 1
) -> Tensor:
    """Return the cluster [P] of each sample by k-means, with K from 1 to `draws`' width by group.

    The K of a group has the greatest Bayesian information criterion (Pelleg and Moore's X-means:
    spherical Gaussians of one variance, each sample given to one of them),

        BIC = Σ_k n_k log(n_k / n) - n D/2 log σ² - D (n - K)/2 - (K (D + 1))/2 log n,
        σ² = Σ_x |x - u_{k(x)}|² / (D (n - K)),

    and the lowest of equals. D is not the number of coordinates but of the directions in which the
    group spreads, (Σ λ)² / Σ λ² over the eigenvalues of its covariance. Embeddings use few of their
    coordinates. If all counted, each halving of a cloud would seem to explain all of them, and as
    training went on most classes would take nearly the largest K. The silhouette would need a bar
    below which K is 1, and no bar serves both small groups and large ones.

    A K that would leave a cluster of one sample, or of fewer than `min_cluster_size`, is not
    chosen: an outlier is not a second form of its class, and its prototype would be the sample.
    """
    centered = _centre(groups)
    directions = _count_directions(groups, centered)
    least = max(2, min_cluster_size)
    best, chosen, floor = None, torch.zeros_like(groups.group), torch.zeros(0)
    for num_clusters in range(1, draws.shape[1] + 1):
        clusters = torch.zeros_like(chosen)
        if num_clusters > 1:
            clusters = run_kmeans(groups, draws[:, :num_clusters], spread=spread)
        counts, squares = _measure(groups, centered, clusters, num_clusters)
        if best is None:
            floor = _LEAST_SHARE * squares
            best = _criterion(counts, squares, directions)
            continue
        value = _criterion(counts, squares.maximum(floor), directions)
        is_usable = ((counts == 0) | (counts >= least)).all(1)
        is_better = is_usable & (value > best)
        best = value.where(is_better, best)
        chosen = clusters.where(is_better[groups.group], chosen)
    return chosen


def _centre(groups: Groups) -> Tensor:
    """Return the samples [P, d] as differences to the mean of their group."""
    # To one member first, so that a common offset costs no digits.
    first = groups.order[groups.starts]
    offsets = groups.points - groups.points[first][groups.group]
    return offsets - mean_by(offsets, groups.group, len(groups))[groups.group]


def _count_directions(groups: Groups, centered: Tensor) -> Tensor:
    """Return [G]: (Σ λ)² / Σ λ² of each group's covariance, at least 1."""
    found = []
    for members in torch.split(groups.order, groups.sizes.tolist()):
        points = centered[members].double()
        # Both products have the same eigenvalues but for zeros; the smaller one is cheaper.
        product = points @ points.T if len(points) < points.shape[1] else points.T @ points
        squares = product.square().sum().clamp(min=torch.finfo(torch.float64).tiny)
        found.append(points.square().sum().square() / squares)
    return torch.stack(found).clamp(min=1) if found else centered.new_zeros(0).double()


def _measure(
    groups: Groups, centered: Tensor, clusters: Tensor, num_clusters: int
) -> tuple[Tensor, Tensor]:
    """Return the samples [G, K] of each cluster, and each group's [G] squared distances summed."""
    slot = groups.group * num_clusters + clusters
    counts = torch.bincount(slot, minlength=len(groups) * num_clusters)
    distances = (centered - mean_by(centered, slot, len(counts))[slot]).square().sum(1).double()
    squares = distances.new_zeros(len(groups)).index_add_(0, groups.group, distances)
    return counts.view(-1, num_clusters), squares


def _criterion(counts: Tensor, squares: Tensor, directions: Tensor) -> Tensor:
    """Return [G]: the information criterion of groups cut into K clusters."""
    num_clusters = counts.shape[1]
    size = counts.sum(1).double()
    free = (size - num_clusters).clamp(min=1)
    # Equal points have no variance: any number serves, since K is then 1.
    variance = (squares / (directions * free)).clamp(min=torch.finfo(torch.float64).tiny)
    mixing = torch.special.entr(counts / size.unsqueeze(1)).sum(1) * size
    likelihood = -mixing - directions / 2 * (size * variance.log() + free)
    value: Tensor = likelihood - num_clusters * (directions + 1) / 2 * size.log()
    return value
