"""Clustering of a client's embeddings into prototypes: k-means, DBSCAN or class means."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from mpfedcl.prototypes.kmeans import Groups, group_samples, mean_by, run_kmeans
from mpfedcl.prototypes.pool import Prototypes

ClusteringMethod = Literal["kmeans", "mean", "dbscan"]
Initialization = Literal["k-means++", "random"]

MOST_PROTOTYPES = 8
"""The largest K that is tried: also the largest in the paper's figure on K."""
_LEAST_SHARE = 1e-6
"""Of a group's squares: below it clusters are points, and points cannot be more distinct."""


def cluster_prototypes(
    embeddings: Tensor,
    labels: Tensor,
    *,
    num_classes: int,
    num_prototypes: int | Literal["auto"] | None = None,
    method: ClusteringMethod = "kmeans",
    seed: int = 0,
    init: Initialization = "k-means++",
    min_cluster_size: int = 1,
    eps: float | None = None,
    min_samples: int = 3,
) -> Prototypes:
    """Return one client's prototypes.

    kmeans: up to `num_prototypes` centroids per class, u_k = mean of the points nearest to u_k; a
    class with fewer distinct points gives one for each. mean: one per class, its mean. dbscan: the
    mean of each dense cluster of a class, as many as there are. Only kmeans needs
    `num_prototypes`; the others ignore it.

    Args:
        embeddings: [samples, d], taken as they are: normalize them first if you want unit vectors.
        labels: [samples] classes, integers from 0 to `num_classes` - 1.
        num_classes: C, whether or not the client holds them all.
        num_prototypes: K, for kmeans; "auto" chooses one from 1 to 8 for each class.
        method: kmeans, mean or dbscan.
        seed, init: Where kmeans starts.
        min_cluster_size: Clusters of fewer samples give no prototype.
        eps, min_samples: DBSCAN's; without `eps` the knee of the neighbor distances is taken.

    Returns:
        Vectors [M, d] with their classes and counts, sorted by class, largest count first.

    Example:
        >>> points = torch.tensor([[0.0], [0.2], [5.0], [9.0]])
        >>> labels = torch.tensor([0, 0, 0, 1])
        >>> mine = cluster_prototypes(points, labels, num_classes=2, num_prototypes=2)
        >>> mine.labels.tolist(), mine.counts.tolist()
        ([0, 0, 1], [2, 1, 1])
    """
    if isinstance(num_prototypes, int) and num_prototypes < 1:
        raise ValueError(f"num_prototypes is {num_prototypes}; it must be at least 1.")
    clients, classes = [embeddings], [labels]
    common = {"num_classes": num_classes, "min_cluster_size": min_cluster_size}
    if method == "kmeans":
        if num_prototypes is None:
            raise ValueError("num_prototypes is None; k-means needs a number, at least 1, or auto.")
        return kmeans_prototypes(
            clients, classes, [seed], num_prototypes=num_prototypes, init=init, **common
        )[0]
    if method == "mean":
        return mean_prototypes(clients, classes, **common)[0]
    if method == "dbscan":
        return dbscan_prototypes(clients, classes, eps=eps, min_samples=min_samples, **common)[0]
    raise ValueError(
        f"method is {method!r}; it must be one of {', '.join(get_args(ClusteringMethod))}."
    )


def kmeans_prototypes(
    embeddings: Sequence[Tensor],
    labels: Sequence[Tensor],
    seeds: Sequence[int],
    *,
    num_classes: int,
    num_prototypes: int | Literal["auto"],
    init: Initialization = "k-means++",
    min_cluster_size: int = 1,
) -> list[Prototypes]:
    """Return the k-means prototypes of several clients, all classes of all of them at once.

    A client draws from its own seed only, so its result does not depend on the other clients.
    "auto" chooses K for each class of each client: see `choose_clusters`.
    """
    most = MOST_PROTOTYPES if num_prototypes == "auto" else num_prototypes
    if init not in get_args(Initialization):
        raise ValueError(
            f"init is {init!r}; it must be one of {', '.join(get_args(Initialization))}."
        )
    if len(seeds) != len(embeddings):
        raise ValueError(
            f"there are {len(seeds)} seeds for {len(embeddings)} clients; they must be as many."
        )
    if not embeddings:
        return []
    groups = group_samples(embeddings, labels, num_classes)
    # No class has more clusters than samples: a larger K would only cost time.
    num_clusters = min(most, max([1, *groups.sizes.tolist()]))
    # float32 draws stay clear enough of 1 that a cumulative sum never runs past its group.
    draws = torch.stack(
        [
            torch.rand(num_classes, most, generator=torch.Generator().manual_seed(seed))
            for seed in seeds
        ]
    )[groups.clients.cpu(), groups.labels.cpu(), :num_clusters]
    spread = init == "k-means++"
    if num_prototypes == "auto":
        clusters = choose_clusters(groups, draws, spread=spread, min_cluster_size=min_cluster_size)
    else:
        clusters = run_kmeans(groups, draws, spread=spread)
    return average_clusters(groups, clusters, num_clusters, min_cluster_size)


def mean_prototypes(
    embeddings: Sequence[Tensor],
    labels: Sequence[Tensor],
    *,
    num_classes: int,
    min_cluster_size: int = 1,
) -> list[Prototypes]:
    """Return the class means of several clients, one prototype per class and no clustering."""
    if not embeddings:
        return []
    groups = group_samples(embeddings, labels, num_classes)
    return average_clusters(groups, torch.zeros_like(groups.group), 1, min_cluster_size)


