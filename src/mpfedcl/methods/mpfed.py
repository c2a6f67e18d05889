"""MPFed (Qiao et al., ICOIN 2023), the predecessor of MP-FedCL."""

import torch

from mpfedcl.core.rng import seed_for
from mpfedcl.methods.proto_inference import ProtoInference
from mpfedcl.prototypes import PrototypePool, Prototypes, kmeans_prototypes


class MpFed(ProtoInference):
    """FedAvg; in the last round clients cluster each class, and the server clusters the centroids.

    Each client sends K k-means centroids per class, and the server merges those of all clients into
    K per class. A centroid is weighted by its share of the client's samples of that class.
    """

    name = "mpfed"
    summary = "FedAvg; at the end several weighted prototypes per class predict"
    paper = "Qiao et al., ICOIN 2023"
    interpretation = (
        "The formula is ours, after the paper's abstract: a centroid counts by its share of its "
        "owner's samples of that class when the server merges them into K."
    )
    sends = "its model; in the last round also K prototypes per class"
    clustering = "kmeans"
    search_space = {**ProtoInference.search_space, "prototypes__per_class": (2, 3, 4)}

    def reference(self, pool: PrototypePool) -> PrototypePool:
        """Return K prototypes per class, merged from the clients' centroids by their shares."""
        if not len(pool):
            return pool
        (found,) = kmeans_prototypes(
            [pool.vectors],
            [pool.labels],
            [seed_for(self.experiment.seed, "merged prototypes")],
            num_classes=self.num_classes,
            num_prototypes=self.num_prototypes or "auto",
            init=self.experiment.prototypes.init,
        )
        return _average_by_share(pool, found)


def _average_by_share(pool: PrototypePool, centers: Prototypes) -> PrototypePool:
    """Return the weighted means of the pool's prototypes around each center of their class."""
    distances = torch.cdist(pool.vectors, centers.vectors)
    others = pool.labels.unsqueeze(1) != centers.labels
    places = distances.masked_fill(others, torch.inf).argmin(dim=1)
    # Each prototype's share of its owner's samples of the class.
    key = pool.owners * pool.num_classes + pool.labels
    samples = pool.counts.to(pool.vectors.dtype)
    held = samples.new_zeros(pool.num_clients * pool.num_classes).index_add_(0, key, samples)
    shares = (samples / held[key]).unsqueeze(1)
    sums = torch.zeros_like(centers.vectors).index_add_(0, places, shares * pool.vectors)
    totals = torch.zeros_like(sums[:, :1]).index_add_(0, places, shares)
    counts = torch.zeros_like(centers.labels).index_add_(0, places, pool.counts)
    # Of two centers that coincide, one may have no points.
    used = counts > 0
    return pool.merged_into(sums[used] / totals[used], centers.labels[used], counts[used])
