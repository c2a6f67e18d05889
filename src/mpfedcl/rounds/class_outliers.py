"""Prototypes and class means that are not where the other clients have the same class.

Nobody can average them robustly: prototypes are collected, and sums must stay sums. So what is
misplaced is left out, prototypes one by one, of sums the whole client. Where a class lies is told
by its holders: the centre is the geometric median of their means, which fewer than half of them
cannot move far. A class with fewer than five holders is not judged: among so few, no rule can tell
who lies.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mpfedcl.prototypes import Prototypes
from mpfedcl.rounds.aggregation.geometric_median import weiszfeld

FEWEST_HOLDERS = 5
"""Clients that must hold a class before any of them is judged by the others."""
_ROUNDING = 1e-5
_TWICE = 2.0
"""As many, or as far, as of the others in the middle: what honest clients do not reach."""


@dataclass(frozen=True)
class ClassCentres:
    """Where the clients that hold a class have it, in the middle."""

    vectors: Tensor
    """[C, d] float64; zeros where a class is not judged."""
    judged: Tensor
    """[C] bool: the classes with enough holders."""
    held: Tensor
    """[C] bool: the classes that somebody holds."""
    means: dict[str, tuple[Tensor, Tensor, Tensor]]
    """By client: classes [k], means [k, d] and counts [k], float64."""

    @property
    def unjudged(self) -> list[int]:
        """The classes that somebody holds, and too few do."""
        return (self.held & ~self.judged).nonzero().squeeze(1).tolist()


def find_centres(prototypes: Mapping[str, Prototypes], num_classes: int) -> ClassCentres:
    """Return the geometric medians of the clients' class means."""
    means = {name: _class_means(each) for name, each in sorted(prototypes.items()) if len(each)}
    like = next((each for _, each, _ in means.values()), torch.zeros(0, 1, dtype=torch.float64))
    vectors = like.new_zeros(num_classes, like.shape[1])
    holders = torch.zeros(num_classes, dtype=torch.int64)
    for label in range(num_classes):
        rows = [mean[labels == label] for labels, mean, _ in means.values()]
        points = torch.cat(rows) if rows else like[:0]
        holders[label] = len(points)
        if len(points) >= FEWEST_HOLDERS:
            vectors[label] = weiszfeld(torch.cdist(points, points).square()) @ points
    return ClassCentres(vectors, holders >= FEWEST_HOLDERS, holders > 0, means)


@dataclass(frozen=True)
class KeptPrototypes:
    """What is left of the clients' prototypes, and what is not."""

    prototypes: dict[str, Prototypes]
    dropped: dict[str, list[int]] = field(default_factory=dict)
    """By client: the classes of which a prototype was left out."""
    unjudged: list[int] = field(default_factory=list)
    """Classes with too few holders."""


def drop_misplaced(
    prototypes: Mapping[str, Prototypes], num_classes: int, factor: float
) -> KeptPrototypes:
    """Leave out prototypes that lie nearer to another class's centre than to their own.

    Honest ones do so too, where clients differ or the model is young. So they are left out only of
    a client most of whose prototypes are misplaced, twice as many as of a median client; or one by
    one where they are twice as far from their centre as usual; and never of a class most of whose
    prototypes are misplaced. A prototype is left out too if it is `factor` times as long as the
    longest of a median client.
    """
    centres = find_centres(prototypes, num_classes)
    present = {name: each for name, each in sorted(prototypes.items()) if len(each)}
    labels = torch.cat([each.labels for each in present.values()]) if present else torch.zeros(0)
    if not len(labels):
        return KeptPrototypes(dict(prototypes))
    vectors = torch.cat([each.vectors for each in present.values()]).double()
    sizes = [len(each) for each in present.values()]
    own = (vectors - centres.vectors[labels]).norm(dim=1)
    misplaced = _find_misplaced(vectors, labels, own, centres)
    owners = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    by_client = _shares_of(misplaced, owners, len(sizes))
    is_odd = (by_client > 0.5) & (by_client > _TWICE * by_client.quantile(0.5))
    is_far = own > _TWICE * _medians_by(own, labels, num_classes)[labels]
    far = misplaced & (is_odd[owners] | is_far)
    far &= _shares_of(misplaced, labels, num_classes)[labels] <= 0.5
    longest = torch.stack([each.vectors.double().norm(dim=1).max() for each in present.values()])
    if len(longest) >= FEWEST_HOLDERS:
        far |= vectors.norm(dim=1) > factor * longest.quantile(0.5)
    kept, dropped = dict(prototypes), {}
    parts = torch.split(far, sizes)
    for (name, each), odd in zip(present.items(), parts, strict=True):
        if bool(odd.any()):
            kept[name] = Prototypes(each.vectors[~odd], each.labels[~odd], each.counts[~odd])
            dropped[name] = sorted(set(each.labels[odd].tolist()))
    return KeptPrototypes(kept, dropped, centres.unjudged)


