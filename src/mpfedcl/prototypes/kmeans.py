"""k-means of every (client, class) group at once.

Groups differ in size, from one sample to thousands. They are cut into blocks of a few rows, so one
batched product serves them all: the number of operations does not grow with the number of groups,
and padding never exceeds one block a group. Rows that pad a block repeat a point of its group: they
always fall to the cluster of the point they repeat, and `mask` keeps them from being counted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS = 16
"""Rows of a block."""
MAX_ITERATIONS = 100


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


def mean_by(vectors: Tensor, index: Tensor, size: int, weights: Tensor | None = None) -> Tensor:
    """Return [size, d]: the mean of the vectors of each index, zeros where there is none.

    With `weights` [len(vectors)] it is the weighted mean; they must be 0 or at least 1.
    """
    if weights is None:
        totals = torch.bincount(index, minlength=size)
    else:
        totals = weights.new_zeros(size).index_add_(0, index, weights)
        vectors = weights.unsqueeze(1) * vectors
    sums = vectors.new_zeros(size, vectors.shape[1]).index_add_(0, index, vectors)
    return sums / totals.clamp(min=1).unsqueeze(1)


def _check_shapes(embeddings: Tensor, labels: Tensor, reference: Tensor) -> None:
    """Reject embeddings and labels that do not fit together, or those of another client."""
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


def check_range(what: str, indices: Tensor, limit: int) -> None:
    """Reject classes or owners that do not exist."""
    if not len(indices):
        return
    lowest, highest = (int(index) for index in indices.aminmax())
    if lowest < 0 or highest >= limit:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"{what} {wrong} is out of range; it must be from 0 to {limit - 1}.")


def _check_values(points: Tensor, labels: Tensor, num_classes: int) -> None:
    """Reject classes that do not exist and values that cannot be squared and summed."""
    check_range("label", labels, num_classes)
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


@dataclass(frozen=True, eq=False)
class Blocks:
    """Samples in blocks of equal length, so that groups of all sizes are clustered together."""

    points: Tensor
    """[B, ROWS, d]"""
    mask: Tensor
    """[B, ROWS] True where a row is a sample, False where it pads."""
    group: Tensor
    """[B] the group of each block."""
    num_groups: int
    weights: Tensor | None = None
    """[B, ROWS] how many points each row stands for; None: one each."""

    def sum_groups(self, values: Tensor) -> Tensor:
        """Add up [B, ...] over the blocks of each group to [G, ...]."""
        return values.new_zeros(self.num_groups, *values.shape[1:]).index_add_(
            0, self.group, values
        )

    def select(self, groups: Tensor) -> tuple["Blocks", Tensor]:
        """Return the blocks of the groups marked in [G] bool, and which blocks they are."""
        kept = groups[self.group].nonzero().squeeze(1)
        renumbered = (groups.cumsum(0) - 1)[self.group[kept]]
        weights = None if self.weights is None else self.weights[kept]
        points, mask = self.points.index_select(0, kept), self.mask[kept]
        return Blocks(points, mask, renumbered, int(groups.sum()), weights), kept


def run_kmeans(
    groups: Groups, draws: Tensor, *, spread: bool, weights: Tensor | None = None
) -> Tensor:
    """Return the cluster [P] of each sample within its group, from 0 to K - 1.

    Minimizes Σ_x |x - u_{k(x)}|² in every group by Lloyd's iterations: x joins its nearest center
    (ties to the lowest), a center moves to the mean of its points. `draws` [G, K] in [0, 1) start
    it: by k-means++ if `spread`, else from points drawn at random. A group with at most K distinct
    points gets one cluster for each of them. A larger one gets K, or fewer where points lie closer
    together than the rounding of their products. With `weights` [P] a sample counts as so many.
    """
    blocks, sample = _lay_out(groups, weights)
    clusters, unsolved, middle = choose_centers(blocks, groups.sizes, draws, spread=spread)
    if bool(unsolved.any()):
        kept = None
        if not bool(unsolved.all()):
            blocks, kept = blocks.select(unsolved)
            middle = middle[unsolved]
        # Near the origin the products of Lloyd's iterations lose no digits to a common offset. In
        # place, because the copy is ours and fresh memory costs more than the subtraction.
        blocks.points.sub_(middle[blocks.group].unsqueeze(1))
        moved = run_lloyd(blocks, clusters if kept is None else clusters[kept], draws.shape[1])
        clusters = moved if kept is None else clusters.index_copy(0, kept, moved)
    result = torch.empty_like(groups.group)
    result[sample.flatten()] = clusters.flatten()
    return result


def _lay_out(groups: Groups, weights: Tensor | None) -> tuple[Blocks, Tensor]:
    """Return the samples of each group in blocks, and which sample [B, ROWS] each row holds."""
    device = groups.sizes.device
    num_blocks = (groups.sizes + (ROWS - 1)) // ROWS
    group = torch.arange(len(groups), device=device).repeat_interleave(num_blocks)
    first_block = num_blocks.cumsum(0) - num_blocks
    block = torch.arange(len(group), device=device) - first_block[group]
    position = block.unsqueeze(1) * ROWS + torch.arange(ROWS, device=device)
    size = groups.sizes[group].unsqueeze(1)
    sample = groups.order[groups.starts[group].unsqueeze(1) + position.minimum(size - 1)]
    mask = position < size
    points = groups.points.index_select(0, sample.flatten()).view(
        *sample.shape, groups.points.shape[1]
    )
    each = None if weights is None else weights[sample] * mask
    return Blocks(points, mask, group, len(groups), each), sample


def choose_centers(
    blocks: Blocks, sizes: Tensor, draws: Tensor, *, spread: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose up to K points of each group as centers; give each row its nearest one.

    k-means++: the first is any point, the next is x with probability D²(x) / Σ D², where D is the
    distance to the nearest center so far. Otherwise every point with D > 0 is as likely. Distances
    come from differences, so that points that are equal are at 0 exactly and never both chosen.

    Returns the nearest center [B, ROWS]; which groups [G] have points away from every center; and
    the mean [G, d] of the centers, a place amid the group.
    """
    # Which rows to take is settled on the CPU in float64, so that every device draws alike.
    mask, group, sizes = blocks.mask.cpu(), blocks.group.cpu(), sizes.cpu()
    num_blocks = torch.bincount(group, minlength=len(sizes))
    end = num_blocks.cumsum(0) * ROWS - 1
    begin = end - num_blocks * ROWS + 1
    row = begin + (draws[:, 0] * sizes).long().minimum(sizes - 1)
    flat = blocks.points.flatten(0, 1)
    middle = flat.new_zeros(len(sizes), flat.shape[1])
    clusters = torch.zeros_like(blocks.mask, dtype=torch.int64)
    distance = flat.new_full(clusters.shape, torch.inf)
    for k in range(draws.shape[1]):
        center = flat.index_select(0, row.to(flat.device))
        middle += center
        to_center = torch.cdist(
            blocks.points,
            center.index_select(0, blocks.group).unsqueeze(1),
            compute_mode="donot_use_mm_for_euclid_dist",
        ).squeeze(2)
        # In a group without points to spare nothing is closer than 0: a center in vain.
        clusters.masked_fill_(to_center < distance, k)
        distance = distance.minimum(to_center)
        weight = distance.cpu().double().square() if spread else (distance > 0).cpu().double()
        weight *= mask if blocks.weights is None else blocks.weights.cpu()
        total = weight.new_zeros(len(sizes)).index_add_(0, group, weight.sum(1))
        if k + 1 < draws.shape[1]:
            row = draw_rows(weight, total, draws[:, k + 1], group, begin, end)
    return clusters, (total > 0).to(flat.device), middle / draws.shape[1]


