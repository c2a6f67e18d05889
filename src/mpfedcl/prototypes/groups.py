"""All clients' samples by (client, class), and the step from cluster numbers to prototypes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mpfedcl.prototypes.prototypes import Prototypes


@dataclass(frozen=True, eq=False)
class Groups:
    """Samples of several clients; a group is what one client holds of one class, never empty."""

    points: Tensor
    """[P, d] embeddings, client after client."""
    group: Tensor
    """[P] the group of each sample; groups are numbered by client, then by class."""
    order: Tensor
    """[P] samples sorted by group, in their own order within a group."""
    sizes: Tensor
    """[G] samples in each group."""
    clients: Tensor
    """[G] the client of each group."""
    labels: Tensor
    """[G] the class of each group."""
    num_clients: int

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def starts(self) -> Tensor:
        """[G] where each group begins in `order`."""
        return self.sizes.cumsum(0) - self.sizes


def group_samples(
    embeddings: Sequence[Tensor], labels: Sequence[Tensor], num_classes: int
) -> Groups:
    """Check the samples of one or more clients and number their (client, class) groups."""
    if num_classes < 1:
        raise ValueError(f"num_classes is {num_classes}; it must be at least 1.")
    if len(embeddings) != len(labels):
        raise ValueError(
            f"there are embeddings of {len(embeddings)} clients and labels of {len(labels)}; "
            "they must be as many."
        )
    for vectors, classes in zip(embeddings, labels, strict=True):
        _check_shapes(vectors, classes, embeddings[0])
    points = torch.cat([vectors.detach() for vectors in embeddings])
    classes = torch.cat([classes.to(points.device, torch.int64) for classes in labels])
    _check_values(points, classes, num_classes)

    client_sizes = torch.tensor([len(vectors) for vectors in embeddings], device=points.device)
    client_numbers = torch.arange(len(embeddings), device=points.device)
    key = client_numbers.repeat_interleave(client_sizes) * num_classes + classes
    sizes = torch.bincount(key, minlength=len(embeddings) * num_classes)
    present = sizes > 0
    keys = present.nonzero().squeeze(1)
    return Groups(
        points=points,
        group=(present.cumsum(0) - 1)[key],
        order=key.argsort(stable=True),
        sizes=sizes[keys],
        clients=keys // num_classes,
        labels=keys % num_classes,
        num_clients=len(embeddings),
    )


def average_clusters(
    groups: Groups, clusters: Tensor, num_clusters: int, min_cluster_size: int
) -> list[Prototypes]:
    """Return each client's prototypes: the mean of every cluster of every group.

    u_k = 1/|S_k| Σ_{x ∈ S_k} x, where `clusters` [P] gives each sample's k < `num_clusters` within
    its group. Clusters with exactly equal means become one; those that stand for fewer than
    `min_cluster_size` samples are dropped.
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

    if num_clusters > 1:
        merged = _merge_equal(
            means.view(len(groups), num_clusters, points.shape[1]),
            counts.view(-1, num_clusters) > 0,
        )
        if not torch.equal(
            merged, torch.arange(num_clusters, device=slot.device).expand_as(merged)
        ):
            return average_clusters(groups, merged.flatten()[slot], num_clusters, min_cluster_size)

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


def mean_by(vectors: Tensor, index: Tensor, size: int) -> Tensor:
    """Return [size, d]: the mean of the vectors of each index, zeros where there is none."""
    sums = vectors.new_zeros(size, vectors.shape[1]).index_add_(0, index, vectors)
    return sums / torch.bincount(index, minlength=size).clamp(min=1).unsqueeze(1)


def _merge_equal(means: Tensor, filled: Tensor) -> Tensor:
    """Return [G, K]: for each cluster the lowest one of its group that has the same mean."""
    equal = torch.cdist(means, means, compute_mode="donot_use_mm_for_euclid_dist") == 0
    equal &= filled.unsqueeze(1) & filled.unsqueeze(2)
    equal |= torch.eye(means.shape[1], dtype=torch.bool, device=means.device)
    return equal.int().argmax(dim=1)


def _check_shapes(embeddings: Tensor, labels: Tensor, reference: Tensor) -> None:
    """Refuse a client whose embeddings and labels do not fit together, or not its neighbors'."""
    if embeddings.dim() != 2 or labels.shape != embeddings.shape[:1]:
        raise ValueError(
            f"embeddings have shape {tuple(embeddings.shape)} and labels {tuple(labels.shape)}; "
            "they must be [samples, d] and [samples]."
        )
    if embeddings.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"embeddings are {embeddings.dtype}; they must be float32 or float64.")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels are {labels.dtype}; they must be integers.")
    if embeddings.shape[1] != reference.shape[1] or embeddings.dtype != reference.dtype:
        raise ValueError(
            f"embeddings of one client are {reference.dtype} of dimension {reference.shape[1]} "
            f"and of another {embeddings.dtype} of dimension {embeddings.shape[1]}; "
            "they must agree."
        )


def _check_values(points: Tensor, labels: Tensor, num_classes: int) -> None:
    """Refuse classes that do not exist and numbers that cannot be squared and summed."""
    if not len(labels):
        return
    lowest, highest = (int(label) for label in labels.aminmax())
    if lowest < 0 or highest >= num_classes:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"label {wrong} is out of range; it must be from 0 to {num_classes - 1}.")
    if not points.numel():
        return
    # aminmax passes NaN on, so that one pass over the data sees every kind of bad number.
    lowest_value, highest_value = (float(value) for value in points.aminmax())
    largest = max(-lowest_value, highest_value)
    if not math.isfinite(largest):
        raise ValueError("embeddings hold NaN or infinity; every number must be finite.")
    limit = math.sqrt(torch.finfo(points.dtype).max / points.shape[1]) / 8
    if largest > limit:
        raise ValueError(
            f"embeddings reach {largest:.3g}; they must stay below {limit:.3g} to be squared."
        )