def dbscan_prototypes(
    embeddings: Sequence[Tensor],
    labels: Sequence[Tensor],
    *,
    num_classes: int,
    eps: float | None = None,
    min_samples: int = 3,
    min_cluster_size: int = 1,
) -> list[Prototypes]:
    """Return the means of the DBSCAN clusters of several clients, one group after the other."""
    if eps is not None and not eps > 0:
        raise ValueError(f"eps is {eps}; it must be above 0, or None for the knee.")
    if min_samples < 1:
        raise ValueError(f"min_samples is {min_samples}; it must be at least 1.")
    if not embeddings:
        return []
    groups = group_samples(embeddings, labels, num_classes)
    run = partial(run_dbscan, eps=eps, min_samples=min_samples)
    return average_clusters(groups, *cluster_each(groups, run), min_cluster_size)


def cluster_each(groups: Groups, run: Callable[[Tensor], Tensor]) -> tuple[Tensor, int]:
    """Return the cluster [P] of each sample within its group, and the most clusters of a group.

    `run` returns the cluster of each of one group's points, from 0.
    """
    clusters = torch.zeros_like(groups.group)
    for members in torch.split(groups.order, groups.sizes.tolist()):
        clusters[members] = run(groups.points[members])
    return clusters, int(clusters.max()) + 1 if len(clusters) else 1


# The number of clusters


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
    centered = _center(groups)
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


def _center(groups: Groups) -> Tensor:
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


# DBSCAN


def find_knee(distances: Tensor) -> float:
    """Return the value at the knee of a rising curve: the point farthest from its chord.

    With d_0 ≤ … ≤ d_{n-1} and the chord c_i = d_0 + i (d_{n-1} - d_0) / (n - 1), the knee is d_i
    for the lowest i that maximizes |d_i - c_i|, which is proportional to the distance to the chord.
    """
    curve = distances.cpu().double().sort().values
    chord = torch.linspace(0, 1, len(curve), dtype=curve.dtype)
    gap = (curve - (curve[0] + chord * (curve[-1] - curve[0]))).abs()
    return float(curve[gap.argmax()])


def run_dbscan(points: Tensor, *, eps: float | None, min_samples: int) -> Tensor:
    """Return the cluster [n] of each of one group's points, from 0, with no noise left.

    `eps` is the neighborhood radius; None takes the knee of the sorted distances to the
    `min_samples`-th neighbor, the point itself being the first. Noise joins the cluster whose mean
    of core and border points is nearest (ties to the lowest). Too few points, a radius of 0 or no
    cluster at all leave one cluster, and its mean is the class mean.
    """
    together = torch.zeros(len(points), dtype=torch.int64, device=points.device)
    if len(points) <= min_samples:
        return together
    # From differences: equal points are at distance 0, which a product would blur.
    distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    if eps is None:
        eps = find_knee(distances.kthvalue(min_samples, dim=1).values)
    if eps == 0:
        return together

    from sklearn.cluster import DBSCAN  # a second to import, and only this method needs it

    model = DBSCAN(eps=eps, min_samples=min_samples, metric="precomputed")
    found = torch.from_numpy(model.fit_predict(distances.cpu().numpy())).to(together)
    num_clusters = int(found.max()) + 1
    noise = found < 0
    if num_clusters == 0:
        return together
    means = torch.stack([points[found == k].mean(0) for k in range(num_clusters)])
    found[noise] = torch.cdist(
        points[noise], means, compute_mode="donot_use_mm_for_euclid_dist"
    ).argmin(1)
    return found


# From clusters to prototypes


def average_clusters(
    groups: Groups, clusters: Tensor, num_clusters: int, min_cluster_size: int
) -> list[Prototypes]:
    """Return each client's prototypes: the mean of every cluster of every group.

    u_k = 1/|S_k| Σ_{x ∈ S_k} x, where `clusters` [P] gives each sample's k < `num_clusters` within
    its group. Clusters of fewer than `min_cluster_size` samples are dropped.
    """
    if min_cluster_size < 1:
        raise ValueError(f"min_cluster_size is {min_cluster_size}; it must be at least 1.")
    points, num_samples = groups.points, len(groups.points)
    slot = groups.group * num_clusters + clusters
    num_slots = len(groups) * num_clusters
    counts = torch.bincount(slot, minlength=num_slots)
    first = torch.full((num_slots,), num_samples, device=points.device).scatter_reduce(
        0, slot, torch.arange(num_samples, device=points.device), "amin"
    )
    # Averaging the differences to one member makes the mean of equal points exactly that point.
    base = points.index_select(0, first.clamp(max=num_samples - 1)) if num_samples else points
    offsets = base.index_select(0, slot)
    sums = torch.zeros_like(base).index_add_(0, slot, torch.sub(points, offsets, out=offsets))
    means = base + sums / counts.clamp(min=1).unsqueeze(1)

    # Largest count first, then lowest first member; `first` is at most P, so it only breaks ties.
    rank = (counts * (num_samples + 1) - first).view(-1, num_clusters)
    ranked = rank.argsort(dim=1, descending=True, stable=True)
    ranked += torch.arange(len(groups), device=slot.device).unsqueeze(1) * num_clusters
    slots = ranked.flatten()
    slots = slots[counts[slots] >= min_cluster_size]
    vectors, counts, group = means[slots], counts[slots], slots // num_clusters
    per_client = torch.bincount(groups.clients[group], minlength=groups.num_clients).tolist()
    columns = (vectors, groups.labels[group], counts)
    return [
        Prototypes(*column)
        for column in zip(*(torch.split(column, per_client) for column in columns), strict=True)
    ]