def draw_rows(
    weight: Tensor, total: Tensor, draws: Tensor, group: Tensor, begin: Tensor, end: Tensor
) -> Tensor:
    """Draw a row of each group with probability weight / total, through cumulative sums.

    Each group's weights are first scaled to sum to 1, so that large embeddings of one client do
    not drown small ones of another. A row of weight 0 never comes up where the total is above 0.
    """
    share = weight / total.clamp(min=torch.finfo(torch.float64).tiny)[group].unsqueeze(1)
    reached = share.flatten().cumsum(0)
    upper = reached[end]
    lower = torch.cat([upper.new_zeros(1), upper[:-1]])
    target = lower + draws * (upper - lower)
    return torch.searchsorted(reached, target, right=True).maximum(begin).minimum(end)


def run_lloyd(blocks: Blocks, clusters: Tensor, num_clusters: int) -> Tensor:
    """Run Lloyd's iterations until no row changes its cluster; groups drop out as they settle."""
    result, place = clusters, None
    slots = torch.arange(num_clusters, device=clusters.device)
    for _ in range(MAX_ITERATIONS):
        member = ((clusters.unsqueeze(2) == slots) & blocks.mask.unsqueeze(2)).to(
            blocks.points.dtype
        )
        if blocks.weights is not None:
            member *= blocks.weights.unsqueeze(2)
        counts = blocks.sum_groups(member.sum(1))
        sums = blocks.sum_groups(member.mT @ blocks.points)
        centers = sums / counts.clamp(min=1).unsqueeze(2)
        half_square = centers.square().sum(2) / 2
        if not bool(counts.all()):
            half_square = _refill(blocks, clusters, centers, counts)
        # |x - u|² / 2 without |x|², which is the same for every center.
        cost = torch.baddbmm(
            half_square.index_select(0, blocks.group).unsqueeze(1),
            blocks.points,
            centers.index_select(0, blocks.group).mT,
            alpha=-1,
        )
        before, clusters = clusters, cost.argmin(2)
        changed = (clusters != before).any(1)
        num_changed = int(changed.sum())
        if num_changed == 0:
            break
        if num_changed * 2 < len(changed):
            moving = torch.zeros(blocks.num_groups, dtype=torch.bool, device=changed.device)
            moving[blocks.group[changed]] = True
            # Copying the rest pays once it is the smaller part.
            if int(moving[blocks.group].sum()) * 2 < len(changed):
                result = clusters if place is None else result.index_copy(0, place, clusters)
                blocks, kept = blocks.select(moving)
                place = kept if place is None else place[kept]
                clusters = clusters[kept]
    return clusters if place is None else result.index_copy(0, place, clusters)


def _refill(blocks: Blocks, clusters: Tensor, centers: Tensor, counts: Tensor) -> Tensor:
    """Move an empty cluster to the point farthest from its center, one a group; return |u|² / 2.

    A cluster that stays empty costs infinity, so that nothing joins it. It happens rarely: a loop.
    """
    usable = counts > 0
    for group in (~usable).any(1).nonzero().squeeze(1).tolist():
        block = (blocks.group == group).nonzero().squeeze(1)
        points = blocks.points[block].flatten(0, 1)
        distance = (points - centers[group, clusters[block].flatten()]).norm(dim=1)
        farthest = distance.argmax()
        if distance[farthest] > 0:
            empty = int((~usable[group]).int().argmax())
            centers[group, empty] = points[farthest]
            usable[group, empty] = True
    return (centers.square().sum(2) / 2).masked_fill(~usable, torch.inf)
