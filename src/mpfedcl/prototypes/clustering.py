"""From a client's embeddings to its prototypes: k-means, DBSCAN or plain class means."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from mpfedcl.prototypes.automatic import MOST_PROTOTYPES, choose_clusters
from mpfedcl.prototypes.dbscan import run_dbscan
from mpfedcl.prototypes.groups import average_clusters, group_samples
from mpfedcl.prototypes.kmeans import run_kmeans
from mpfedcl.prototypes.prototypes import Prototypes

ClusteringMethod = Literal["kmeans", "mean", "dbscan"]
Initialization = Literal["k-means++", "random"]


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
    if method == "kmeans":
        if num_prototypes is None:
            raise ValueError("num_prototypes is None; k-means needs a number, at least 1, or auto.")
        return kmeans_prototypes(
            clients,
            classes,
            [seed],
            num_classes=num_classes,
            num_prototypes=num_prototypes,
            init=init,
            min_cluster_size=min_cluster_size,
        )[0]
    if method == "mean":
        return mean_prototypes(
            clients, classes, num_classes=num_classes, min_cluster_size=min_cluster_size
        )[0]
    if method == "dbscan":
        return dbscan_prototypes(
            clients,
            classes,
            num_classes=num_classes,
            eps=eps,
            min_samples=min_samples,
            min_cluster_size=min_cluster_size,
        )[0]
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

    A client draws from its own seed alone, so its result does not depend on its company. "auto"
    chooses K for each class of each client: see `choose_clusters`.
    """
    most = MOST_PROTOTYPES if num_prototypes == "auto" else num_prototypes
    if most < 1:
        raise ValueError(f"num_prototypes is {most}; it must be at least 1.")
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
    clusters = torch.zeros_like(groups.group)
    for members in torch.split(groups.order, groups.sizes.tolist()):
        clusters[members] = run_dbscan(groups.points[members], eps=eps, min_samples=min_samples)
    num_clusters = int(clusters.max()) + 1 if len(clusters) else 1
    return average_clusters(groups, clusters, num_clusters, min_cluster_size)