def find_odd_clients(
    prototypes: Mapping[str, Prototypes], num_classes: int, factor: float
) -> dict[str, float]:
    """Return the clients whose class means differ more than sampling explains, and how much more.

    Features have length 1, so that samples of a class with mean m vary by b = 1 - |m|² around it,
    and the mean of n of them by b/n; by a more where clients differ, found as the median over all
    holders. A client's ratio is that of Σ_c n_c d_c² to Σ_c n_c (a + b/n_c) over the classes that
    are judged: about 1 for an honest one, whatever its size.
    """
    centres = find_centres(prototypes, num_classes)
    spread = (1 - centres.vectors.square().sum(1)).clamp(min=0)
    total = torch.zeros_like(spread)
    for labels, _, counts in centres.means.values():
        total[labels] += counts
    seen: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    for name, (labels, means, counts) in centres.means.items():
        judged = centres.judged[labels]
        labels, means, counts = labels[judged], means[judged], counts[judged]
        squares = (means - centres.vectors[labels]).square().sum(1)
        # The centre has been found from samples too.
        expected = spread[labels] * (1 / counts + 1 / total[labels])
        seen[name] = counts, squares, expected
    excess = [squares - expected for _, squares, expected in seen.values() if len(squares)]
    between = torch.cat(excess).quantile(0.5).clamp(min=0) if excess else 0.0
    ratios = {
        name: float((counts * squares).sum() / (counts * (expected + between)).sum())
        for name, (counts, squares, expected) in seen.items()
        if len(counts)
    }
    # Where all say exactly the same, nothing is odd, not even 0/0.
    return {name: ratio for name, ratio in ratios.items() if ratio > factor}


def _find_misplaced(vectors: Tensor, labels: Tensor, own: Tensor, centres: ClassCentres) -> Tensor:
    """Return which vectors [M] of judged classes are nearer to another judged centre."""
    places = centres.judged.nonzero().squeeze(1)
    if not len(places):
        return torch.zeros_like(labels, dtype=torch.bool)
    distances = torch.cdist(vectors, centres.vectors[places])
    others = distances.masked_fill(places == labels.unsqueeze(1), torch.inf)
    misplaced: Tensor = own > others.min(1).values + _ROUNDING
    return misplaced & centres.judged[labels]


def _shares_of(flags: Tensor, groups: Tensor, count: int) -> Tensor:
    """Return what share of each group is flagged [count]."""
    sizes = torch.bincount(groups, minlength=count)
    return torch.bincount(groups[flags], minlength=count) / sizes.clamp(min=1)


def _medians_by(values: Tensor, groups: Tensor, count: int) -> Tensor:
    """Return the median value of each group [count]; 0 of an empty one."""
    medians = torch.zeros(count, dtype=values.dtype, device=values.device)
    for group in groups.unique().tolist():  # type: ignore[no-untyped-call]
        medians[group] = values[groups == group].quantile(0.5)
    return medians


def _class_means(prototypes: Prototypes) -> tuple[Tensor, Tensor, Tensor]:
    """Return a client's classes, its mean of each by counts, and their counts."""
    labels, place = torch.unique(prototypes.labels, return_inverse=True)
    counts = torch.zeros(len(labels), dtype=torch.float64, device=labels.device)
    counts.index_add_(0, place, prototypes.counts.double())
    sums = counts.new_zeros(len(labels), prototypes.dimension)
    sums.index_add_(0, place, prototypes.counts.unsqueeze(1) * prototypes.vectors.double())
    return labels, sums / counts.unsqueeze(1), counts
